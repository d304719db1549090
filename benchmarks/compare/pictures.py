"""Pictures of runs and sweeps, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.compare import figures


def draw(result: figures.Result, path: Path) -> None:
    """Tokens per second of each method: median, range over turns, and what the cost model says."""
    made = _figure(1, 0.9 * len(result["figures"]) + 2.5)
    if made is None:
        return
    figure, (axes,) = made
    for place, (name, row) in enumerate(result["figures"].items()):
        middle, low, high = common.spread(row["tokens_per_second"])
        color = "tab:grey" if name == "compute" else "tab:orange" if figures.METHODS[name].acco else "tab:blue"
        axes.bar(place, middle, color=color, yerr=[[middle - low], [high - middle]], capsize=4)
        if row["predicted"] is not None:
            axes.plot(place, row["predicted"], marker="D", color="black", linestyle="", markersize=4)
    axes.plot([], [], marker="D", color="black", linestyle="", markersize=4, label="cost model")
    axes.set_xticks(range(len(result["figures"])), list(result["figures"]), rotation=30)
    axes.set_ylabel("tokens per second")
    axes.set_title("median and range over turns", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_sweep(
    name: str,
    values: Sequence[float],
    results: Sequence[figures.Result | None],
    methods: Sequence[str],
    path: Path,
) -> None:
    """Tokens per second over those of the faster ZeRO-1 and of compute, against the swept value."""
    made = _figure(2, 11.0)
    if made is None:
        return
    figure, both = made
    keys = ("ratio_to_zero1", "ratio_to_compute")
    for axes, key, title in zip(both, keys, ("the faster ZeRO-1", "compute alone"), strict=True):
        for method in methods:
            points = [
                (value, figures.median(result, method, key)) for value, result in zip(values, results, strict=True)
            ]
            known = [point for point in points if not isinstance(point[1], str)]
            style = "-" if figures.METHODS[method].acco else ":"
            axes.plot(*zip(*known, strict=True) if known else ([], []), marker=".", linestyle=style, label=method)
        if max(values) > 4 * min(values):
            axes.set_xscale("log")
            axes.set_xticks(list(values), [f"{value:g}" for value in values])
            axes.minorticks_off()
        axes.set(xlabel=name, ylabel=f"tokens per second over {title}")
        axes.set_ylim(bottom=0.0)
    both[1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _figure(columns: int, width: float) -> tuple[Any, Sequence[Any]] | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]
