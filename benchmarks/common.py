"""What the benchmarks of speed share that needs no torch."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

SIZES = {"micro_batch_size": 4, "seq_length": 256, "hidden_size": 256, "num_layers": 6}


def add_model_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options of the model and its batch."""
    for name, size in (SIZES | defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--bf16", action="store_true")


def check_folder(path: Path) -> None:
    """Make the folder of results, and see that it can be written to: else that would be known after the run.

    Raises:
        ValueError: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from error


def attention_heads(hidden_size: int) -> int:
    """One for each 64 of the hidden size, or the next smaller number that divides it."""
    return next(heads for heads in range(max(1, hidden_size // 64), 0, -1) if hidden_size % heads == 0)


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [value / other for value, other in zip(values, base, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest."""
    return statistics.median(values), min(values), max(values)
