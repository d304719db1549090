"""The training log: Megatron's line, metrics.jsonl and DeepSpeed's monitor, from one record."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_acco
from megatron_acco.training.checkpoint import TrainState
from megatron_acco.training.options import option
from megatron_acco.training.profile import RoundProfile


@dataclass(frozen=True)
class LoggingOptions:
    """What is logged where. TensorBoard, CSV and W&B have their own sections in the DeepSpeed JSON."""

    log_interval: int = option(100, "Updates between lines of the log.")
    tensorboard_dir: str | None = option(None, "TensorBoard folder: switches on the JSON's tensorboard section.")
    metrics_file: str | None = option(None, "metrics.jsonl; if not given, in the --save or --tensorboard-dir folder.")
    profile_rounds: str | None = option(
        None,
        "Write the rounds of a few updates here, as a trace for Chrome or Perfetto, and as a picture beside it.",
    )
    profile_start: int = option(5, "Updates of this start of the program before the profile begins.")
    profile_updates: int = option(10, "Updates in the profile.")

    def __post_init__(self) -> None:
        if self.metrics_file is not None and Path(self.metrics_file).is_dir():
            raise ValueError(f"--metrics-file {self.metrics_file} is a folder; name a file")
        if self.profile_rounds is not None and Path(self.profile_rounds).is_dir():
            raise ValueError(f"--profile-rounds {self.profile_rounds} is a folder; name a file")
        if self.profile_rounds is not None and Path(self.profile_rounds).suffix == ".png":
            raise ValueError(
                f"--profile-rounds {self.profile_rounds} names the trace (.json); the picture stands beside it"
            )
        if self.profile_start < 0 or self.profile_updates < 1:
            raise ValueError("--profile-start must be 0 or more and --profile-updates 1 or more")
        if self.log_interval < 1:
            raise ValueError(f"--log-interval must be 1 or more, got {self.log_interval}")

    def metrics_path(self, save: str | None) -> Path | None:
        """Where metrics.jsonl goes, None if there is no run folder."""
        if self.metrics_file is not None:
            return Path(self.metrics_file)
        folder = save or self.tensorboard_dir
        return None if folder is None else Path(folder) / "metrics.jsonl"


@dataclass
class IterationRecord:
    """One logged iteration. Means are over the iterations since the last record. Figures of the lane are None where
    no round ran (DeepSpeed's own ZeRO-1).

    Lists have one entry per data-parallel rank: micro-batches in all, and milliseconds per round.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    train_seconds: float
    elapsed_ms_per_iteration: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None = None
    grad_norm: float | None = None
    skipped_iterations: int = 0
    tokens_per_second: float = 0.0
    communication_ms_per_round: float | None = None
    exposed_wait_ms_per_round: float | None = None
    communication_hidden_percent: float | None = None
    compute_ms_per_micro_batch: float | None = None
    bytes_sent_per_round: float | None = None
    micro_batches_by_rank: list[int] = dataclasses.field(default_factory=list)
    compute_ms_by_rank: list[float] = dataclasses.field(default_factory=list)
    reduce_scatter_ms_by_rank: list[float] = dataclasses.field(default_factory=list)
    optimizer_ms_by_rank: list[float] = dataclasses.field(default_factory=list)
    all_gather_ms_by_rank: list[float] = dataclasses.field(default_factory=list)
    exposed_wait_ms_by_rank: list[float] = dataclasses.field(default_factory=list)

    def line(self, train_iters: int | None) -> str:
        """Megatron's line, with the figures of the rounds. `train_iters` None: the run's length is its samples."""
        parts = [
            f" iteration {self.iteration:8d}" + (f"/{train_iters:8d}" if train_iters is not None else ""),
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.elapsed_ms_per_iteration:.1f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {_number(self.lm_loss, '.6E')}",
            f"grad norm: {_number(self.grad_norm, '.3f')}",
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"tokens per second: {self.tokens_per_second:.1f}",
        ]
        counts = self.micro_batches_by_rank
        if counts and min(counts) != max(counts):
            parts.append(f"micro-batches per rank: {min(counts)} to {max(counts)}")
        if self.compute_ms_per_micro_batch is not None:
            parts.append(f"compute per micro-batch (ms): {self.compute_ms_per_micro_batch:.1f}")
        if self.communication_ms_per_round is not None:
            parts += [
                f"communication time per round (ms): {self.communication_ms_per_round:.1f}",
                f"exposed wait per round (ms): {_number(self.exposed_wait_ms_per_round, '.1f')}",
                f"communication hidden (%): {_number(self.communication_hidden_percent, '.1f')}",
            ]
        return " | ".join(parts) + " |"


class MetricsFile:
    """metrics.jsonl: one JSON object per line, written by one rank.

    `kind` is train, validation, test or validation_set (one of several, whose mean is validation). Records that cannot
    be written, on a full disk for example, wait in memory for the next: training goes on, and it is the save that ends
    it if there is no room for one.
    """

    def __init__(self, path: Path, resumed_iteration: int | None) -> None:
        """Open for appending.

        Args:
            path: the file.
            resumed_iteration: records past this iteration are dropped, they will be made again. None: a fresh
                run; a file that is there is set aside as metrics.jsonl.1 (.2, ...).
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size > 0:
            if resumed_iteration is None:
                os.replace(path, _free_name(path))
            else:
                _drop_records_after(path, resumed_iteration)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)
        self._unwritten = b""
        self._failing = False

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write one record. Numbers that are not finite become null, which JSON can say."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._unwritten += json.dumps({"kind": kind, **finite}).encode() + b"\n"
        try:
            while self._unwritten:  # a full disk may take a part
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                print(f" WARNING: {self._file.name} cannot be written, its records wait in memory: {error}", flush=True)
            self._failing = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TrainingLog:
    """Collects what the updates report and writes a record per `log_interval`.

    Nothing here waits for the network in the middle of training: the mean loss of iteration t is reduced while t+1
    computes, and its line is written at the end of t+1, when the outcome of its update is known too.
    """

    def __init__(
        self,
        engine: Any,
        options: LoggingOptions,
        metrics: MetricsFile | None,
        control: dist.ProcessGroup,
        train_iters: int | None,
        sequence_length: int,
        state: TrainState,
    ) -> None:
        self.engine = engine
        self.options = options
        self.metrics = metrics
        self.control = control
        self.train_iters = train_iters
        self.sequence_length = sequence_length
        self.clock = Stopwatch(state.train_seconds)
        self._loss = torch.zeros(2, device=engine.device, dtype=torch.float32)
        self._iterations = 0
        self._consumed = state.consumed_train_samples
        self._skipped = engine.skipped_steps
        self._rounds: list[_Round] = []
        self._commits: dict[int, megatron_acco.RoundReport] = {}
        self._pending: _Pending | None = None
        self.profile: RoundProfile | None = None
        if options.profile_rounds is not None:
            first = state.iteration + options.profile_start
            self.profile = RoundProfile(engine, control, Path(options.profile_rounds), first, options.profile_updates)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of one micro-batch, on the device."""
        self._loss[0] += loss.detach()
        self._loss[1] += 1

    def end_update(self, state: TrainState, learning_rate: float) -> None:
        """Note the end of an update; write the record that has become complete and start the one that is due."""
        self._collect()
        self._finish_pending()
        self.write_profile()
        self._iterations += 1
        if state.iteration % self.options.log_interval == 0:
            self._start_record(state, learning_rate)

    def note_time(self, state: TrainState) -> None:
        """Put the training time so far into the state."""
        state.train_seconds = self.clock.seconds()

    def flush(self) -> None:
        """Settle the update in flight, before an evaluation or a save, and write the record that is waiting for it."""
        self._collect()
        megatron_acco.drain(self.engine)
        # An evaluation or a save waits for the round in flight; that says nothing about what compute hides.
        self._collect(drained=True)
        self._finish_pending()

    def write_profile(self, at_end: bool = False) -> None:
        """Write the profile if it is complete, or what there is of it at the end. Collective over all ranks."""
        path = None if self.profile is None else self.profile.write(at_end)
        if path is not None:
            print(f" wrote the profile of the rounds to {path}", flush=True)

    def evaluation(self, kind: str, state: TrainState, loss: float, seconds: float, name: str = "") -> None:
        """Write the result of an evaluation.

        Args:
            kind: validation or test.
            state: of the training.
            loss: mean per token.
            seconds: that the evaluation took.
            name: of one of several validation sets: its record has the kind `validation_set`, which readers of one
                validation curve pass over.
        """
        perplexity = math.exp(min(loss, 20.0))
        if dist.get_rank() != 0:
            return
        title = f"{kind} loss on {name}" if name else f"{kind} loss"
        print(
            f" {title} at iteration {state.iteration} | consumed samples: {state.consumed_train_samples} | "
            f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | evaluation time (s): {seconds:.1f} |",
            flush=True,
        )
        values = {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_train_samples,
            "consumed_tokens": state.consumed_train_samples * self.sequence_length,
            "train_seconds": state.train_seconds,
            "lm_loss": loss,
            "perplexity": perplexity,
            "evaluation_seconds": seconds,
        }
        record_kind = f"{kind}_set" if name else kind
        self._write(record_kind, {"set": name, **values} if name else values, ("lm_loss", "perplexity"))

    def _collect(self, drained: bool = False) -> None:
        for report in megatron_acco.round_reports(self.engine):
            self._rounds.append(_Round(report, drained))
            if self.profile is not None:
                self.profile.add(report)
            if report.kind == "commit":
                self._commits[report.update] = report

    def _start_record(self, state: TrainState, learning_rate: float) -> None:
        # Waits for the device, not for other ranks.
        loss = self._loss.double().cpu()
        elapsed = self.clock.lap()
        self.note_time(state)
        samples = state.consumed_train_samples - self._consumed
        if not (isinstance(self.engine, megatron_acco.AccoEngine) and self.engine.acco.adaptive):
            self._consumed = state.consumed_train_samples
        record = IterationRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_train_samples,
            consumed_tokens=state.consumed_train_samples * self.sequence_length,
            train_seconds=state.train_seconds,
            elapsed_ms_per_iteration=elapsed * 1000.0 / self._iterations,
            learning_rate=learning_rate,
            global_batch_size=round(samples / self._iterations),
            tokens_per_second=samples * self.sequence_length / elapsed,
        )
        if not isinstance(self.engine, megatron_acco.AccoEngine):
            record.grad_norm = _as_float(self.engine.get_global_grad_norm())
            record.skipped_iterations = self.engine.skipped_steps - self._skipped
            self._skipped = self.engine.skipped_steps
        work = dist.all_reduce(loss, group=self.control, async_op=True)
        self._pending = _Pending(record, loss, work)
        self._iterations = 0
        self._loss.zero_()

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        record, loss = self._pending.finish()
        self._pending = None
        record.lm_loss = float(loss[0] / loss[1])
        self._add_rounds(record)
        if dist.get_rank() == 0:
            print(record.line(self.train_iters), flush=True)
            values = dataclasses.asdict(record)
            logged = ("lm_loss", "learning_rate", "grad_norm", "tokens_per_second", "communication_hidden_percent")
            self._write("train", values, logged)

    def _add_rounds(self, record: IterationRecord) -> None:
        commit = self._commits.get(record.iteration - 1)
        if commit is not None:
            record.grad_norm = commit.grad_norm
            # As captured at the launch; the scheduler moves when the update before has settled.
            record.learning_rate = commit.learning_rate
        if isinstance(self.engine, megatron_acco.AccoEngine):
            settled = [self._commits.pop(update) for update in list(self._commits) if update < record.iteration]
            record.skipped_iterations = sum(not commit.applied for commit in settled)
            if settled:  # adaptive accumulation knows an update's samples when its commit is done
                micro_batch = self.engine.train_micro_batch_size_per_gpu()
                samples = sum(commit.micro_batches for commit in settled) / len(settled) * micro_batch
                record.global_batch_size = round(samples)
                if self.engine.acco.adaptive:
                    self._consumed += sum(commit.micro_batches for commit in settled) * micro_batch
                    record.consumed_samples = self._consumed
                    record.consumed_tokens = self._consumed * self.sequence_length
                record.tokens_per_second = samples * self.sequence_length * 1000.0 / record.elapsed_ms_per_iteration
        rounds = [r for r in self._rounds if r.report.update < record.iteration]
        self._rounds = [r for r in self._rounds if r.report.update >= record.iteration]
        if rounds:
            seconds = sum(r.report.communication_seconds for r in rounds)
            record.communication_ms_per_round = 1000.0 * seconds / len(rounds)
            record.bytes_sent_per_round = sum(r.report.bytes_sent for r in rounds) / len(rounds)
            _add_ranks(record, [r.report for r in rounds])
        undisturbed = [r.report for r in rounds if not r.drained]
        if undisturbed:
            lane = sum(report.seconds for report in undisturbed)
            covered = sum(report.hidden_share * report.seconds for report in undisturbed)
            wait = sum(report.wait_seconds for report in undisturbed)
            record.exposed_wait_ms_per_round = 1000.0 * wait / len(undisturbed)
            record.communication_hidden_percent = 100.0 * covered / lane if lane > 0.0 else None

    def _write(self, kind: str, values: Mapping[str, Any], logged: tuple[str, ...]) -> None:
        if self.metrics is not None:
            self.metrics.append(kind, values)
        samples = values["consumed_samples"]
        tag = f"validation/{values['set']}" if "set" in values else kind
        events = [(f"{tag}/{name}", values[name], samples) for name in logged if values.get(name) is not None]
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(events)


