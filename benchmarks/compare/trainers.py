"""The methods as trainers: the same model, data, AdamW and clipping behind one interface."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks import turns
from benchmarks.compare.methods import METHODS, Kind

Batches = Iterator[tuple[Tensor, Tensor, Tensor]]


class Trainer(Protocol):
    """What the benchmark asks of a method."""

    def update(self, batches: Batches) -> None:
        """Take micro-batches for one update."""

    def grad_norm(self) -> float:
        """Norm of the last update's averaged gradient, before clipping."""

    def weights(self) -> Tensor:
        """All weights as compute sees them, [parameters]. Collective."""


def new_trainer(name: str, args: argparse.Namespace) -> Trainer:
    """The trainer of a method other than `compute`. Collective."""
    kinds: dict[Kind, Callable[..., Trainer]] = {Kind.DEEPSPEED: DeepSpeed, Kind.DDP: Ddp, Kind.FSDP2: Fsdp2}
    return kinds[METHODS[name].kind](name, args)


class DeepSpeed:
    """DeepSpeed's engine or ACCO's.

    Attributes:
        engine: it.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        method = METHODS[name]
        self.engine = turns.new_engine(args, args.gas, method.acco, method.zero)

    def update(self, batches: Batches) -> None:
        end = self.engine.global_steps + 1
        while self.engine.global_steps < end:
            turns.train_micro_batch(self.engine, next(batches))

    def grad_norm(self) -> float:
        return float(self.engine.get_global_grad_norm())

    def weights(self) -> Tensor:
        return flat([parameter.detach() for parameter in self.engine.module.parameters()])


class _PyTorch:
    """The loop that PyTorch users write."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, args: argparse.Namespace) -> None:
        self._steps = args.gas
        self._norm = torch.zeros(())

    def update(self, batches: Batches) -> None:
        for step in range(self._steps):
            with self._accumulation(last=step == self._steps - 1):
                compute_micro_batch(self.module, next(batches), self._steps)
        self._norm = clip_grad_norm_(self.module.parameters(), turns.CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _accumulation(self, last: bool) -> Any:
        """Around forward and backward of a micro-batch: gradients travel with the last one only."""
        raise NotImplementedError

    def grad_norm(self) -> float:
        return float(whole(self._norm))

    def weights(self) -> Tensor:
        return flat([whole(parameter.detach()) for parameter in self.module.parameters()])


class Ddp(_PyTorch):
    """DistributedDataParallel with the optimizer's state sharded; `no_sync` on all but the last micro-batch."""

    module: DistributedDataParallel

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        super().__init__(args)
        # Its buckets of 25 MB would be one here, which cannot begin before the end of the backward.
        model = turns.new_model(args)
        self.module = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **turns.ADAMW
        )

    def _accumulation(self, last: bool) -> Any:
        return nullcontext() if last else self.module.no_sync()


class Fsdp2(_PyTorch):
    """fully_shard on every layer. Weights are gathered once per update and gradients reduced once.

    Its defaults gather at every forward and backward, and reduce at every backward, to save memory.
    """

    module: FSDPModule  # type: ignore[assignment]  # it is a mix-in of the module's class

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        super().__init__(args)
        model: Any = turns.new_model(args)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        self.module = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **turns.ADAMW)

    def _accumulation(self, last: bool) -> Any:
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        return nullcontext()


def compute_micro_batch(module: Any, batch: tuple[Tensor, Tensor, Tensor], steps: int) -> None:
    """Forward and backward of one of `steps` micro-batches of an update."""
    tokens, positions, labels = batch
    module(tokens, positions, None, labels=labels).float().mean().div(steps).backward()


def whole(tensor: Any) -> Tensor:
    """A sharded tensor (DTensor) as a plain one; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(tensors: list[Tensor]) -> Tensor:
    """All elements in fp32, [n]."""
    return torch.cat([tensor.float().reshape(-1) for tensor in tensors])
