"""Groups of data-parallel ranks, such as the ranks of a node, that exchange estimates among themselves.

DeepSpeed then cuts masters and optimizer state into one part per rank of a group, so that every group holds all of them
and can look ahead by itself. A commit sums the shards over the groups, and every group makes the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_acco.config import ALL, NODE, check_equal_groups
from megatron_acco.hosts.network import host_key
from megatron_acco.zero.collectives import Exchange, TwoLevelExchange, clone_group, make_exchange


@dataclass(frozen=True)
class Levels:
    """How the data-parallel ranks fall into groups.

    Attributes:
        groups: the members of every group, as ranks of the data-parallel group.
        index: of this rank's group.
        inner: process group of this rank's group; for DeepSpeed, hence the main thread.
    """

    groups: tuple[tuple[int, ...], ...]
    index: int
    inner: dist.ProcessGroup

    def __str__(self) -> str:
        """For the log."""
        return f"by {len(self.groups)} groups of {len(self.groups[0])} data-parallel ranks"


@dataclass(frozen=True)
class Exchanges:
    """The lane's exchanges, on process groups of its own.

    Attributes:
        commit, estimate: of the two kinds of round; one object where all ranks exchange estimates. The estimate's is
            over the ranks among which masters and optimizer state are cut.
        groups: to give back, once and on all ranks in the same order.
    """

    commit: Exchange
    estimate: Exchange
    groups: list[dist.ProcessGroup]


def find_levels(choice: int | str, group: dist.ProcessGroup) -> Levels | None:
    """The groups that `acco.estimate_group` asks for, None if they are one. Collective over all ranks.

    Args:
        choice: "all", "node" (ranks that share a host and its network) or the size of groups of consecutive ranks.
        group: the data-parallel group.

    Raises:
        ValueError: groups of unequal size, or that differ between the tensor-parallel ranks of a replica.
    """
    if choice == ALL:
        return None
    ranks = dist.get_process_group_ranks(group)
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_key() if choice == NODE else "")
    members: dict[str | int, list[int]] = {}
    for rank, world_rank in enumerate(ranks):
        members.setdefault(hosts[world_rank] if choice == NODE else rank // int(choice), []).append(rank)
    groups = tuple(map(tuple, members.values()))
    of_all: list[tuple[tuple[int, ...], ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_all, groups)
    if any(other != groups for other in of_all):
        raise ValueError(
            f'"acco.estimate_group": "{choice}" needs the tensor-parallel ranks of a replica on one node; here some '
            f"replicas are spread over nodes"
        )
    check_equal_groups(choice, [len(part) for part in groups])
    if len(groups) == 1:
        return None
    index = next(i for i, part in enumerate(groups) if dist.get_rank(group) in part)
    return Levels(groups, index, clone_group(group, members=groups[index]))


def lane_exchanges(group: dist.ProcessGroup, levels: Levels | None, wire_dtype: torch.dtype) -> Exchanges:
    """The lane's exchanges over the data-parallel `group`; gradients travel in `wire_dtype`. Collective over it."""
    whole = make_exchange(clone_group(group), wire_dtype)
    if levels is None:
        return Exchanges(whole, whole, [whole.group])
    own = levels.groups[levels.index]
    peers = [part[own.index(dist.get_rank(group))] for part in levels.groups]
    inner = make_exchange(clone_group(group, members=own), wire_dtype)
    # Between groups a shard is no longer multiplied by the loss scale, without which fp16 has not the range.
    between = torch.float32 if wire_dtype is torch.float16 else wire_dtype
    outer = make_exchange(clone_group(group, members=peers), between)
    commit = TwoLevelExchange(inner, outer, whole, levels.groups)
    return Exchanges(commit, inner, [whole.group, inner.group, outer.group, levels.inner])
