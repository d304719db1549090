"""`megatron-acco plot`: loss curves of one or more runs, from their metrics.jsonl, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_acco.curves import Curves, read_curves


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
        name, separator, path = text.partition("=")
        if not separator:
            name, path = Path(text).parent.name, text
        curves.append(read_curves(Path(path), name))
    draw(curves, args.out, args.title)
    print(f"wrote {args.out}")
    return 0


def draw(runs: list[Curves], out: Path, title: str | None = None) -> None:
    """Write a picture with two panels, loss against tokens and loss against time, to `out`.

    Raises:
        ValueError: matplotlib does not know the suffix of `out`.
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("matplotlib is not installed: pip install 'megatron-acco[plot]'") from error

    # Without pyplot there is no window system to look for and no global state.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    for number, curves in enumerate(runs):
        color = f"C{number % 10}"
        for axes, horizontal in ((by_tokens, "tokens"), (by_time, "seconds")):
            axes.plot(
                [getattr(point, horizontal) for point in curves.training],
                [point.loss for point in curves.training],
                color=color,
                alpha=0.35,
                linewidth=1.0,
                label=f"{curves.name}: training",
            )
            axes.plot(
                [getattr(point, horizontal) for point in curves.validation],
                [point.loss for point in curves.validation],
                color=color,
                marker="o",
                markersize=3.5,
                label=f"{curves.name}: validation",
            )
    by_tokens.set(xlabel="tokens", ylabel="loss (nats per token)", title="against tokens")
    by_time.set(xlabel="seconds of training", title="against time")
    by_tokens.xaxis.set_major_formatter(lambda value, position: _short(value))
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    by_tokens.legend()
    if title:
        figure.suptitle(title)

    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".partial-{out.name}")
    try:
        figure.savefig(temporary, dpi=130)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _short(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"
