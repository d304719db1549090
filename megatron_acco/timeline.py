"""When each rank computed and when its lane worked: as a trace for Chrome or Perfetto, and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE, LANE = "compute", "lane"
_COLORS = {
    "first half": "#4c78a8",
    "second half": "#9ecae9",
    "micro-batch": "#4c78a8",
    "reduce-scatter": "#f58518",
    "optimizer": "#54a24b",
    "all-gather": "#ffbf79",
}
_HEAD = b'{"traceEvents": ['


@dataclass(frozen=True)
class Span:
    """One stretch of work.

    Attributes:
        rank: global rank.
        row: `COMPUTE` or `LANE`.
        name: what was done; gives the color.
        start: seconds since the profile began.
        seconds: how long it took.
        update: 0-based number of the update.
        kind: of the round that the work is part of or is for (estimate, commit).
    """

    rank: int
    row: str
    name: str
    start: float
    seconds: float
    update: int
    kind: str


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The trace as an object for JSON: one process per rank, one row for compute and one for the lane."""
    events: list[dict[str, Any]] = []
    rows = {COMPUTE: 0, LANE: 1}
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, number in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": row}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": span.rank,
                "tid": rows[span.row],
                "ts": 1e6 * span.start,
                "dur": 1e6 * span.seconds,
                "args": {"update": span.update, "round": span.kind},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write the trace to `path`."""
    path.write_text(json.dumps(chrome_trace(spans)))


def is_trace(path: Path) -> bool:
    """Whether a file begins as the traces of `write_trace` do."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace that `write_trace` wrote, to the microsecond.

    Raises:
        ValueError: it is damaged, or not of that form.
    """
    rows = {0: COMPUTE, 1: LANE}
    try:
        events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
        spans = []
        for event in events:
            row, start, seconds = rows[event["tid"]], 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
            if not (math.isfinite(start) and math.isfinite(seconds)):
                raise ValueError("a time is not finite")
            update, kind = int(event["args"]["update"]), str(event["args"]["round"])
            spans.append(Span(int(event["pid"]), row, str(event["name"]), start, seconds, update, kind))
        return spans
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no trace of rounds: {error!r}") from error


def draw(spans: Sequence[Span], path: Path) -> None:
    """Draw the timeline to `path` (PNG, PDF or SVG by its suffix).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure(spans).savefig(path, dpi=120)


def figure(spans: Sequence[Span], width: float = 14.0) -> Any:
    """The timeline as a matplotlib figure, `width` inches wide: two rows per rank, time to the right.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    result = Figure(figsize=(width, 1.2 + 0.9 * len(ranks)), layout="constrained")
    FigureCanvasAgg(result)
    axes = result.subplots()
    places = {(rank, row): 2 * i + j for i, rank in enumerate(ranks) for j, row in enumerate((COMPUTE, LANE))}
    for (rank, row), place in places.items():
        own = [span for span in spans if (span.rank, span.row) == (rank, row)]
        axes.broken_barh(
            [(span.start, span.seconds) for span in own],
            (place - 0.4, 0.8),
            facecolors=[_COLORS.get(span.name, "#999999") for span in own],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_yticks(list(places.values()), [f"rank {rank} {row}" for rank, row in places])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    names = [name for name in _COLORS if any(span.name == name for span in spans)]
    result.legend([Patch(color=_COLORS[name]) for name in names], names, loc="outside upper center", ncols=6)
    return result
