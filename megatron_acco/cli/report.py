"""`megatron-acco report`: runs side by side, as one HTML file (docs/report.md)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_acco.cli.common import write_text


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "report",
        help="compare runs in one HTML file: loss, speed, communication, configuration",
        description=(
            "Reads run folders (metrics.jsonl and what lies beside it) and writes one HTML file that needs no network. "
            "The first run is what the others are compared to. A run may be at work, resumed, or cut off."
        ),
    )
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN", help="folder that holds a run's metrics.jsonl, or that file"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="page to write")
    parser.add_argument("--png", action="store_true", help="write the figures beside it too, as FILE-NAME.png")
    parser.add_argument("--title", default=None, help="of the page (default: the names of the runs)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from megatron_acco.hosts.facts import versions
    from megatron_acco.report.figures import drawings
    from megatron_acco.report.page import page, render
    from megatron_acco.report.runs import read_runs

    out: Path = args.out
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ValueError(f"--out {out} must name a file that ends in .html")
    runs = read_runs(args.runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        pictures = render(drawings(runs))
        for picture in pictures if args.png else ():
            path = out.with_name(f"{out.stem}-{picture.drawing.key}.png")
            path.write_bytes(picture.light)
            print(f"wrote {path}")
    except OSError as error:
        raise ValueError(f"cannot write to {out.parent}: {error}") from error
    title = args.title or " · ".join(run.name for run in runs)
    write_text(out, page(runs, pictures, title, versions()))
    print(f"wrote {out}")
    return 0
