"""`megatron-acco plot`: loss curves of one or more runs, from their metrics.jsonl, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_acco.curves import Curves, read_curves
from megatron_acco.report.figures import LIGHT, loss
from megatron_acco.report.runs import split_name


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "plot",
        help="draw training and validation loss against tokens and time",
        description="Draws training and validation loss of one or more runs against tokens and against time.",
    )
    parser.add_argument(
        "metrics", nargs="+", metavar="[NAME=]FILE", help="metrics.jsonl of a run, with the name that the legend shows"
    )
    parser.add_argument("--out", type=Path, required=True, help="picture to write (PNG, PDF or SVG by its suffix)")
    parser.add_argument("--title", default=None, help="title of the picture")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the picture."""
    curves = []
    for text in args.metrics:
        name, path = split_name(text)
        curves.append(read_curves(path, name))
    draw(curves, args.out, args.title)
    print(f"wrote {args.out}")
    return 0


def draw(runs: list[Curves], out: Path, title: str | None = None) -> None:
    """Write a picture with two panels, loss against tokens and loss against time, to `out`.

    Raises:
        ValueError: matplotlib does not know the suffix of `out`.
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = loss(runs, LIGHT, size=(11.0, 4.5))
    if title:
        figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".partial-{out.name}")
    try:
        figure.savefig(temporary, dpi=130)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
