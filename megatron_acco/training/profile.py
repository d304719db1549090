"""--profile-rounds: the rounds of a few updates, of all ranks, as a trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import megatron_acco
from megatron_acco import timeline
from megatron_acco.timeline import COMPUTE, LANE, Span


class RoundProfile:
    """Collects the marks of rounds and writes them when the last update of the profile has settled.

    The work per round is that of keeping its report; nothing is waited for before the end.
    """

    def __init__(self, engine: Any, control: dist.ProcessGroup, path: Path, first: int, updates: int) -> None:
        """Collective over all ranks, whose clocks start together here.

        Args:
            path: the trace; the picture stands beside it with the suffix .png.
            first: number of the first update that is kept.
            updates: how many are kept.
        """
        self.path = path
        self._clock = engine.optimizer.clock
        self._control = control
        self._first, self._last = first, first + updates - 1
        self._reports: list[megatron_acco.RoundReport] = []
        self._settled = False
        get_accelerator().synchronize()
        dist.barrier(group=control)
        self._start = self._clock.mark()

    def add(self, report: megatron_acco.RoundReport) -> None:
        """Keep a settled round."""
        if self._first <= report.update <= self._last:
            self._reports.append(report)
        self._settled |= report.update >= self._last and report.kind == "commit"

    def write(self, at_end: bool = False) -> Path | None:
        """Write trace and picture once, when the last update has settled, or `at_end` of the training.

        Collective over all ranks, which see the same update settle in the same call. Returns the trace's path on rank
        0 if it was written.
        """
        if at_end and not self._reports and not self._settled and dist.get_rank() == 0:
            print(f" WARNING: no profile of the rounds: training ended before update {self._first}", flush=True)
        if not self._reports or not (self._settled or at_end):
            return None
        own = [span for report in self._reports for span in self._spans(report)]
        self._reports, self._first, self._last = [], 0, -1
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own, group=self._control)
        if dist.get_rank() != 0:
            return None
        spans = [span for part in ranks for span in part]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            timeline.write_trace(spans, self.path)
            timeline.draw(spans, self.path.with_suffix(".png"))
        except OSError as error:  # a full disk is no reason to lose the training since the last save
            print(f" WARNING: the profile of the rounds cannot be written to {self.path}: {error}", flush=True)
            return None
        except ModuleNotFoundError:
            print(" NOTICE: no picture of the rounds without matplotlib: pip install 'megatron-acco[plot]'", flush=True)
        return self.path

    def _spans(self, report: megatron_acco.RoundReport) -> list[Span]:
        rank, kind = dist.get_rank(), report.kind.value

        def span(row: str, name: str, first: Any, last: Any) -> Span:
            start, seconds = self._clock.between(self._start, first), self._clock.between(first, last)
            return Span(rank, row, name, start, seconds, report.update, kind)

        half = "micro-batch"
        if report.has_halves:
            half = "first half" if kind == "estimate" else "second half"
        spans = [span(COMPUTE, half, *marks) for marks in report.compute_spans]
        names = ("reduce-scatter", "optimizer", "all-gather")
        for name, first, last in zip(names, report.lane_marks[:-1], report.lane_marks[1:], strict=True):
            spans.append(span(LANE, name, first, last))
        return spans
