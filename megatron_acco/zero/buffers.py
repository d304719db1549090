"""Flat gradient buffers: one accumulates, the other is handed over to the lane; they swap at each boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a parameter lies in the flat buffer of its group: group index, first element, parameter."""

    group: int
    offset: int
    param: torch.nn.Parameter


class GradBuffers:
    """Two flat gradient buffers per parameter group, in the layout of ZeRO's flat partition.

    Each buffer has one owner at any time: the main thread (autograd accumulates into `accumulating`) or the lane
    (`handed_over`: its gradients are reduced, then its memory receives the gathered weights). Swapping copies
    nothing.

    If gradients have the dtype of the parameters, `p.grad` is a view of the accumulating buffer during a backward and
    autograd adds into it; otherwise (`accumulate in fp32`) a hook adds each gradient to the buffer. `p.main_grad` is
    the view in both cases. Between backwards `p.grad` is None, as under ZeRO: what would stand there, a local sum over
    a half, is no gradient that anybody should read, clip, zero or overwrite.
    """

    def __init__(self, flats: Sequence[Tensor], slots: Sequence[Slot], dtype: torch.dtype) -> None:
        """
        Args:
            flats: flat weights per group, [n_g], parameter dtype; only their sizes, dtypes and devices are used.
            slots: every trainable parameter once.
            dtype: dtype of the gradient sums; at least as wide as the parameters'.
        """
        self._slots = [slot for slot in slots if slot.param.numel() > 0]
        self._param_dtypes = [flat.dtype for flat in flats]
        self._buffers = [[torch.zeros_like(flat, dtype=dtype) for flat in flats] for _ in range(2)]
        # (parameter, view) of every slot, for each of the two buffers: what a micro-batch loops over.
        self._views = [[(s.param, self._view(buffers, s)) for s in self._slots] for buffers in self._buffers]
        self._current = 0
        self._version = 0
        # Fused weight-gradient kernels write into main_grad themselves, so p.grad cannot be a view of it.
        self._fused = any(hasattr(slot.param, "grad_added_to_main_grad") for slot in self._slots)
        self._direct = not self._fused and all(slot.param.dtype == dtype for slot in self._slots)
        self._hooks: list[Any] = []
        if not self._direct:
            self._hooks = [s.param.register_post_accumulate_grad_hook(_add_to_main_grad) for s in self._slots]
        self._attach()

    @property
    def handed_over(self) -> list[Tensor]:
        """The lane's buffer, [n_g] per group, gradient dtype."""
        return self._buffers[1 - self._current]

    @property
    def accumulating(self) -> list[Tensor]:
        """The buffer that the main thread accumulates into, [n_g] per group, gradient dtype."""
        return self._buffers[self._current]

    def gathered_weights(self) -> list[Tensor]:
        """The memory of the lane's buffer as weights, [n_g] per group, parameter dtype."""
        return [
            buffer.view(dtype)[: buffer.numel()]
            for buffer, dtype in zip(self.handed_over, self._param_dtypes, strict=True)
        ]

    def before_backward(self) -> None:
        """Make every `p.grad` the view; a gradient that somebody put there in the meantime is counted."""
        if not self._direct:
            return
        for param, view in self._views[self._current]:
            grad = param.grad
            if grad is not None and grad is not view:
                view.add_(grad.detach())
            param.grad = view

    def after_backward(self, prepared: bool) -> bool:
        """Bring gradients into the buffer that autograd wrote elsewhere. Returns whether any arrived.

        Args:
            prepared: `before_backward` ran, so that what stands elsewhere is the old sum plus the new gradient
                (autograd adds out of place under `create_graph` and for sparse gradients).
        """
        if self._direct:
            for param, view in self._views[self._current]:
                grad = param.grad
                if grad is not None and grad is not view:
                    (view.copy_ if prepared else view.add_)(grad.detach())
                param.grad = None
        before, self._version = self._version, self._current_version()
        return self._fused or self._version != before

    def copy(self) -> None:
        """Hand a copy over; what was accumulated stays and goes on accumulating."""
        for accumulating, handed_over in zip(self.accumulating, self.handed_over, strict=True):
            handed_over.copy_(accumulating)

    def scale(self, factor: float) -> None:
        """Multiply the accumulated gradients."""
        for buffer in self.accumulating:
            buffer.mul_(factor)
        self._version = self._current_version()

    def swap(self) -> None:
        """Zero the lane's buffer, make it the accumulating one and hand the other over."""
        for buffer in self.handed_over:
            buffer.zero_()
        self._current = 1 - self._current
        self._attach()

    def zero(self) -> None:
        """Forget all gradients."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.zero_()
        self._attach()

    def release(self) -> None:
        """Detach the parameters from the buffers."""
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            slot.param.grad = None
            slot.param.__dict__.pop("main_grad", None)

    def _view(self, buffers: Sequence[Tensor], slot: Slot) -> Tensor:
        return buffers[slot.group].narrow(0, slot.offset, slot.param.numel()).view(slot.param.shape)

    def _attach(self) -> None:
        for param, view in self._views[self._current]:
            param.main_grad = view  # type: ignore[attr-defined]
            param.grad = None
        self._version = self._current_version()

    def _current_version(self) -> int:
        """Counts every write into the accumulating buffer."""
        return sum(buffer._version for buffer in self.accumulating)


def _add_to_main_grad(param: Tensor) -> None:
    if not getattr(param, "grad_added_to_main_grad", False) and param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
