"""What `deepspeed.utils.safe_get_full_*` and `safe_set_full_*` do under ACCO.

DeepSpeed hangs methods on the parameters that read and write master weights, optimizer state and gradients. The lane
works on the same memory, so here they wait for the round in flight first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.utils import get_full_hp_param, lazy_init_hp_params_optimizer_state, set_full_hp_param
from torch import Tensor

from megatron_acco.zero.buffers import Slot

if TYPE_CHECKING:
    from megatron_acco.zero.optimizer import AccoZeroOptimizer


def link_parameters(optimizer: AccoZeroOptimizer, slots: Sequence[Slot]) -> None:
    """Replace the methods that DeepSpeed has just hung on every parameter."""
    for slot in slots:
        methods = {
            "get_full_hp_param": partial(_get, optimizer, slot),
            "set_full_hp_param": partial(_set, optimizer, slot),
            "get_full_hp_grad": partial(_get_gradient, optimizer, slot),
            "set_full_hp_grad": _refuse_gradient,
        }
        for name, method in methods.items():
            setattr(slot.param, name, method)


def unlink_parameters(slots: Sequence[Slot]) -> None:
    """After the engine's end `safe_get_full_*` answers None, as for any parameter that DeepSpeed does not know."""
    for slot in slots:
        if getattr(slot.param, "_hp_mapping", None) is None:
            slot.param.__dict__.pop("_hp_mapping", None)


def _get(optimizer: AccoZeroOptimizer, slot: Slot, optim_state_key: str | None = None) -> Tensor:
    """theta_t, or one tensor of S_t, in fp32 and in the shape of the parameter. Collective over data-parallel ranks.

    Raises:
        ValueError: the optimizer has no such state (the same on all ranks).
    """
    optimizer.drain()
    if optim_state_key is not None:
        _link_state(optimizer, slot, optim_state_key)
    return get_full_hp_param(slot.param, optim_state_key)


def _set(optimizer: AccoZeroOptimizer, slot: Slot, value: Tensor, optim_state_key: str | None = None) -> None:
    """Overwrite theta_t (then every copy of the weights on this rank, too), or one tensor of S_t. On all ranks."""
    optimizer.drain()
    if optim_state_key is not None:
        _link_state(optimizer, slot, optim_state_key)
    set_full_hp_param(slot.param, value, optim_state_key)
    if optim_state_key is None:
        optimizer.overwrite_shown(slot, value)


def _link_state(optimizer: AccoZeroOptimizer, slot: Slot, key: str) -> None:
    master = optimizer.single_partition_of_fp32_groups[slot.group]
    state = optimizer.optimizer.state.get(master) or {}
    tensors = [name for name, value in state.items() if torch.is_tensor(value) and value.shape == master.shape]
    if key not in tensors:
        have = ", ".join(tensors) if tensors else "nothing: no update has been committed yet"
        raise ValueError(f'the optimizer state of this parameter has no tensor "{key}"; it has {have}')
    # Anew each time: a load_checkpoint links the parameters again, but not their state.
    lazy_init_hp_params_optimizer_state([slot.param], master, optimizer.optimizer.state)


def _get_gradient(optimizer: AccoZeroOptimizer, slot: Slot) -> Tensor:
    """The average over all ranks of the micro-batches of the update in progress so far, fp32, unscaled, not clipped.

    Collective over data-parallel ranks.

    Raises:
        RuntimeError: no micro-batch has been done since the last update ended, or the local gradient is a part only.
    """
    param = slot.param
    if optimizer.is_partial_gradient(param):
        raise RuntimeError(
            "safe_get_full_grad: the gradient of a replicated parameter under sequence parallelism is summed over the "
            "tensor-parallel ranks when its half is handed over; it is not known before"
        )
    optimizer.drain()
    local, kept, kept_micro_batches, micro_batches = optimizer.gradient_parts(slot)
    total = torch.cat([local.flatten(), local.new_tensor([float(micro_batches + kept_micro_batches)])])
    mapping = param._hp_mapping  # type: ignore[attr-defined]
    if mapping is not None and kept is not None:
        own, place = mapping.hp_fragment_address, mapping.lp_fragment_address
        total.narrow(0, place.start, place.numel).add_(kept.narrow(0, own.start, own.numel))
    dist.all_reduce(total, group=optimizer.data_parallel_group)
    count = float(total[-1])
    if count == 0:
        raise RuntimeError(
            "safe_get_full_grad: no gradient. The gradients of an update are there from its first backward() until the "
            "step() that ends it; then they are in the lane"
        )
    return (total[:-1] * optimizer.averaging_factor(count)).view(param.shape)


def _refuse_gradient(value: Tensor) -> None:
    raise RuntimeError(
        "safe_set_full_grad is not supported under ACCO: a part of the gradient is in the lane already. Change "
        "gradients in a hook (parameter.register_hook), which sees those of every micro-batch"
    )
