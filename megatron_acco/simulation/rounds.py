"""Updates of every method, played event by event on all ranks at once (numpy over ranks).

What all methods share: a round's exchange begins when the last rank hands its gradients over, and ends for all at the
same time; a rank that has nothing to compute until then waits. Nothing else is assumed, so that with equal ranks and no
spread every method takes exactly the time of `cost_model.Costs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy

from megatron_acco.cost_model import Costs
from megatron_acco.simulation.compute_times import Array, ComputeTimes

# Updates until what is in flight is as it will stay.
_WARM_UP = 3
_BLOCK = 64  # micro-batches that are drawn at once


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        ranks: data-parallel ranks.
        steps: micro-batches per rank and update; of `adaptive` the least.
        times: of compute.
        costs: of the collectives; `costs.compute` is not used.
        most_per_half: limit of `adaptive`.
        updates: how many are played and counted.
        seed: of everything random; all methods draw from generators of the same seed.
        wire_bytes: of a value that is not quantized.
        per_node: ranks of a node.
        inside: seconds of an exchange among these.
    """

    ranks: int
    steps: int
    times: ComputeTimes
    costs: Costs
    most_per_half: int = 64
    updates: int = 200
    seed: int = 0
    wire_bytes: int = 2
    per_node: int = 1
    inside: float = 0.0

    def costs_of(self, method: str) -> Costs:
        """What the cost model takes for one of METHODS: also compute, and the exchange of an estimate, of 8 bits unless
        `costs` has it."""
        costs = replace(self.costs, compute=self.times.mean)
        if method == "acco-coarse" and costs.estimate is None:
            return costs.with_estimate_of(8, self.wire_bytes)
        return replace(costs, estimate=self.inside) if method == "acco-node" else costs


@dataclass(frozen=True)
class Played:
    """One method's updates. Times are seconds.

    Attributes:
        seconds: of every update, mean over the ranks, [updates].
        micro_batches: per rank and update, mean.
        rate: micro-batches per second, all ranks together.
        exposed: per update, what even the rank that waited least in each round waited: for the exchange.
        waiting: per update, what ranks waited beyond that, mean: for slower ranks.
    """

    seconds: Array
    micro_batches: float
    rate: float
    exposed: float
    waiting: float


class _Ranks:
    """The clocks of all ranks, and what has been counted."""

    def __init__(self, setting: Setting) -> None:
        self._random = numpy.random.default_rng(setting.seed)
        self._times = setting.times
        self._means = setting.times.means(setting.ranks, self._random)
        self._tolerance = 1e-9 * setting.times.mean
        self.clock = numpy.zeros(setting.ranks)
        self.in_flight = numpy.zeros(setting.ranks)  # end of the exchange that is on its way
        self.start_counting()

    def start_counting(self) -> None:
        """Forget what has been counted so far."""
        self.micro_batches = numpy.zeros(len(self.clock))
        self.exposed = self.waited = 0.0

    def draw(self, count: int) -> Array:
        """Times of the next micro-batches, [ranks, count]; they count as done."""
        self.micro_batches += count
        return self._times.draw(self._means, count, self._random)

    def compute(self, count: int) -> None:
        """Do so many micro-batches."""
        while count > 0:
            self.clock += self.draw(min(count, _BLOCK)).sum(axis=1)
            count -= _BLOCK

    def compute_until(self, moment: Array, least: int, most: int) -> None:
        """Go on, micro-batch by micro-batch, to the first end of one that is not before `moment`."""
        self.compute(least)
        for _ in range(least, most):
            going = self.clock < moment - self._tolerance
            if not going.any():
                return
            self.clock += numpy.where(going, self._times.draw(self._means, 1, self._random)[:, 0], 0.0)
            self.micro_batches += going

    def wait(self, moment: Array | float) -> None:
        """Until then, unless it has passed."""
        waits = numpy.maximum(moment - self.clock, 0.0)
        self.exposed += float(waits.min())
        self.waited += float(waits.mean())
        self.clock += waits

    def hand_over(self, exchange: float, together: int | None = None) -> None:
        """Wait for what is in flight, then begin the next exchange when the last rank is there; of each `together`
        consecutive ranks by themselves, if given."""
        self.wait(self.in_flight)
        groups = self.clock.reshape(-1, together or len(self.clock))
        self.in_flight = numpy.repeat(groups.max(axis=1) + exchange, groups.shape[1])


def play(method: str, setting: Setting) -> Played:
    """Play the updates of one of METHODS.

    Raises:
        ValueError: one of HALVES with a single micro-batch per update.
    """
    if method in HALVES and setting.steps < 2:
        raise ValueError("mode acco needs two micro-batches per update, one for each half")
    ranks, update = _Ranks(setting), METHODS[method]
    for _ in range(_WARM_UP):
        update(ranks, setting)
    ranks.start_counting()
    begin = ranks.clock.copy()
    ends = [begin.mean()]
    for _ in range(setting.updates):
        update(ranks, setting)
        ends.append(ranks.clock.mean())
    return Played(
        seconds=numpy.diff(ends),
        micro_batches=float(ranks.micro_batches.mean()) / setting.updates,
        rate=float((ranks.micro_batches / (ranks.clock - begin)).sum()),
        exposed=ranks.exposed / setting.updates,
        waiting=(ranks.waited - ranks.exposed) / setting.updates,
    )


