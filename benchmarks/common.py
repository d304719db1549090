"""What the benchmarks of speed share that needs no torch."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

SIZES = {"micro_batch_size": 4, "seq_length": 256, "hidden_size": 256, "num_layers": 6}


def add_model_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options of the model and its batch."""
    for name, size in (SIZES | defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--bf16", action="store_true")


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [value / other for value, other in zip(values, base, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest."""
    return statistics.median(values), min(values), max(values)
