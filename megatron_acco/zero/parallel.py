"""What a round does over the tensor-parallel ranks: replicated parameters count once, their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from megatron_acco.zero.buffers import Slot

Range = tuple[int, int]


class TensorParallel:
    """The tensor-parallel side of rounds, on the lane's own group. Called in the lane.

    Megatron marks a parameter that is split over the tensor-parallel ranks with `tensor_model_parallel`, and a
    replicated one whose gradient on each rank is only a part with `sequence_parallel` (layer norms and biases under
    sequence parallelism) or `average_gradients_across_tp_domain`.
    """

    def __init__(self, group: dist.ProcessGroup | None, slots: Sequence[Slot], partitions: Sequence[Range]) -> None:
        """
        Args:
            group: the lane's tensor-parallel group, None for size 1.
            slots: every trainable parameter.
            partitions: first and last (exclusive) element of this data-parallel rank's shard, per parameter group.
        """
        self._group = group
        size = 1 if group is None else dist.get_world_size(group)
        self._sums = [slot for slot in slots if size > 1 and getattr(slot.param, "sequence_parallel", False)]
        self._averages = [
            slot
            for slot in slots
            if size > 1 and slot not in self._sums and getattr(slot.param, "average_gradients_across_tp_domain", False)
        ]
        self._copied = [slot for slot in slots if size > 1 and not is_model_parallel_parameter(slot.param)]
        self._size = size
        # None: the whole shard counts on this rank.
        self._counted: list[list[Range]] | None = None
        if size > 1 and dist.get_rank(group) > 0:
            self._counted = [counted_ranges(slots, index, part) for index, part in enumerate(partitions)]

    def sum_partial_gradients(self, grads: Sequence[Tensor]) -> None:
        """Complete the gradients of replicated parameters in `grads` ([n_g] per group; mutated). Once per half.

        After it, the copies of a replicated parameter have bit-identical gradients on all tensor-parallel ranks.
        """
        slots = self._sums + self._averages
        if not slots:
            return
        views = [grads[slot.group].narrow(0, slot.offset, slot.param.numel()) for slot in slots]
        flat = torch.cat([view.float() for view in views])
        dist.all_reduce(flat, group=self._group)
        parts = flat.split([view.numel() for view in views])
        for slot, view, part in zip(slots, views, parts, strict=True):
            view.copy_(part if slot in self._sums else part / self._size)

    def share_copies(self, weights: Sequence[Tensor]) -> None:
        """Give replicated parameters in `weights` ([n_g] per group; mutated) the first tensor-parallel rank's values.

        Those of a coarse estimate depend on what else lies in a block. Copies that differ would get different
        gradients, and theta would drift apart.
        """
        if not self._copied:
            return
        views = [weights[slot.group].narrow(0, slot.offset, slot.param.numel()) for slot in self._copied]
        flat = torch.cat([view.float() for view in views])
        dist.broadcast(flat, group_src=0, group=self._group)
        for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(part)

    def square_sum(self, shards: Sequence[Tensor]) -> float:
        """Sum of squares of what counts on this rank in `shards` (fp32, one per group)."""
        if self._counted is None:
            parts = list(shards)
        else:
            parts = [
                shard[first:last] for shard, ranges in zip(shards, self._counted, strict=True) for first, last in ranges
            ]
        return float(sum(torch.linalg.vector_norm(part).double().square() for part in parts))

    def complete(
        self, square_sum: float, rows: list[list[float]], device: torch.device
    ) -> tuple[float, list[list[float]]]:
        """The square sum summed, and the measurements `rows` averaged, over the tensor-parallel ranks.

        The same bits on all of them: what is decided from measurements is decided by a replica as one.
        """
        if self._group is None:
            return square_sum, rows
        values = torch.tensor([square_sum, *(v for row in rows for v in row)], dtype=torch.float64, device=device)
        dist.all_reduce(values, group=self._group)
        square_sum, *flat = values.tolist()
        width = len(rows[0])
        mean = [value / self._size for value in flat]
        return square_sum, [mean[start : start + width] for start in range(0, len(mean), width)]


def counted_ranges(slots: Sequence[Slot], group: int, partition: Range) -> list[Range]:
    """Ranges, relative to the shard `partition` of `group`, that hold split parameters; neighbours are merged."""
    first, last = partition
    ranges: list[Range] = []
    for slot in slots:
        if slot.group != group or not is_model_parallel_parameter(slot.param):
            continue
        begin, end = max(slot.offset, first) - first, min(slot.offset + slot.param.numel(), last) - first
        if begin >= end:
            continue
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return ranges