# ---- one update of each method --------------------------------------------------------------------------------------


def _compute(ranks: _Ranks, setting: Setting) -> None:
    ranks.compute(setting.steps)


def _sync(ranks: _Ranks, setting: Setting) -> None:
    ranks.compute(setting.steps)
    ranks.wait(ranks.clock.max() + setting.costs.exchange)


def _zero1(ranks: _Ranks, setting: Setting) -> None:
    ranks.compute(setting.steps)
    ranks.wait(ranks.clock.max() + setting.costs.reduction_seconds + setting.costs.gathering_seconds)


def _zero1_overlap(ranks: _Ranks, setting: Setting) -> None:
    """The all-reduce follows the last backward (two thirds of a micro-batch) bucket by bucket."""
    ranks.compute(setting.steps - 1)
    last = ranks.draw(1)[:, 0]
    reduced = _behind_backward(ranks, last, setting.costs.reduction_seconds, setting.costs.blocking)
    ranks.wait(reduced + setting.costs.gathering_seconds)


def _zero2(ranks: _Ranks, setting: Setting) -> None:
    for _ in range(setting.steps):
        ranks.compute(1)
        ranks.wait(ranks.clock.max() + setting.costs.reduction_seconds)
    ranks.wait(ranks.clock.max() + setting.costs.gathering_seconds)


def _ddp(ranks: _Ranks, setting: Setting) -> None:
    """Gloo's threads reduce behind the last backward, too."""
    _zero1_overlap(ranks, replace(setting, costs=replace(setting.costs, blocking=False)))


def _fsdp2(ranks: _Ranks, setting: Setting) -> None:
    (_zero1 if setting.costs.blocking else _megatron)(ranks, setting)


def _megatron(ranks: _Ranks, setting: Setting) -> None:
    """Megatron's distributed optimizer: the reduce-scatter behind the last backward, the all-gather behind the first
    forward of the next update (a third of a micro-batch), layer by layer."""
    costs, half = setting.costs, setting.costs.exchange / 2.0
    first = last = ranks.draw(1)[:, 0]
    ranks.clock += first / 3.0
    ranks.wait(ranks.in_flight)
    if setting.steps > 1:
        ranks.clock += first * 2.0 / 3.0
        ranks.compute(setting.steps - 2)
        last = ranks.draw(1)[:, 0]
        ranks.clock += last / 3.0
    reduced = _behind_backward(ranks, last, half, costs.blocking, forward=0.0)
    ranks.wait(reduced + (half if costs.blocking else 0.0))
    ranks.in_flight[:] = reduced + half


def _behind_backward(ranks: _Ranks, last: Array, seconds: float, blocking: bool, forward: float = 1.0 / 3.0) -> float:
    """Do the rest of the last micro-batch; the end of a collective that follows its backward."""
    ranks.clock += forward * last
    backward = float(ranks.clock.max())
    ranks.clock += last * 2.0 / 3.0
    done = float(ranks.clock.max())
    return done + seconds if blocking else max(backward + seconds, done)


def _delayed(ranks: _Ranks, setting: Setting) -> None:
    ranks.compute(setting.steps)
    ranks.hand_over(setting.costs.exchange)


def _acco(ranks: _Ranks, setting: Setting) -> None:
    for half in _halves(setting.steps):
        ranks.compute(half)
        ranks.hand_over(setting.costs.exchange)


def _acco_coarse(ranks: _Ranks, setting: Setting) -> None:
    _uneven(ranks, setting, setting.costs_of("acco-coarse"), None)


def _acco_node(ranks: _Ranks, setting: Setting) -> None:
    _uneven(ranks, setting, setting.costs_of("acco-node"), min(setting.per_node, setting.ranks))


def _uneven(ranks: _Ranks, setting: Setting, costs: Costs, together: int | None) -> None:
    """The first half covers the commit's exchange, the second the estimate's."""
    assert costs.estimate is not None
    first = costs.best_first_half(setting.steps)
    ranks.compute(first)
    ranks.hand_over(costs.estimate, together)
    ranks.compute(setting.steps - first)
    ranks.hand_over(costs.exchange)


def _adaptive(ranks: _Ranks, setting: Setting) -> None:
    for least in _halves(max(2, setting.steps)):
        ranks.compute_until(ranks.in_flight, least, max(least, setting.most_per_half))
        ranks.hand_over(setting.costs.exchange)


def _halves(steps: int) -> tuple[int, int]:
    return steps // 2, steps - steps // 2


HALVES = ("acco", "acco-coarse", "acco-node")
"""The methods that need two micro-batches per update."""
METHODS: dict[str, Callable[[_Ranks, Setting], None]] = {
    "compute": _compute,
    "zero1": _zero1,
    "zero1-overlap": _zero1_overlap,
    "zero2": _zero2,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
    "sync": _sync,
    "dpu": _delayed,
    "wp": _delayed,  # the second application of the optimizer takes no exchange
    "acco": _acco,
    "acco-coarse": _acco_coarse,
    "acco-node": _acco_node,
    "adaptive": _adaptive,
}
