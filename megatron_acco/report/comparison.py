"""Runs side by side: the summary, and what differs in their configurations."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_acco.report.runs import Record, Run, flatten

# Written by the start of a run beside its arguments, not a part of them.
VERSIONS = "versions"


@dataclass(frozen=True)
class Summary:
    """A run in one line. NaN: not known.

    Attributes:
        method: what its JSON asks for.
        updates: made so far.
        done: share of the run's samples that it has trained on, NaN if its length is not known.
        tokens: trained on so far.
        seconds: spent in training so far.
        loss: of the last validation; NaN also if that was not finite.
        common_loss: the validation loss at as many tokens as every run has been validated at.
        diverged: the last validation or the last training loss was not finite.
        tokens_per_second: median over the records, all ranks together.
        exposed: median share of the time that compute stood still for a round, 0 to 1.
        skipped: updates.
        seconds_to_loss: training until the validation loss was at most the common one.
    """

    method: str
    updates: int
    done: float
    tokens: float
    seconds: float
    loss: float
    common_loss: float
    diverged: bool
    tokens_per_second: float
    exposed: float
    skipped: int
    seconds_to_loss: float


@dataclass(frozen=True)
class Common:
    """What all runs that were validated have reached: so many tokens, and this validation loss. NaN: none has been."""

    tokens: float
    loss: float


def common(runs: Sequence[Run]) -> Common:
    """The most tokens and the lowest validation loss that every run with finite validations has reached."""
    curves = [curve for run in runs if (curve := _curve(run, "consumed_tokens"))]
    tokens = min((curve[-1][0] for curve in curves), default=math.nan)
    return Common(tokens, max((min(loss for _, loss in curve) for curve in curves), default=math.nan))


def summarize(run: Run, reached: Common) -> Summary:
    """The summary of a run."""
    train, validation = run.records.train, run.records.validation
    last = max((*train[-1:], *validation[-1:]), key=lambda record: record.iteration)
    return Summary(
        method=method(run),
        updates=last.iteration,
        done=_done(run),
        tokens=max(_finite(record.number("consumed_tokens") for record in (*train, *validation)), default=math.nan),
        seconds=max(_finite(record.number("train_seconds") for record in (*train, *validation)), default=math.nan),
        loss=validation[-1].number("lm_loss") if validation else math.nan,
        common_loss=loss_at(run, reached.tokens),
        diverged=any(math.isnan(record.number("lm_loss")) for record in (*train[-1:], *validation[-1:])),
        tokens_per_second=_median(record.number("tokens_per_second") for record in train),
        exposed=_median(exposed_share(record) for record in train),
        skipped=sum(skipped(record) for record in train),
        seconds_to_loss=seconds_to(run, reached.loss),
    )


def method(run: Run) -> str:
    """What a run's JSON asks for, as a reader would call it; empty if it is not known."""
    json_ = run.section("deepspeed")
    if not json_:
        return ""
    acco = json_.get("acco")
    if not isinstance(acco, dict) or acco.get("enabled", True) is False:
        zero = json_.get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
        return f"ZeRO-{stage}" if stage else "DeepSpeed"
    mode = str(acco.get("mode", "acco"))
    return f"{mode}, adaptive" if acco.get("accumulation") == "adaptive" else mode


def exposed_share(record: Record) -> float:
    """Share of the time of rank 0 that its compute stood still for a round, 0 to 1; NaN where no round ran."""
    compute, wait = record.numbers("compute_ms_by_rank"), record.number("exposed_wait_ms_per_round")
    whole = (compute[0] if compute else math.nan) + wait
    return wait / whole if whole > 0.0 else math.nan


def skipped(record: Record) -> int:
    """Updates skipped since the record before."""
    count = record.number("skipped_iterations")
    return 0 if math.isnan(count) else int(count)


def micro_batches(run: Run) -> list[int]:
    """Micro-batches of each data-parallel rank in all; over the records with as many ranks as the last one has."""
    counts = [record.numbers("micro_batches_by_rank") for record in run.records.train]
    ranks = len(next((c for c in reversed(counts) if c), []))
    return [int(sum(_finite(column))) for column in zip(*(c for c in counts if len(c) == ranks), strict=True)]


def loss_at(run: Run, tokens: float) -> float:
    """The validation loss after `tokens`, on straight lines between validations; NaN before the first of them."""
    curve = _curve(run, "consumed_tokens")
    for (before, first), (after, second) in zip(curve[:1] + curve, curve, strict=False):
        if before <= tokens <= after:
            return second if after == before else first + (second - first) * (tokens - before) / (after - before)
    return math.nan


def seconds_to(run: Run, loss: float) -> float:
    """Seconds of training until the validation loss was at most `loss`, on straight lines between validations."""
    curve = _curve(run, "train_seconds")
    for (before, first), (after, second) in zip(curve[:1] + curve, curve, strict=False):
        if second <= loss:
            return after if first <= loss else before + (after - before) * (first - loss) / (first - second)
    return math.nan


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """(key, value in each run) of every argument that is not the same in all runs whose arguments are known.

    None: the key is not there.
    """
    flat = [
        {key: json.dumps(value) for key, value in flatten(run.arguments) if key.split(".")[0] != VERSIONS}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    known = [values for values in flat if values]
    return [(key, [v.get(key) for v in flat]) for key in keys if len({values.get(key) for values in known}) > 1]


def versions(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """(package, version in each run)."""
    tables = [{str(key): str(value) for key, value in run.section(VERSIONS).items()} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, [table.get(name) for table in tables]) for name in names]


def _curve(run: Run, horizontal: str) -> list[tuple[float, float]]:
    """(tokens or seconds, loss) of every validation with a finite loss."""
    pairs = [(record.number(horizontal), record.number("lm_loss")) for record in run.records.validation]
    return [pair for pair in pairs if not math.isnan(sum(pair))]


def _done(run: Run) -> float:
    training, json_ = Record(run.section("training")), Record(run.section("deepspeed"))
    batch = next(
        (n for n in (training.number("global_batch_size"), json_.number("train_batch_size")) if n > 0), math.nan
    )
    planned = next(
        (n for n in (training.number("train_samples"), training.number("train_iters") * batch) if n > 0), math.nan
    )
    samples = _finite(record.number("consumed_samples") for record in run.records.train)
    return max(samples, default=math.nan) / planned


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _median(values: Iterable[float]) -> float:
    finite = _finite(values)
    return statistics.median(finite) if finite else math.nan
