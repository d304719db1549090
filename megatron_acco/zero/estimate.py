"""Optimizer applications of a round: the real step, and the look-ahead that leaves no trace.

Both run in the lane, for one parameter group at a time, under the hyper-parameters captured when the round was
launched: the main thread may already be stepping its scheduler.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import Tensor

# Elements handled at once: temporaries stay in cache on a CPU, and small beside the shard on an accelerator.
CPU_CHUNK, CHUNK = 1 << 18, 1 << 24

Hyper = dict[str, Any]


def capture_hyper_parameters(optimizer: torch.optim.Optimizer) -> list[Hyper]:
    """A copy of every group's options (all but the parameters)."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class BaseOptimizer:
    """A torch optimizer whose groups hold one flat fp32 partition each, applied under captured hyper-parameters.

    Attributes:
        bytes_sent: by this rank in steps and look-aheads so far (of optimizers that communicate).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.bytes_sent = 0
        self._optimizer = optimizer
        self._twin = _twin(optimizer)
        self._decay_mode = adam_weight_decay_mode(optimizer)
        # Applications that are still watched for what the optimizer remembers in the wrong place.
        self._watched = 4

    def check_state(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raises: ValueError if state that is to be loaded, by group, does not belong to these partitions."""

    def step(self, index: int, hyper: Hyper, grad: Tensor) -> None:
        """(theta, S) <- Opt(theta, S, grad) for group `index`; `grad` [partition] fp32 may be overwritten."""
        self._forget_running_products(index, hyper)
        group = self._run(index, hyper, grad)
        self._refuse_hidden_state()
        # What the optimizer itself keeps in its groups (a step count, say) belongs to its state.
        changed = {key: value for key, value in group.items() if key not in hyper or not _equal(value, hyper[key])}
        self._optimizer.param_groups[index].update(changed)
        # torch's LR schedulers warn unless the optimizer that they know has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def look_ahead(self, index: int, hyper: Hyper, grad: Tensor, scale: float, out: Tensor) -> None:
        """out <- Opt(theta, S, scale * grad) for group `index`; theta, S and `grad` are not changed.

        Args:
            grad: [partition], fp32.
            out: [partition], parameter dtype; mutated.
        """
        param = self._param(index)
        decoupled = self._decay_mode(hyper) if self._decay_mode is not None else None
        if decoupled is not None:
            state = self._optimizer.state.get(param) or {}
            adam_look_ahead(param, state, hyper, grad, scale, decoupled, out)
            return
        restore = _snapshot(self._optimizer, param)
        try:
            self._run(index, hyper, grad * scale)
            out.copy_(param.detach())
        finally:
            restore()

    def _param(self, index: int) -> Tensor:
        return self._optimizer.param_groups[index]["params"][0]

    def _run(self, index: int, hyper: Hyper, grad: Tensor) -> Hyper:
        return self._step_alone(self._param(index), {**copy.deepcopy(hyper)}, grad)

    def _step_alone(self, param: Tensor, group: Hyper, grad: Tensor) -> Hyper:
        """The optimizer's own step() on one parameter under the options `group`, which it may change; returns them."""
        twin = self._twin
        twin.__dict__.update(_instance_state(self._optimizer))
        twin.param_groups = [{**group, "params": [param]}]
        param.grad = grad
        remembered = _remembered(twin) if self._watched else {}
        try:
            twin.step()
        finally:
            param.grad = None
        if self._watched:
            self._watched -= 1
            self._refuse_changed(remembered, _remembered(twin))
        return {key: value for key, value in twin.param_groups[0].items() if key != "params"}

    def _refuse_changed(self, before: Hyper, after: Hyper) -> None:
        """As `_refuse_hidden_state`, for what was changed in place."""
        for name, value in after.items():
            if not _same(value, before.get(name)):
                raise ValueError(
                    f"{type(self._optimizer).__name__} changes {name} in step(); with acco an optimizer must keep what "
                    f"it remembers in the state of its parameters or in its parameter groups"
                )

    def _refuse_hidden_state(self) -> None:
        """State outside `optimizer.state` would be stepped once per group, by estimates too, and not be saved."""
        before = _instance_state(self._optimizer)
        changed = [k for k, v in _instance_state(self._twin).items() if k not in before or not _equal(v, before[k])]
        if changed:
            raise ValueError(
                f"{type(self._optimizer).__name__} changes its attribute {changed[0]!r} in step(); with acco an "
                f"optimizer must keep what it remembers in its state or its parameter groups"
            )

    def _forget_running_products(self, index: int, hyper: Hyper) -> None:
        """Make DeepSpeed's Adam kernels on the CPU compute beta^t afresh, so that a resumed run is the same run.

        They keep beta^t as a running product while steps come in a row and take the power after a jump, which
        differs in the last bit. A step of a throw-away element, two steps ahead, is such a jump.
        """
        param = self._param(index)
        state = self._optimizer.state.get(param)
        if not state or param.device.type != "cpu" or type(self._optimizer) not in (FusedAdam, DeepSpeedCPUAdam):
            return
        throw_away = torch.zeros(1, requires_grad=True)
        zeros = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        self._optimizer.state[throw_away] = {"step": int(state["step"]) + 1, **zeros}
        self._step_alone(throw_away, {**hyper, "lr": 0.0}, torch.zeros(1))
        del self._optimizer.state[throw_away]


