"""Loss curves of a run, read from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_acco.report.runs import Record, Records, read_records


@dataclass(frozen=True)
class Point:
    """One value of a curve. `tokens` are those trained on so far, `seconds` those spent in training so far."""

    iteration: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Curves:
    """A run's training and validation loss (nats per token), in the order of iterations."""

    name: str
    training: list[Point]
    validation: list[Point]


def read_curves(path: Path, name: str) -> Curves:
    """Read a metrics.jsonl.

    An iteration that stands twice (a run continued from an older checkpoint) counts as last written. A last line that
    is cut off is left out, as are records without a finite loss.

    Raises:
        ValueError: no such file, a damaged line, or no losses in it.
    """
    curves = curves_of(name, read_records(path))
    if not curves.training and not curves.validation:
        raise ValueError(f"{path} holds no losses yet")
    return curves


def curves_of(name: str, records: Records) -> Curves:
    """The curves of records that have been read."""
    return Curves(name, _points(records.train), _points(records.validation))


def _points(records: Sequence[Record]) -> list[Point]:
    values = [
        (r.iteration, r.number("consumed_tokens"), r.number("train_seconds"), r.number("lm_loss")) for r in records
    ]
    return [Point(i, int(tokens), s, loss) for i, tokens, s, loss in values if math.isfinite(tokens + s + loss)]
