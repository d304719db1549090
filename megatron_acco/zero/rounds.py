"""Carrying out one round: reduce-scatter, norm and clip, optimizer, all-gather. Runs in the lane."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_acco.zero.collectives import Exchange
from megatron_acco.zero.estimate import BaseOptimizer, Hyper
from megatron_acco.zero.parallel import TensorParallel
from megatron_acco.zero.report import RoundReport
from megatron_acco.zero.schedule import Apply, RoundSpec

# DeepSpeed's own guard in the clipping coefficient (ZeRO stage 1: unscale_and_clip_grads).
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Launch:
    """Everything a round uses, captured by the main thread when it hands the gradients over.

    Attributes:
        spec: the kind of round.
        update: 0-based number of the update.
        micro_batches: micro-batches that this rank accumulated since the last hand-over.
        grad_scale: factor that turns an unscaled sum into the sum of per-micro-batch gradients.
        loss_scale: the scale with which the gradients of this half were computed; each half is unscaled by its own.
        averaged: the update is complete, and its gradients add up to its average on each rank (the caller divided the
            losses himself): divide by the ranks, not by the micro-batches. Holds if all ranks say so.
        hyper: options of every parameter group (learning rate, weight decay, ...).
        clip: largest norm of the averaged gradient; 0 switches clipping off.
        grads: handed-over gradient sums, [n_g] per group, gradient dtype.
        weights: the same memory as weights, [n_g] per group, parameter dtype; receives the round's result.
    """

    spec: RoundSpec
    update: int
    micro_batches: int
    grad_scale: float
    loss_scale: float
    averaged: bool
    hyper: list[Hyper]
    clip: float
    grads: list[Tensor]
    weights: list[Tensor]


class Rounds:
    """The state that rounds share: master partitions, the kept gradient shard, the lane's groups."""

    def __init__(
        self, exchange: Exchange, tensor_parallel: TensorParallel, optimizer: BaseOptimizer, masters: list[Tensor]
    ) -> None:
        """
        Args:
            exchange: collectives on the lane's own data-parallel group.
            tensor_parallel: the same for the tensor-parallel ranks.
            optimizer: the base optimizer over `masters`.
            masters: fp32 partition per group, [n_g / world_size].
        """
        self.observer: Callable[[RoundSpec, int, list[Tensor], RoundReport], None] | None = None
        self._exchange = exchange
        self._tensor_parallel = tensor_parallel
        self._optimizer = optimizer
        self._masters = masters
        # g~ of the first half between estimate and commit, the full averaged gradient during a commit: [partition] fp32
        self._shards = [torch.zeros_like(master, requires_grad=False) for master in masters]
        self._kept_micro_batches: float | None = None

    def forget_kept(self) -> None:
        """Drop the kept first half."""
        self._kept_micro_batches = None

    def kept(self, index: int) -> tuple[Tensor | None, float]:
        """The kept shard of group `index` ([partition] fp32, unscaled sum) and its micro-batches over all ranks."""
        return (None, 0.0) if self._kept_micro_batches is None else (self._shards[index], self._kept_micro_batches)

    def run(self, launch: Launch) -> RoundReport:
        """One round. Collective over the lane's group. Mutates masters and optimizer state (commits only)."""
        spec = launch.spec
        report = RoundReport(launch.update, spec.kind, learning_rate=float(launch.hyper[0].get("lr", 0.0)))
        clock = _Clock()
        add_kept = spec.add_kept and self._kept_micro_batches is not None
        self._tensor_parallel.sum_partial_gradients(launch.grads)
        unscale = 1.0 / launch.loss_scale
        for grads, shard in zip(launch.grads, self._shards, strict=True):
            report.bytes_sent += self._exchange.reduce_scatter(grads, shard, accumulate=add_kept, factor=unscale)
        count, scale = self._average(launch, report, add_kept)
        report.reduce_scatter_seconds = clock.lap()
        self._kept_micro_batches = count if spec.keep else None
        self._apply(launch, scale if report.applied else None)
        report.optimizer_seconds = clock.lap()
        report.bytes_sent += self._gather(launch.weights)
        report.all_gather_seconds = clock.lap()
        report.seconds = clock.total()
        if self.observer is not None:
            self.observer(spec, launch.update, [self._exchange.own_slice(w) for w in launch.weights], report)
        return report

    def gather_masters(self, weights: list[Tensor]) -> None:
        """Fill `weights` [n_g] (parameter dtype) with theta of every rank. Collective."""
        self._show_masters(weights)
        self._gather(weights)

    def gather_shards(self, shards: list[Tensor], weights: list[Tensor]) -> None:
        """Fill `weights` [n_g] with every rank's `shards`. Collective."""
        for shard, flat in zip(shards, weights, strict=True):
            self._exchange.own_slice(flat).copy_(shard)
        self._gather(weights)

    def own_shards(self, weights: list[Tensor]) -> list[Tensor]:
        """This rank's slices of `weights`."""
        return [self._exchange.own_slice(flat) for flat in weights]

    def _average(self, launch: Launch, report: RoundReport, add_kept: bool) -> tuple[float, float]:
        """The micro-batch count of this round over all ranks, and the factor from shard to clipped average.

        Sets `micro_batches`, `grad_norm` and `applied` of the report. The same numbers on every rank.
        """
        device = self._shards[0].device
        local = [self._tensor_parallel.square_sum(self._shards), float(launch.micro_batches), float(launch.averaged)]
        square_sum, count, averaged = self._exchange.all_reduce(local, device)
        square_sum = self._tensor_parallel.all_reduce(square_sum, device)
        total = count + (self._kept_micro_batches or 0.0) if add_kept else count
        report.micro_batches = int(total)
        if total == 0:
            report.applied = False
            return count, 0.0
        ranks = self._exchange.world_size
        average = 1.0 / ranks if averaged == ranks else launch.grad_scale / total
        report.grad_norm = math.sqrt(square_sum) * average if square_sum >= 0 else math.nan
        # A half that is not finite makes the kept sum, hence the commit, not finite: both skip, on all ranks.
        report.applied = math.isfinite(report.grad_norm)
        if launch.clip > 0 and report.applied:
            average /= max(1.0, (report.grad_norm + CLIP_EPSILON) / launch.clip)
        return count, average

    def _apply(self, launch: Launch, scale: float | None) -> None:
        """Write this rank's slice of the weights to show; `scale` None skips the update (theta is shown)."""
        self._show_masters(launch.weights)
        if scale is None:
            return
        for index, (shard, flat) in enumerate(zip(self._shards, launch.weights, strict=True)):
            own, hyper = self._exchange.own_slice(flat), launch.hyper[index]
            if launch.spec.apply is Apply.LOOK_AHEAD:
                self._optimizer.look_ahead(index, hyper, shard, scale, own)
                continue
            grad = shard.mul_(scale)
            if launch.spec.apply is Apply.STEP_THEN_LOOK_AHEAD:
                self._optimizer.step(index, hyper, grad.clone())
                self._optimizer.look_ahead(index, hyper, grad, 1.0, own)
            else:
                self._optimizer.step(index, hyper, grad)
                own.copy_(self._masters[index].detach())

    def _show_masters(self, weights: list[Tensor]) -> None:
        for master, flat in zip(self._masters, weights, strict=True):
            self._exchange.own_slice(flat).copy_(master.detach())

    def _gather(self, weights: list[Tensor]) -> int:
        return sum(self._exchange.all_gather(flat) for flat in weights)


class _Clock:
    """Wall-clock laps of the lane thread; on accelerators the reading of the norm ends the first lap."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed

    def total(self) -> float:
        return self._last - self._start
