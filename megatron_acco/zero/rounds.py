"""Carrying out one round: reduce-scatter, norm and clip, optimizer, all-gather. Runs in the lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_acco.zero.coarse import CoarseExchange
from megatron_acco.zero.collectives import Exchange
from megatron_acco.zero.estimate import BaseOptimizer, Hyper
from megatron_acco.zero.lane import DeviceClock
from megatron_acco.zero.levels import Exchanges
from megatron_acco.zero.parallel import TensorParallel
from megatron_acco.zero.report import RankFigures, RoundReport
from megatron_acco.zero.schedule import Apply, RoundKind, RoundSpec

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
        full_batch: the micro-batches over all ranks for which `hyper` gives the learning rate, which is scaled with
            the square root of the round's own count over it; None leaves it.
        compute_spans: (start, end) of every micro-batch since the last hand-over, marks of the clock.
        grads: handed-over gradient sums, [n_g] per group, gradient dtype.
        weights: the same memory as weights, [n_g] per group, parameter dtype; receives the round's result.
        shown: what compute is shown meanwhile, [n_g] per group, parameter dtype; in estimate rounds theta_t.
    """

    spec: RoundSpec
    update: int
    micro_batches: int
    grad_scale: float
    loss_scale: float
    averaged: bool
    hyper: list[Hyper]
    clip: float
    full_batch: float | None
    compute_spans: tuple[tuple[Any, Any], ...]
    grads: list[Tensor]
    weights: list[Tensor]
    shown: list[Tensor]


