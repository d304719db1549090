"""DeepSpeed's Muon on flat shards: matrices are orthogonalized whole, also those that the end of a shard cuts.

    M' = beta M + (1 - beta) G;   U = (1 - beta) G + beta M'
    theta' = (1 - lr wd) theta - lr O(U)

with O DeepSpeed's Newton-Schulz iteration (K. Jordan et al. 2024, "Muon"). M and theta lie in shards as they do for any
optimizer; ranks that hold a part of the same matrix send one another their parts of U. G is the averaged gradient after
clipping, as in DeepSpeed's BF16_Optimizer; DeepSpeed's ZeRO-1 clips O(U) instead.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_acco.ds_json.optimizers import is_muon
from megatron_acco.zero.buffers import Slot
from megatron_acco.zero.collectives import Exchange
from megatron_acco.zero.estimate import BaseOptimizer, Hyper

MOMENTUM = "momentum_buffer"


def base_optimizer(
    optimizer: torch.optim.Optimizer, exchange: Exchange, slots: Sequence[Slot], tensor_parallel: int
) -> BaseOptimizer:
    """The base optimizer of a training with `tensor_parallel` ranks to a replica; other arguments as `MuonOptimizer`.

    Raises:
        ValueError: Muon, and matrices that are split over tensor-parallel ranks, or no Adam of DeepSpeed's beside it.
    """
    if not is_muon(optimizer):
        return BaseOptimizer(optimizer)
    if tensor_parallel > 1:
        raise ValueError(
            f"acco with Muon needs whole matrices on a rank: tensor parallelism must be 1, it is {tensor_parallel}; "
            f"use AdamW"
        )
    adam = optimizer.aux_optimizer  # type: ignore[attr-defined]
    if adam is None and not all(group["use_muon"] for group in optimizer.param_groups):
        raise ValueError(
            'acco with Muon needs DeepSpeed\'s fused Adam for what is not a matrix: name "Muon" in the JSON; if so, '
            "DeepSpeed could not build it, and says why above"
        )
    return MuonOptimizer(optimizer, exchange, slots)


class MuonOptimizer(BaseOptimizer):
    """DeepSpeed's MuonWithAuxAdam: groups marked `use_muon` by the rule above, the others by its Adam.

    Steps and look-aheads of the marked groups are collective over the group of `exchange`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange, slots: Sequence[Slot]) -> None:
        """
        Args:
            optimizer: a MuonWithAuxAdam over flat partitions.
            exchange: its group is the one over whose ranks the partitions lie.
            slots: every trainable parameter.
        """
        super().__init__(optimizer)
        self._exchange = exchange
        # None where all groups are Muon's.
        self._others: torch.optim.Optimizer = optimizer.aux_optimizer or optimizer  # type: ignore[attr-defined]
        self._adam = BaseOptimizer(self._others)
        self._adam_index: dict[int, int] = {}
        self._matrices: dict[int, ShardedMatrices] = {}
        for index, group in enumerate(optimizer.param_groups):
            if not group["use_muon"]:
                self._adam_index[index] = len(self._adam_index)
                continue
            own = [slot for slot in slots if slot.group == index]
            size = self._param(index).numel()
            self._matrices[index] = ShardedMatrices(own, size, exchange.rank, exchange.world_size)

    def check_state(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """As the base: momentum is cut like everything else."""
        for index in self._matrices:
            param, momentum = self._param(index), saved[index].get(MOMENTUM)
            if momentum is not None and momentum.shape != param.shape:
                raise ValueError(
                    f"the checkpoint's Muon momentum has {momentum.numel()} elements, a shard has {param.numel()}: it "
                    f"was written without acco, whose ZeRO-1 keeps that of whole matrices; load it with "
                    f"load_optimizer_states=False (the momentum starts at zero)"
                )

    def step(self, index: int, hyper: Hyper, grad: Tensor) -> None:
        """As the base."""
        if index not in self._matrices:
            self._share_state()
            self._adam.step(self._adam_index[index], hyper, grad)
            return
        param = self._param(index)
        momentum = self._optimizer.state[param].setdefault(MOMENTUM, torch.zeros_like(param, requires_grad=False))
        momentum.lerp_(grad, 1 - hyper["momentum"])
        grad.lerp_(momentum, hyper["momentum"])
        self._orthogonalize(index, hyper, grad)
        theta = param.detach()
        theta.mul_(1 - hyper["lr"] * hyper["weight_decay"]).add_(grad, alpha=-hyper["lr"])
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def look_ahead(self, index: int, hyper: Hyper, grad: Tensor, scale: float, out: Tensor) -> None:
        """As the base."""
        if index not in self._matrices:
            self._share_state()
            self._adam.look_ahead(self._adam_index[index], hyper, grad, scale, out)
            return
        param, beta = self._param(index), hyper["momentum"]
        momentum = self._optimizer.state.get(param, {}).get(MOMENTUM)
        update = grad * scale
        following = update * (1 - beta) if momentum is None else momentum.lerp(update, 1 - beta)
        update.lerp_(following, beta)
        del following
        self._orthogonalize(index, hyper, update)
        shown = param.detach() * (1 - hyper["lr"] * hyper["weight_decay"])
        out.copy_(shown.add_(update, alpha=-hyper["lr"]))

    def _share_state(self) -> None:
        """Loading gives the optimizer another dict of state, of which its Adam hears in the optimizer's own step."""
        self._others.state = self._optimizer.state

    def _orthogonalize(self, index: int, hyper: Hyper, update: Tensor) -> None:
        """U -> O(U) in this rank's shard `update` [partition] fp32. Collective."""
        matrices = self._matrices[index]
        muon_update = _eager_muon_update()
        received, sent = matrices.exchange(update, self._exchange)
        self.bytes_sent += sent
        for matrix in matrices.own:
            whole, part = matrix.assemble(update, received), matrix.own
            if whole.dim() == 4:  # filters: DeepSpeed's function flattens them itself, and then fails
                whole = whole.flatten(1)
            # Without momentum of its own the function only orthogonalizes: M' = U' = U.
            result = muon_update(
                whole,
                torch.zeros_like(whole),
                beta=0.0,
                ns_method=hyper.get("ns_method", "gram"),
                is_expert_group=getattr(matrix.slot.param, "is_expert_group", False),
                num_heads=getattr(matrix.slot.param, "muon_num_heads", None),
            )
            piece = result.reshape(-1).narrow(0, part.in_matrix, part.numel)
            update.narrow(0, part.in_shard, part.numel).copy_(piece)


@functools.cache
def _eager_muon_update() -> Callable[..., Tensor]:
    """DeepSpeed's `muon_update`, with all that it calls, without its `torch.compile`.

    A compilation puts the random generators of the process back to where they were when it began. In the lane that
    repeats the numbers that the main thread draws meanwhile, for dropout say, by another count in every run.
    """
    from deepspeed.runtime.zero.muon import original_muon

    names: dict[str, Any] = dict(vars(original_muon))
    for name, value in vars(original_muon).items():
        if inspect.isfunction(value) and value.__module__ == original_muon.__name__:
            plain = inspect.unwrap(value)
            names[name] = types.FunctionType(plain.__code__, names, name, plain.__defaults__)
    update: Callable[..., Tensor] = names["muon_update"]
    return update


@dataclass(frozen=True)
class Part:
    """The elements of a matrix in one rank's shard: where they begin in either, and how many there are."""

    in_matrix: int
    in_shard: int
    numel: int


@dataclass(frozen=True)
class Matrix:
    """A matrix of which this rank holds a part.

    Attributes:
        own: that part.
        others: (first element in what `exchange` receives, the part) of every other rank that holds one.
    """

    slot: Slot
    own: Part
    others: tuple[tuple[int, Part], ...]

    def assemble(self, shard: Tensor, received: Tensor) -> Tensor:
        """The whole matrix, of its parameter's shape; a view of `shard` where it lies there whole."""
        shape = self.slot.param.shape
        own = shard.narrow(0, self.own.in_shard, self.own.numel)
        if not self.others:
            return own.view(shape)
        whole = shard.new_empty(shape)
        flat = whole.view(-1)
        flat.narrow(0, self.own.in_matrix, self.own.numel).copy_(own)
        for start, part in self.others:
            flat.narrow(0, part.in_matrix, part.numel).copy_(received.narrow(0, start, part.numel))
        return whole


class ShardedMatrices:
    """Where the matrices of one group lie in the shards of all ranks."""

    def __init__(self, slots: Sequence[Slot], size: int, rank: int, ranks: int) -> None:
        """
        Args:
            slots: the group's matrices.
            size: elements of a shard.
        """
        self._any_cut = False
        to: list[list[Part]] = [[] for _ in range(ranks)]
        arrivals: list[list[tuple[int, Part]]] = [[] for _ in range(ranks)]
        mine: list[tuple[Slot, Part]] = []
        for slot in slots:
            parts = _parts(slot, size)
            self._any_cut |= len(parts) > 1
            own = parts.pop(rank, None)
            if own is None:
                continue
            for other, part in parts.items():
                to[other].append(own)
                arrivals[other].append((len(mine), part))
            mine.append((slot, own))
        self._to, self._sent = to, [sum(part.numel for part in parts) for parts in to]
        self._received = [sum(part.numel for _, part in parts) for parts in arrivals]
        others: list[list[tuple[int, Part]]] = [[] for _ in mine]
        start = 0
        for index, part in (arrival for rank_ in arrivals for arrival in rank_):
            others[index].append((start, part))
            start += part.numel
        self.own = [Matrix(slot, part, tuple(o)) for (slot, part), o in zip(mine, others, strict=True)]

    def exchange(self, shard: Tensor, exchange: Exchange) -> tuple[Tensor, int]:
        """What the other ranks hold of this rank's matrices, and the bytes that this rank sent. Collective."""
        received = shard.new_empty(sum(self._received))
        if not self._any_cut:
            return received, 0
        parts = [shard.narrow(0, part.in_shard, part.numel) for parts in self._to for part in parts]
        send = torch.cat(parts) if parts else shard.new_empty(0)
        return received, exchange.all_to_all_uneven(send, self._sent, received, self._received)


def _parts(slot: Slot, size: int) -> dict[int, Part]:
    """The parts of a matrix by rank."""
    first, last = slot.offset, slot.offset + slot.param.numel()
    parts = {}
    for rank in range(first // size, (last - 1) // size + 1):
        begin, end = max(first, rank * size), min(last, (rank + 1) * size)
        parts[rank] = Part(begin - first, begin - rank * size, end - begin)
    return parts
