"""How long the collectives of a round, and those of DeepSpeed's ZeRO-1, really take on a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_acco.zero.collectives import Exchange


@dataclass(frozen=True)
class CollectiveSeconds:
    """Seconds, the same on all ranks.

    Attributes:
        exchange: reduce-scatter and all-gather as a round does them.
        reduction: the all-reduce by which DeepSpeed's ZeRO-1 averages gradients.
        gathering: its all-gather.
    """

    exchange: float
    reduction: float
    gathering: float


def time_collectives(exchange: Exchange, elements: int, times: int) -> CollectiveSeconds:
    """Time the collectives with nothing beside them, each on a buffer of its own. Collective over the exchange's group.

    Args:
        exchange: of two or more ranks.
        elements: of the buffer, in the exchange's wire dtype; rounded up to a multiple of the ranks.
        times: the median of so many turns, after one that connects.
    """
    accelerator, group = get_accelerator(), exchange.group
    size = -(-elements // exchange.world_size)
    device = torch.device(accelerator.current_device_name())
    flat = torch.zeros(size * exchange.world_size, dtype=exchange.wire_dtype, device=device)
    shard = torch.zeros(size, device=device)

    def ours() -> None:
        exchange.reduce_scatter(flat, shard, accumulate=False)
        exchange.all_gather(flat)

    works: list[Callable[[], object]] = [
        ours,
        lambda: dist.all_reduce(flat, group=group),
        lambda: dist.all_gather_into_tensor(flat, exchange.own_slice(flat).clone(), group=group),
    ]
    exchange.table([0.0], device)  # connects
    seconds = torch.zeros(times, len(works), dtype=torch.float64, device=device)
    for turn in range(times):
        for column, work in enumerate(works):
            accelerator.synchronize()
            dist.barrier(group=group)
            start = time.perf_counter()
            work()
            accelerator.synchronize()
            seconds[turn, column] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return CollectiveSeconds(*seconds.median(dim=0).values.tolist())


def time_large_exchange(exchange: Exchange, elements: int, most: int) -> CollectiveSeconds:
    """As `time_collectives`, scaled up from two smaller sizes where `elements` are more than `most`."""
    few = 256 * exchange.world_size
    measured = max(min(elements, most), 2 * few)
    base, full = astuple(time_collectives(exchange, few, 5)), astuple(time_collectives(exchange, measured, 5))
    growth = (elements - few) / (measured - few)
    return CollectiveSeconds(*(low + max(0.0, high - low) * growth for low, high in zip(base, full, strict=True)))