class Rounds:
    """The state that rounds share: master partitions, the kept gradient shard, the lane's groups."""

    def __init__(
        self,
        exchanges: Exchanges,
        tensor_parallel: TensorParallel,
        optimizer: BaseOptimizer,
        masters: list[Tensor],
        clock: DeviceClock,
        coarse: CoarseExchange | None = None,
    ) -> None:
        """
        Args:
            exchanges: collectives on the lane's own data-parallel groups.
            coarse: the same quantized, where rounds are coarse.
            tensor_parallel: the same for the tensor-parallel ranks.
            optimizer: the base optimizer over `masters`.
            masters: fp32 partition per group, [n_g / world_size].
            clock: of compute and lane.
        """
        self.observer: Callable[[RoundSpec, int, list[Tensor], RoundReport], None] | None = None
        self._exchange = exchanges.commit
        self._estimates = exchanges.estimate
        # Whether estimates are made by groups of ranks.
        self._grouped = len(exchanges.commit.groups) > 1
        self._coarse = coarse
        self._tensor_parallel = tensor_parallel
        self._optimizer = optimizer
        self._masters = masters
        self._clock = clock
        self._last: RoundReport | None = None
        # g~ of the first half between estimate and commit (of a coarse estimate: theta~), the full averaged gradient
        # during a commit: [partition] fp32
        self._shards = [torch.zeros_like(master, requires_grad=False) for master in masters]
        # This rank's micro-batches of the first half, and whether its gradients are in the shards (else they are still
        # in the local sums).
        self._first_half = 0
        self._kept = False
        # An estimate among some of the ranks, whose figures the others hear of with the commit, and this rank's.
        self._untold: tuple[RoundReport, list[float]] | None = None

    def forget_kept(self) -> None:
        """Drop the kept first half."""
        self._first_half, self._kept, self._untold = 0, False, None

    def kept(self, index: int) -> tuple[Tensor | None, int]:
        """The kept shard of group `index` ([partition] fp32, unscaled sum) and this rank's micro-batches in it."""
        return (self._shards[index], self._first_half) if self._kept else (None, 0)

    @property
    def kept_bytes(self) -> int:
        """Memory of the reduced gradient shards."""
        return sum(shard.numel() * shard.element_size() for shard in self._shards)

    def exchange_bytes(self, grads: list[Tensor]) -> int:
        """Memory that an exchange of `grads` needs beside them."""
        coarse = self._coarse
        extra = [coarse.scratch_bytes(flat.numel()) for flat in grads] if coarse is not None else [0]
        return max(self._exchange.scratch_bytes(flat) for flat in grads) + max(extra)

    def run(self, launch: Launch) -> RoundReport:
        """One round. Collective over the lane's group. Mutates masters and optimizer state (commits only)."""
        spec = launch.spec
        report = RoundReport(launch.update, spec.kind, compute_spans=launch.compute_spans)
        report.has_halves = spec.kind is RoundKind.ESTIMATE or spec.add_kept
        report.compute_seconds = sum(self._clock.between(*span) for span in launch.compute_spans)
        marks = [self._clock.mark()]
        self._tensor_parallel.sum_partial_gradients(launch.grads)
        coarse = self._coarse if spec.coarse else None
        report.bytes_sent += self._reduce(launch, coarse)
        scale = self._average(launch, report)
        marks.append(self._clock.mark())
        self._first_half, self._kept = (launch.micro_batches, spec.keep) if self._is_estimate(spec) else (0, False)
        hypers, before = _hyper(launch, report), self._optimizer.bytes_sent
        if coarse is None:
            self._apply(launch, hypers, scale if report.applied else None)
            marks.append(self._clock.mark())
            report.bytes_sent += self._gather(launch.weights)
        else:
            self._look_ahead_in_place(hypers, scale if report.applied else None)
            marks.append(self._clock.mark())
            report.bytes_sent += self._gather_differences(coarse, launch, report.applied)
        marks.append(self._clock.mark())
        report.bytes_sent += self._optimizer.bytes_sent - before
        report.lane_marks = tuple(marks)
        self._last = report
        if self.observer is not None:
            self.observer(spec, launch.update, [self._exchange.own_slice(w) for w in launch.weights], report)
        return report

    def read_clock(self, report: RoundReport) -> None:
        """Fill in the lane's times of a finished round."""
        start, reduced, applied, gathered = report.lane_marks
        report.reduce_scatter_seconds = self._clock.between(start, reduced)
        report.optimizer_seconds = self._clock.between(reduced, applied)
        report.all_gather_seconds = self._clock.between(applied, gathered)
        report.seconds = self._clock.between(start, gathered)

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

    def _reduce(self, launch: Launch, coarse: CoarseExchange | None) -> int:
        """Bring the unscaled sums over all ranks into this rank's shards. Returns bytes sent."""
        unscale, pairs = 1.0 / launch.loss_scale, list(zip(launch.grads, self._shards, strict=True))
        if coarse is not None:
            coarse.seed(launch.update)
            return sum(coarse.reduce_scatter(grads, shard, unscale) for grads, shard in pairs)
        add = launch.spec.add_kept and self._kept
        exchange = self._of(launch.spec)
        return sum(exchange.reduce_scatter(grads, shard, add, unscale) for grads, shard in pairs)

    @staticmethod
    def _is_estimate(spec: RoundSpec) -> bool:
        return spec.kind is RoundKind.ESTIMATE

    def _of(self, spec: RoundSpec) -> Exchange:
        return self._estimates if self._is_estimate(spec) else self._exchange

    def _average(self, launch: Launch, report: RoundReport) -> float:
        """The factor from shard to clipped average.

        Sets `micro_batches`, `grad_norm`, `applied` and `by_rank` of the report. The same numbers on every rank of the
        round.
        """
        exchange, device = self._of(launch.spec), self._shards[0].device
        total = launch.micro_batches + (self._first_half if launch.spec.add_kept else 0)
        figures = self._figures(launch, report)
        own = [self._tensor_parallel.square_sum(self._shards), float(total), float(launch.averaged), *figures]
        is_estimate = self._is_estimate(launch.spec)
        untold, self._untold = self._untold, None
        if self._grouped and is_estimate:
            self._untold = report, figures
        elif self._grouped:
            own += [*(untold[1] if untold is not None else [0.0] * len(figures)), self._checksum()]
        rows = exchange.table(own, device)
        if self._grouped and not is_estimate:
            _check_groups(exchange.groups, [row.pop() for row in rows], launch.update)
        square_sum = sum(rows[rank][0] for rank in exchange.groups[0])
        count, averaged = (sum(column) for column in list(zip(*rows, strict=True))[1:3])
        square_sum, rows = self._tensor_parallel.complete(square_sum, rows, device)
        width = 3 + len(figures)
        if not (self._grouped and is_estimate):
            report.by_rank = _by_rank(row[3:width] for row in rows)
        if untold is not None:
            untold[0].by_rank = _by_rank(row[width:] for row in rows)
        report.micro_batches = round(count)
        if count == 0:
            report.applied = False
            return 0.0
        average = 1.0 / len(rows) if averaged == len(rows) else launch.grad_scale / count
        report.grad_norm = math.sqrt(square_sum) * average if square_sum >= 0 else math.nan
        # A half that is not finite makes the kept sum, hence the commit, not finite: both skip, on all ranks.
        report.applied = math.isfinite(report.grad_norm)
        if launch.clip > 0 and report.applied:
            average /= max(1.0, (report.grad_norm + CLIP_EPSILON) / launch.clip)
        return average

    def _figures(self, launch: Launch, report: RoundReport) -> list[float]:
        """This rank's `RankFigures`."""
        last = self._last
        before = (
            [last.reduce_scatter_seconds, last.optimizer_seconds, last.all_gather_seconds, last.wait_seconds]
            if last is not None
            else [0.0] * 4
        )
        return [float(launch.micro_batches), report.compute_seconds, *before]

    def _checksum(self) -> float:
        """Of the bits of theta in this rank's shards; exact in a float64."""
        total = sum(int(master.detach().view(torch.int32).sum(dtype=torch.int64)) for master in self._masters)
        return float(total % (1 << 48))

    def _apply(self, launch: Launch, hypers: list[Hyper], scale: float | None) -> None:
        """Write this rank's slice of the weights to show; `scale` None skips the update (theta is shown)."""
        self._show_masters(launch.weights)
        if scale is None:
            return
        for index, (shard, flat) in enumerate(zip(self._shards, launch.weights, strict=True)):
            own, hyper = self._exchange.own_slice(flat), hypers[index]
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

    def _look_ahead_in_place(self, hypers: list[Hyper], scale: float | None) -> None:
        """Put theta~ (fp32) in the place of the gradient in this rank's shards; nothing if `scale` is None."""
        for index, shard in enumerate(self._shards):
            if scale is not None:
                self._optimizer.look_ahead(index, hypers[index], shard, scale, shard)

    def _gather_differences(self, coarse: CoarseExchange, launch: Launch, applied: bool) -> int:
        """Fill the weights to show with theta_t and the decoded differences; theta_t alone if not `applied`."""
        sent = 0
        for shard, shown, weights in zip(self._shards, launch.shown, launch.weights, strict=True):
            if applied:
                sent += coarse.gather_differences(shard, shown, weights)
            else:
                weights.copy_(shown)
        self._tensor_parallel.share_copies(launch.weights)
        return sent

    def _show_masters(self, weights: list[Tensor]) -> None:
        for master, flat in zip(self._masters, weights, strict=True):
            self._exchange.own_slice(flat).copy_(master.detach())

    def _gather(self, weights: list[Tensor]) -> int:
        return sum(self._exchange.all_gather(flat) for flat in weights)