@dataclass(frozen=True)
class _Round:
    """A finished round. `drained`: waited for on behalf of an evaluation or a save, not by training."""

    report: megatron_acco.RoundReport
    drained: bool


@dataclass
class _Pending:
    """A record whose mean loss is being reduced."""

    record: IterationRecord
    loss: torch.Tensor
    work: Any

    def finish(self) -> tuple[IterationRecord, torch.Tensor]:
        self.work.wait()
        return self.record, self.loss


class Stopwatch:
    """Wall clock with pauses, continued from an earlier run."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._lap = seconds
        self._since: float | None = None

    def pause(self) -> None:
        """Stop counting."""
        self._before, self._since = self.seconds(), None

    def resume(self) -> None:
        """Count (again)."""
        assert self._since is None
        self._since = time.perf_counter()

    def seconds(self) -> float:
        """Seconds counted in all."""
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def lap(self) -> float:
        """Seconds counted since the last lap or the start."""
        before, self._lap = self._lap, self.seconds()
        return self._lap - before


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _add_ranks(record: IterationRecord, reports: list[megatron_acco.RoundReport]) -> None:
    ranks = list(zip(*(report.by_rank for report in reports), strict=True))
    record.micro_batches_by_rank = [sum(part.micro_batches for part in parts) for parts in ranks]

    def ms(name: str) -> list[float]:
        return [1000.0 * sum(getattr(part, name) for part in parts) / len(reports) for parts in ranks]

    record.compute_ms_by_rank = ms("compute_seconds")
    record.reduce_scatter_ms_by_rank = ms("reduce_scatter_seconds")
    record.optimizer_ms_by_rank = ms("optimizer_seconds")
    record.all_gather_ms_by_rank = ms("all_gather_seconds")
    record.exposed_wait_ms_by_rank = ms("wait_seconds")
    if any(record.micro_batches_by_rank):
        compute = sum(record.compute_ms_by_rank) * len(reports)
        record.compute_ms_per_micro_batch = compute / sum(record.micro_batches_by_rank)


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _drop_records_after(path: Path, iteration: int) -> None:
    """Rewrite the file without records past `iteration` and without a last line that a crash cut off."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("iteration", 0) <= iteration:
            kept.append(line + "\n")
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text("".join(kept))
    os.replace(staged, path)
