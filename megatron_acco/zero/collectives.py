"""Reduce-scatter and all-gather on flat buffers, per backend. Called in the lane, on the lane's own groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_free_groups: dict[tuple[str, tuple[int, ...]], list[dist.ProcessGroup]] = {}


def give_back_group(group: dist.ProcessGroup) -> None:
    """Leave a group of `clone_group`, on which nothing is in flight, to the next engine over the same ranks."""
    key = (dist.get_backend(group), tuple(dist.get_process_group_ranks(group)))
    _free_groups.setdefault(key, []).append(group)


def clone_group(
    group: dist.ProcessGroup, backend: str | None = None, members: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A process group of its own over the ranks of `group`, with the same time limit and, by default, backend.

    Two threads must never issue collectives on one communicator, hence the lane's own. Only its members take part in
    the call: all of `group`, or those at the places `members`. A group that an earlier engine gave back is used again:
    each has threads and connections, and torch would give a new one after a destroyed one the same name, with the old
    addresses in the store.
    """
    backend, ranks = backend or dist.get_backend(group), dist.get_process_group_ranks(group)
    if members is not None:
        ranks = [ranks[place] for place in members]
    free = _free_groups.get((backend, tuple(ranks)), [])
    while free:
        candidate = free.pop()
        if candidate in dist.distributed_c10d._world.pg_map:  # not of a world that was destroyed since
            return candidate
    return dist.new_group(ranks, timeout=group_limit(group), backend=backend, use_local_synchronization=True)