def _hyper(launch: Launch, report: RoundReport) -> list[Hyper]:
    """The options with which the round steps; notes the learning rate in the report."""
    hypers = launch.hyper
    if launch.full_batch is not None and report.micro_batches:
        factor = math.sqrt(report.micro_batches / launch.full_batch)
        hypers = [{**hyper, "lr": hyper["lr"] * factor} if "lr" in hyper else hyper for hyper in hypers]
    report.learning_rate = float(hypers[0].get("lr", 0.0))
    return hypers


def _by_rank(rows: Iterable[Sequence[float]]) -> tuple[RankFigures, ...]:
    return tuple(RankFigures(round(row[0]), *row[1:]) for row in rows)


def _check_groups(groups: Sequence[Sequence[int]], checksums: Sequence[float], update: int) -> None:
    """Every group steps by itself: theta must have come out the same on all of them.

    Raises:
        RuntimeError: naming the ranks that differ.
    """
    for ranks in zip(*groups, strict=True):
        if len({checksums[rank] for rank in ranks}) > 1:
            raise RuntimeError(
                f"before update {update} the data-parallel ranks {', '.join(map(str, ranks))} hold different weights "
                f'in the same shard. With "acco.estimate_group" every group makes the same step by itself, which needs '
                f"processors and libraries that compute the same bits, and sound memory. Resume from the last "
                f'checkpoint, with "estimate_group": "all" if the machines differ'
            )
