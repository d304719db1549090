"""Loss curves of a run, read from its metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    found: dict[str, dict[int, Point]] = {"train": {}, "validation": {}}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            _add(found, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not a record of a training log: {error}") from error
    training, validation = ([points[key] for key in sorted(points)] for points in found.values())
    if not training and not validation:
        raise ValueError(f"{path} holds no losses yet")
    return Curves(name, training, validation)


def _add(found: dict[str, dict[int, Point]], record: dict[str, Any]) -> None:
    points = found.get(record["kind"])
    if points is None or record["lm_loss"] is None:
        return
    points[int(record["iteration"])] = Point(
        int(record["iteration"]),
        int(record["consumed_tokens"]),
        float(record["train_seconds"]),
        float(record["lm_loss"]),
    )
