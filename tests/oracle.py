"""The update rules of DESIGN.md section 2 as one float64 process: the reference that the product is tested against.

Written from the equations only. Nothing here is shared with the product, with torch.optim or with DeepSpeed:

    g~_t   = sum over ranks i, micro-batches k of  grad f(theta~_t; xi~_ik)     count N~_t
    g_t    = sum over ranks i, micro-batches k of  grad f(theta_t ; xi_ik )     count N_t
    theta~_{t+1}          = Opt(theta_t, S_t,  g~_t / N~_t)                       (S_t is not changed)
    (theta_{t+1},S_{t+1}) = Opt(theta_t, S_t, (g~_t + g_t) / (N~_t + N_t))

    sync   gradients at theta_t
    dpu    gradients at theta_{t-1} (theta_{-1} = theta_0), applied to theta_t
    wp     as dpu, but the weights used are those that the commit showed: Opt(theta_{t+1}, S_{t+1}, g_t)

Gradients come from a callback, so that the model, the loss and the data stay in the test. Loss scaling (Micikevicius et
al. 2018): the callback gets the scale and answers with scaled gradients; each half is unscaled by the scale that it was
computed with. The scaler hears of a commit's outcome where the outcome is known: before the second half of the next
update (acco), after the next update's gradients (dpu, wp), at once (sync).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Params = dict[str, Array]
"""Parameter (or gradient) arrays by name, float64."""
State = dict[str, dict[str, Array | int]]
"""Optimizer state by parameter name: a dict of moments and the step count."""
Gradient = Callable[..., Params]
"""(weights, update, rank, micro-batch of the update) -> gradient of that micro-batch's mean loss; with a loss scaler
(weights, update, rank, micro-batch, scale) -> gradient of the scaled loss."""
Counts = Callable[[int, int], tuple[int, int]]
"""(update, rank) -> micro-batches in the first half, micro-batches after it."""


@dataclass(frozen=True)
class Rule:
    """One optimizer rule and its hyperparameters, for one parameter group.

    `kind`: "adamw" (decoupled decay), "adam" (L2), "sgd" (momentum, L2), "lion" (sign of the interpolated moment,
    decoupled decay).
    """

    kind: str
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9

    def apply(self, theta: Array, state: dict, grad: Array, lr: float) -> tuple[Array, dict]:
        """Opt(theta, S, g) -> (theta', S') for one tensor. Pure: changes none of its arguments."""
        return apply_rule(self, theta, state, grad, lr)


class SmallestScaleError(ArithmeticError):
    """An overflow at the smallest loss scale."""


@dataclass
class LossScale:
    """A loss scale; dynamic unless `window` is 0.

    It doubles whenever a multiple of `window` updates in a row were good since the one after the last overflow (or
    since the first). The `hysteresis`-th overflow, and each after it, halves it.
    """

    value: float
    window: int = 0
    minimum: float = 1.0
    hysteresis: int = 1
    _good: int = -1
    _patience: int = 0

    def tell(self, applied: bool) -> None:
        """One update was applied, or skipped for an overflow."""
        if self.window == 0:
            return
        if applied:
            self._good += 1
            if self._good > 0 and self._good % self.window == 0:
                self.value *= 2.0
                self._patience = 0
            return
        self._good = -1
        self._patience += 1
        if self._patience >= self.hysteresis:
            if self.value == self.minimum:
                raise SmallestScaleError(self.value)
            self.value = max(self.value / 2.0, self.minimum)


@dataclass(frozen=True)
class Group:
    """Parameters (by name) that follow one rule."""

    names: tuple[str, ...]
    rule: Rule


@dataclass
class Update:
    """What the oracle computed in one update t.

    Attributes:
        theta: theta_{t+1}.
        state: S_{t+1}.
        estimate: theta~_{t+1} (mode acco outside the warm-up; None otherwise), of the first of the estimate groups.
        shown: weights that the commit showed to compute (theta_{t+1}; in mode wp the prediction).
        estimate_norm, commit_norm: norms of the averaged gradients before clipping.
        applied: False if the update was skipped.
        micro_batches: total count in the commit's average.
        lr_factor: factor on every group's learning rate in this update.
        loss_scales: with a loss scaler, the scales of the first and of the second half.
        estimates, estimate_norms: of every estimate group.
    """

    theta: Params
    state: State
    estimate: Params | None
    shown: Params
    estimate_norm: float
    commit_norm: float
    applied: bool
    micro_batches: int
    lr_factor: float
    loss_scales: tuple[float, float] = (1.0, 1.0)
    estimates: Sequence[Params] = ()
    estimate_norms: Sequence[float] = ()


def apply_rule(rule: Rule, theta: Array, state: dict, grad: Array, lr: float) -> tuple[Array, dict]:
    """Opt(theta, S, g) -> (theta', S') for one tensor. Pure: changes none of its arguments."""
    step = state.get("step", 0) + 1
    zeros = np.zeros_like(theta)
    if rule.kind in ("adamw", "adam"):
        beta1, beta2 = rule.betas
        if rule.kind == "adam":
            grad = grad + rule.weight_decay * theta
        m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * grad
        v = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * grad * grad
        direction = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + rule.eps)
        decay = rule.weight_decay * theta if rule.kind == "adamw" else 0.0
        return theta - lr * (direction + decay), {"step": step, "exp_avg": m, "exp_avg_sq": v}
    if rule.kind == "sgd":
        # torch's form: the first moment is the gradient itself, later ones momentum * buffer + gradient.
        grad = grad + rule.weight_decay * theta
        buffer = rule.momentum * state.get("momentum_buffer", zeros) + grad
        return theta - lr * buffer, {"step": step, "momentum_buffer": buffer}
    if rule.kind == "lion":
        beta1, beta2 = rule.betas
        m = state.get("exp_avg", zeros)
        direction = np.sign(beta1 * m + (1 - beta1) * grad)
        moved = theta - lr * (direction + rule.weight_decay * theta)
        return moved, {"step": step, "exp_avg": beta2 * m + (1 - beta2) * grad}
    raise ValueError(f"no rule {rule.kind!r}")


def norm(grad: Params) -> float:
    """Global L2 norm."""
    return math.sqrt(sum(float(np.sum(g * g)) for g in grad.values()))


def clipped(grad: Params, clip: float) -> Params:
    """The gradient divided by max(1, (norm + 1e-6) / clip); clip 0 switches clipping off."""
    if clip == 0.0:
        return grad
    coefficient = max(1.0, (norm(grad) + 1e-6) / clip)
    return {name: g / coefficient for name, g in grad.items()}


def _finite(grad: Params) -> bool:
    return all(bool(np.isfinite(g).all()) for g in grad.values())


@dataclass
class Oracle:
    """Runs updates one at a time; `updates(n)` returns n more records.

    Attributes:
        theta: theta_0 by name.
        groups: rules; every name of `theta` belongs to exactly one group, others never move.
        gradient: see `Gradient`.
        mode: "acco", "dpu", "wp" or "sync".
        ranks: data-parallel ranks.
        counts: see `Counts`.
        clip: gradient clipping, 0 = off.
        warmup_updates: updates made by the sync rule first.
        lr_factor: factor on the learning rates as a function of the number of updates applied so far.
        loss_scale: loss scaler; see `Gradient`.
        add: (running sum of a rank, gradient) -> the sum as the gradient buffer holds it.
        wire: a rank's sum -> what of it arrives at the owner of a shard.
        coarse_sum: (sums of g~ by rank) -> their sum as the owners of the shards see it in an estimate.
        coarse_shown: (theta_t, estimate) -> the estimate as compute sees it. Neither touches the commit.
        estimate_groups: ranks that make an estimate from their own gradients; None: all ranks together.
    """

    theta: Params
    groups: Sequence[Group]
    gradient: Gradient
    mode: str
    ranks: int
    counts: Counts
    clip: float = 0.0
    warmup_updates: int = 0
    lr_factor: Callable[[int], float] = lambda applied: 1.0
    loss_scale: LossScale | None = None
    add: Callable[[Array, Array], Array] = np.add
    wire: Callable[[Array], Array] = lambda total: total
    coarse_sum: Callable[[Sequence[Params]], Params] | None = None
    coarse_shown: Callable[[Params, Params], Params] | None = None
    estimate_groups: Sequence[Sequence[int]] | None = None
    state: State = field(default_factory=dict)
    update: int = 0
    applied: int = 0

    def __post_init__(self) -> None:
        self.theta = {name: np.asarray(value, dtype=np.float64).copy() for name, value in self.theta.items()}
        self._estimates = [self.theta] * self.ranks  # theta~_t, as each rank has it
        self._before = self.theta  # weights in use while the commit of update t-1 is in flight (dpu, wp)
        self._shown = self.theta  # what the commit of update t-1 shows once it has arrived
        self._untold: bool | None = None  # outcome of a commit that the loss scaler has not heard of

    def updates(self, n: int) -> list[Update]:
        return [self._one_update() for _ in range(n)]

    def _one_update(self) -> Update:
        t = self.update
        mode = "sync" if t < self.warmup_updates else self.mode
        record = self._acco(t) if mode == "acco" else self._whole(t, mode)
        self._untold = record.applied
        if mode == "sync":
            self._tell_scaler()
        self.theta, self.state = record.theta, record.state
        self.applied += record.applied
        self.update += 1
        return record

    def _sum(self, weights: Params | list[Params], t: int, half: int | None) -> tuple[Params, int, float]:
        """Sum of gradients over ranks and the micro-batches of one half (None: the whole update).

        Args:
            weights: where they are taken; a list if that differs by rank.

        Returns the sum, the number of micro-batches and the loss scale.
        """
        total = {name: np.zeros_like(value) for name, value in self.theta.items()}
        self._sums: list[Params] = []
        count = 0
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        scaled = () if self.loss_scale is None else (scale,)
        for rank in range(self.ranks):
            first, second = self.counts(t, rank)
            micros = {0: range(first), 1: range(first, first + second), None: range(first + second)}[half]
            own = {name: np.zeros_like(value) for name, value in self.theta.items()}
            for k in micros:
                at = weights[rank] if isinstance(weights, list) else weights
                for name, g in self.gradient(at, t, rank, k, *scaled).items():
                    own[name] = self.add(own[name], g)
                count += 1
            for name, g in own.items():
                total[name] = total[name] + self.wire(g) / scale
            self._sums.append({name: g / scale for name, g in own.items()})
        return total, count, scale

    def _whole_sum(self, first: Sequence[Params], scale: float) -> Params:
        """Sum over ranks of sums that stayed on their ranks until the end of the update, and travel once."""
        total = {name: np.zeros_like(value) for name, value in self.theta.items()}
        for before, after in zip(first, self._sums, strict=True):
            for name in after:
                total[name] = total[name] + self.wire((before[name] + after[name]) * scale) / scale
        return total

    def _tell_scaler(self) -> None:
        if self.loss_scale is not None and self._untold is not None:
            self.loss_scale.tell(self._untold)
        self._untold = None

    def _opt(self, theta: Params, state: State, grad: Params) -> tuple[Params, State]:
        new_theta, new_state = dict(theta), copy.deepcopy(state)
        factor = self.lr_factor(self.applied)
        grad = clipped(grad, self.clip)
        for group in self.groups:
            for name in group.names:
                moved = group.rule.apply(theta[name], state.get(name, {}), grad[name], group.rule.lr * factor)
                new_theta[name], new_state[name] = moved
        return new_theta, new_state

    def _acco(self, t: int) -> Update:
        first, n_first, first_scale = self._sum(self._estimates, t, 0)
        first_sums = self._sums
        groups = self.estimate_groups or [range(self.ranks)]
        seen = [self._seen([first_sums[rank] for rank in group], first_scale) for group in groups]
        self._tell_scaler()
        second, n_second, second_scale = self._sum(self.theta, t, 1)
        if self.coarse_sum is not None:
            second = self._whole_sum(first_sums, second_scale)
            first = {name: np.zeros_like(g) for name, g in first.items()}
        factor = self.lr_factor(self.applied)
        estimates, norms = [], []
        for group, total in zip(groups, seen, strict=True):
            count = sum(self.counts(t, rank)[0] for rank in group)
            estimates.append(self.theta)
            norms.append(0.0)
            if count and _finite(total):
                average = self._trained({name: g / count for name, g in total.items()})
                norms[-1] = norm(average)
                estimates[-1], _ = self._opt(self.theta, self.state, average)
                if self.coarse_shown is not None:
                    estimates[-1] = self.coarse_shown(self.theta, estimates[-1])
        theta, state, commit_norm, applied = self._commit(first, second, n_first + n_second)
        # While the commit of update t is in flight, compute goes on at the estimate made from its first half.
        for group, estimate in zip(groups, estimates, strict=True):
            for rank in group:
                self._estimates[rank] = estimate
        self._before = self._shown = theta
        count, scales = n_first + n_second, (first_scale, second_scale)
        figures = (commit_norm, applied, count, factor, scales, estimates, norms)
        return Update(theta, state, estimates[0], theta, norms[0], *figures)

    def _seen(self, sums: Sequence[Params], scale: float) -> Params:
        """What the owners of an estimate see of these ranks' first halves."""
        if self.coarse_sum is not None:
            return self.coarse_sum(sums)
        return {name: sum(self.wire(own[name] * scale) / scale for own in sums) for name in sums[0]}

    def _whole(self, t: int, mode: str) -> Update:
        weights = self.theta if mode == "sync" else self._before
        total, count, scale = self._sum(weights, t, None)
        self._tell_scaler()
        factor = self.lr_factor(self.applied)
        nothing = {name: np.zeros_like(g) for name, g in total.items()}
        theta, state, commit_norm, applied = self._commit(nothing, total, count)
        shown = theta
        if mode == "wp" and applied:
            average = self._trained({name: g / count for name, g in total.items()})
            shown, _ = self._opt(theta, state, average)
        # One round of delay: the next update computes at what the previous commit showed. After a waited round
        # (sync) there is nothing in flight.
        self._before = shown if mode == "sync" else self._shown
        self._shown = shown
        self._estimates = [theta] * self.ranks
        return Update(theta, state, None, shown, 0.0, commit_norm, applied, count, factor, (scale, scale))

    def _commit(self, first: Params, second: Params, count: int) -> tuple[Params, State, float, bool]:
        total = self._trained({name: first[name] + second[name] for name in first})
        if count == 0 or not _finite(total):
            return self.theta, self.state, math.nan, False
        average = {name: g / count for name, g in total.items()}
        theta, state = self._opt(self.theta, self.state, average)
        return theta, state, norm(average), True

    def _trained(self, grad: Params) -> Params:
        """Only what some group trains: frozen weights are in no norm."""
        names = {name for group in self.groups for name in group.names}
        return {name: g for name, g in grad.items() if name in names}


def even_counts(first: int, total: int) -> Counts:
    """Every rank does `total` micro-batches per update, `first` of them in the first half."""
    return lambda update, rank: (first, total - first)