def adam_weight_decay_mode(optimizer: torch.optim.Optimizer) -> Callable[[Hyper], bool | None] | None:
    """For optimizers whose step is Adam: a function from a group's options to "is the decay decoupled".

    The function returns None for a group whose options leave plain Adam (amsgrad, maximize); None instead of a
    function means that the optimizer is not one of them. Exact types only: a subclass may do something else.
    """
    kind = type(optimizer)
    if kind in (FusedAdam, DeepSpeedCPUAdam):
        if not getattr(optimizer, "fp32_optimizer_states", True):
            return None
        decoupled = bool(optimizer.adam_w_mode)  # type: ignore[attr-defined]
        return lambda hyper: None if hyper.get("amsgrad") else decoupled
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        is_adamw = kind is torch.optim.AdamW

        def torch_mode(hyper: Hyper) -> bool | None:
            if hyper.get("amsgrad") or hyper.get("maximize"):
                return None
            return bool(hyper.get("decoupled_weight_decay", is_adamw)) or is_adamw

        return torch_mode
    return None


def adam_look_ahead(
    param: Tensor, state: Hyper, hyper: Hyper, grad: Tensor, scale: float, decoupled: bool, out: Tensor
) -> None:
    """out <- the parameters after one Adam step, reading m and v and writing nothing else.

    m' = b1 m + (1 - b1) g;  v' = b2 v + (1 - b2) g^2;  t' = t + 1
    theta' = theta (1 - lr wd) - lr / (1 - b1^t') * m' / (sqrt(v' / (1 - b2^t')) + eps)
    (Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019. With L2 decay g <- g + wd theta, and no factor.)

    Args:
        param, grad: [n] fp32; `scale` multiplies `grad`.
        state: may be empty (no step taken yet).
        out: [n], any float dtype; mutated.
    """
    step = int(state.get("step", 0)) + 1
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    lr, eps, decay = float(hyper["lr"]), float(hyper["eps"]), float(hyper["weight_decay"])
    correct = bool(hyper.get("bias_correction", True))
    step_size = lr / (1 - beta1**step if correct else 1.0)
    root_correction = math.sqrt(1 - beta2**step if correct else 1.0)
    exp_avg, exp_avg_sq = state.get("exp_avg"), state.get("exp_avg_sq")
    chunk = CPU_CHUNK if param.device.type == "cpu" else CHUNK
    for start in range(0, param.numel(), chunk):
        part = slice(start, start + chunk)
        theta = param.detach()[part]
        g = grad[part] * scale
        if decay and not decoupled:
            g.add_(theta, alpha=decay)
        denominator = (g * g).mul_(1 - beta2)
        m = g.mul_(1 - beta1)
        if exp_avg is not None and exp_avg_sq is not None:
            denominator.add_(exp_avg_sq[part], alpha=beta2)
            m.add_(exp_avg[part], alpha=beta1)
        denominator.sqrt_().div_(root_correction).add_(eps)
        shown = theta * (1 - lr * decay) if decay and decoupled else theta.clone()
        out[part].copy_(shown.addcdiv_(m, denominator, value=-step_size))


def _instance_state(optimizer: torch.optim.Optimizer) -> Hyper:
    # torch's LR schedulers hang a wrapped `step`, bound to the original, on the instance.
    return {key: value for key, value in optimizer.__dict__.items() if key not in ("step", "param_groups")}


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An instance that shares everything with `optimizer` but its group list.

    The lane steps the twin, so that the groups that schedulers and users see and change are never swapped under
    their feet. Optimizers with a destructor own native state, which the twin must not free.
    """
    kind = type(optimizer)
    if hasattr(kind, "__del__"):
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None})
    twin = object.__new__(kind)
    twin.__dict__.update(_instance_state(optimizer))
    return twin


def _snapshot(optimizer: torch.optim.Optimizer, param: Tensor) -> Callable[[], None]:
    """A function that puts `param` and its optimizer state back, in place, to what they are now."""
    weights = param.detach().clone()
    state = optimizer.state.get(param)
    saved = (
        None
        if state is None
        else {key: value.clone() if torch.is_tensor(value) else copy.deepcopy(value) for key, value in state.items()}
    )

    def restore() -> None:
        param.detach().copy_(weights)
        if saved is None:
            optimizer.state.pop(param, None)
            return
        state = optimizer.state[param]
        for key in [key for key in state if key not in saved]:
            del state[key]
        for key, value in saved.items():
            # In place: checkpoint fragments are views of the state tensors.
            if torch.is_tensor(value) and torch.is_tensor(state.get(key)) and state[key].shape == value.shape:
                state[key].copy_(value)
            else:
                state[key] = value

    return restore


def _remembered(optimizer: torch.optim.Optimizer) -> Hyper:
    """Copies of the plain values that the optimizer keeps outside of the state of its parameters and its groups."""
    own = {f"its attribute {name!r}": value for name, value in _instance_state(optimizer).items() if name != "state"}
    own |= {f"its state[{key!r}]": value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    return {name: copy.deepcopy(value) for name, value in own.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str)) or (torch.is_tensor(value) and value.is_leaf)


def _same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right or left != left)


def _equal(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return torch.equal(left, right)
    return bool(left is right or (type(left) is type(right) and left == right))