def group_limit(group: dist.ProcessGroup) -> timedelta:
    """Time limit of the collectives of `group`."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return dist.constants.default_pg_timeout


class Exchange:
    """Reduce-scatter and all-gather of flat buffers whose length is a multiple of the number of ranks.

    The native collectives of the backend (NCCL and its kin), in place: what is reduced lands in this rank's slice of
    the buffer itself.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.wire_dtype = wire_dtype
        # Rows of `table` by group; each group's ranks hold all shards, in order.
        self.groups: tuple[tuple[int, ...], ...] = (tuple(range(self.world_size)),)

    def own_slice(self, flat: Tensor) -> Tensor:
        """This rank's slice of `flat`."""
        size = flat.numel() // self.world_size
        return flat.narrow(0, self.rank * size, size)

    def reduce_scatter(self, flat: Tensor, shard: Tensor, accumulate: bool, factor: float = 1.0) -> int:
        """Sum `flat` over the ranks and put this rank's slice into (or, `accumulate`, add it to) `shard`.

        Args:
            flat: [n], gradient dtype; its contents are lost.
            shard: [n / world_size], fp32; mutated.
            accumulate: add to `shard` instead of overwriting it.
            factor: multiplies the sum (of this call) in fp32, after the exchange.

        Returns:
            Bytes sent by this rank.
        """
        if self.world_size == 1:
            _put(shard, flat, accumulate, factor)
            return 0
        wire = flat if flat.dtype == self.wire_dtype else flat.to(self.wire_dtype)
        return self._reduce_scatter(wire, shard, accumulate, factor)

    def scratch_bytes(self, flat: Tensor) -> int:
        """Memory that the exchange of `flat`, gradient dtype, needs beside it."""
        if self.world_size == 1 or flat.dtype == self.wire_dtype:
            return 0
        return flat.numel() * self.wire_dtype.itemsize

    def _reduce_scatter(self, wire: Tensor, shard: Tensor, accumulate: bool, factor: float) -> int:
        own = self.own_slice(wire)
        dist.reduce_scatter_tensor(own, wire, group=self.group)
        _put(shard, own, accumulate, factor)
        return _ring_bytes(wire, self.world_size)

    def all_gather(self, flat: Tensor) -> int:
        """Fill `flat` [n] with every rank's slice; this rank's slice is already in place. Returns bytes sent."""
        if self.world_size == 1:
            return 0
        dist.all_gather_into_tensor(flat, self.own_slice(flat), group=self.group)
        return _ring_bytes(flat, self.world_size)

    def all_to_all(self, rows: Tensor, received: Tensor) -> int:
        """Send `rows[r]` to every other rank r, and receive the row that it has for this rank in `received[r]`.

        Args:
            rows, received: [world_size, m], any dtype; the contents of `received[rank]` are undefined afterwards.

        Returns:
            Bytes sent by this rank.
        """
        if self.world_size > 1:
            self._all_to_all(rows, received)
        return _ring_bytes(rows, self.world_size)

    def _all_to_all(self, rows: Tensor, received: Tensor) -> None:
        dist.all_to_all_single(received, rows, group=self.group)

    def all_to_all_uneven(
        self, send: Tensor, sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> int:
        """As `all_to_all`, with parts of any length: `sizes[r]` elements for rank r, one behind the other.

        Args:
            send, received: [sum of the sizes], the same dtype; this rank has nothing for itself.

        Returns:
            Bytes sent by this rank.
        """
        dist.all_to_all_single(received, send, list(received_sizes), list(sizes), group=self.group)
        return send.numel() * send.element_size()

    def table(self, values: list[float], device: torch.device) -> list[list[float]]:
        """A few float64 numbers of every rank, one row per rank; the same bits on all ranks."""
        if self.world_size == 1:
            return [values]
        rows = torch.zeros(self.world_size, len(values), dtype=torch.float64, device=device)
        rows[self.rank] = torch.tensor(values, dtype=torch.float64, device=device)
        # A sum with zeros: exact, and an all-reduce is what backends do fastest at this size.
        dist.all_reduce(rows, group=self.group)
        return rows.tolist()


class GlooExchange(Exchange):
    """Both exchanges as messages from every rank to every other.

    Gloo's own reduce-scatter moves the whole buffer and its all-gather is a ring of small segments; messages move each
    byte once, and the sum at the owner is taken in fp32, in the order of the ranks (bit-reproducible). Not gloo's
    all-to-all: it announces its receives behind its own data on the same connection, so that a pair of ranks sends one
    after the other, at half of the link's rate. Buffers travel as bytes, because older gloo knows no bfloat16.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype) -> None:
        super().__init__(group, wire_dtype)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def _reduce_scatter(self, wire: Tensor, shard: Tensor, accumulate: bool, factor: float) -> int:
        received, parts = self._scratch_like(wire).chunk(self.world_size), list(wire.chunk(self.world_size))
        self._swap(parts, received)
        for index in range(self.world_size):
            part = parts[index] if index == self.rank else received[index]
            _put(shard, part, accumulate or index > 0, factor)
        return _ring_bytes(wire, self.world_size)

    def all_gather(self, flat: Tensor) -> int:
        if self.world_size == 1:
            return 0
        self._swap([self.own_slice(flat)] * self.world_size, flat.chunk(self.world_size))
        return _ring_bytes(flat, self.world_size)

    def _all_to_all(self, rows: Tensor, received: Tensor) -> None:
        self._swap(list(rows), list(received))

    def all_to_all_uneven(
        self, send: Tensor, sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> int:
        self._swap(send.split(list(sizes)), received.split(list(received_sizes)))
        return send.numel() * send.element_size()

    def scratch_bytes(self, flat: Tensor) -> int:
        """As the base, and the buffer for what arrives, which is kept."""
        if self.world_size == 1:
            return 0
        return super().scratch_bytes(flat) + flat.numel() * self.wire_dtype.itemsize

    def _swap(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Send `out[r]` to every other rank r and receive its message in `into[r]`; own entries are left alone.

        Empty messages are not sent.
        """
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        # All receives first: a send makes progress once the receiver has said where to, and may not wait behind data.
        sources, targets = [r for r in reversed(others) if into[r].numel()], [r for r in others if out[r].numel()]
        works = [dist.irecv(into[r].view(torch.uint8), group=self.group, group_src=r) for r in sources]
        works += [dist.isend(out[r].view(torch.uint8), group=self.group, group_dst=r) for r in targets]
        for work in works:
            assert work is not None, "this rank is a member of the group"
            work.wait()

    def _scratch_like(self, flat: Tensor) -> Tensor:
        size = flat.numel() * flat.element_size()
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(flat.dtype)


class TwoLevelExchange(Exchange):
    """A reduce-scatter inside a group of ranks, then a sum over the groups; shards are those of a rank of a group.

    Of what a group sends to others each byte crosses once, and the sum is the same bits on all groups.
    """

    def __init__(self, inner: Exchange, outer: Exchange, whole: Exchange, groups: tuple[tuple[int, ...], ...]) -> None:
        """
        Args:
            inner: over the ranks of this rank's group.
            outer: over the ranks that hold the same shard, one per group; sums travel in its dtype.
            whole: over all of them.
            groups: the members of every group, as ranks of `whole`.
        """
        super().__init__(inner.group, inner.wire_dtype)
        self.groups = groups
        self._inner, self._outer, self._whole = inner, outer, whole
        self._scratch = self._part = torch.empty(0)

    def reduce_scatter(self, flat: Tensor, shard: Tensor, accumulate: bool, factor: float = 1.0) -> int:
        """As the base; what is in `shard` before, if `accumulate`, is this group's and summed over the groups, too."""
        sent = self._inner.reduce_scatter(flat, shard, accumulate, factor)
        outer, elements = self._outer, shard.numel()
        size = self._padded(elements)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=outer.wire_dtype, device=shard.device)
            self._part = torch.empty(size // outer.world_size, dtype=shard.dtype, device=shard.device)
        wire, part = self._scratch[:size], self._part[: size // outer.world_size]
        wire[:elements].copy_(shard)
        wire[elements:].zero_()
        sent += outer.reduce_scatter(wire, part, accumulate=False)
        outer.own_slice(wire).copy_(part)
        sent += outer.all_gather(wire)
        shard.copy_(wire[:elements])
        return sent

    def all_gather(self, flat: Tensor) -> int:
        """As the base, inside the group."""
        return self._inner.all_gather(flat)

    def scratch_bytes(self, flat: Tensor) -> int:
        """As the base."""
        size, dtype = self._padded(flat.numel() // self.world_size), self._outer.wire_dtype
        between = self._outer.scratch_bytes(torch.empty(size, dtype=dtype, device="meta"))
        own = size * dtype.itemsize + size // self._outer.world_size * torch.float32.itemsize
        return self._inner.scratch_bytes(flat) + between + own

    def table(self, values: list[float], device: torch.device) -> list[list[float]]:
        """As the base, of the ranks of all groups."""
        return self._whole.table(values, device)

    def _padded(self, elements: int) -> int:
        return -(-elements // self._outer.world_size) * self._outer.world_size


def make_exchange(group: dist.ProcessGroup, wire_dtype: torch.dtype) -> Exchange:
    """The exchange for the backend of `group`; `wire_dtype` is the dtype in which gradients travel."""
    gloo = dist.get_backend(group) == dist.Backend.GLOO
    return (GlooExchange if gloo else Exchange)(group, wire_dtype)


def _put(shard: Tensor, part: Tensor, accumulate: bool, factor: float) -> None:
    if accumulate:
        shard.add_(part, alpha=factor)
    else:
        shard.copy_(part)
        if factor != 1.0:
            shard.mul_(factor)


def _ring_bytes(flat: Tensor, world_size: int) -> int:
    return flat.numel() * flat.element_size() // world_size * (world_size - 1)
