"""The figures of a report. matplotlib without pyplot: no window system is looked for, and no global state is kept."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_acco import timeline
from megatron_acco.curves import Curves, curves_of
from megatron_acco.report.comparison import exposed_share, micro_batches, skipped
from megatron_acco.report.runs import Record, Run

# Ranks that a timeline shows; more make a picture that nobody can read.
_TIMELINE_RANKS = 8
# Bars of so many ranks, over all runs, can be told apart.
_MOST_BARS = 96
_DPI = 170


@dataclass(frozen=True)
class Theme:
    """Colors of a figure: of text and lines, of the page behind it, and of the runs in order."""

    ink: str
    paper: str
    runs: tuple[str, ...]

    def color(self, number: int) -> str:
        """Of run `number`."""
        return self.runs[number % len(self.runs)]


# Runs in the colors of Okabe and Ito, which color-blind readers can tell apart; the dark ones lightened.
LIGHT = Theme(
    "#24292f", "#ffffff", ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6b6b6b", "#000000")
)
DARK = Theme(
    "#c9d1d9", "#14181d", ("#4aa8e0", "#ff8c42", "#2ec4a0", "#e39ac1", "#f0c04a", "#a5dcff", "#a0a0a0", "#ffffff")
)


@dataclass(frozen=True)
class Drawing:
    """One figure of a report.

    Attributes:
        key: names its file and its place in the page.
        title, caption: to read beside it.
        draw: makes the matplotlib figure in a theme.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[Theme], Any]


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """Those that the runs have figures for."""
    curves = [curves_of(run.name, run.records) for run in runs]
    records = [record for run in runs for record in run.records.train]
    made = []
    if any(c.training or c.validation for c in curves):
        made.append(
            Drawing(
                "loss",
                "Loss",
                "Strong lines with dots: validation, at the committed weights. Pale lines: training, which mode acco "
                "takes half at the estimate, so that runs of different modes are compared by validation. Time is that "
                "of training, without evaluations and saves.",
                partial(loss, curves),
            )
        )
    panels: list[tuple[str, str, str, list[Panel]]] = [
        (
            "throughput",
            "Tokens per second",
            "Over all ranks, evaluations and saves left out.",
            [Panel("tokens per second", lambda r: r.number("tokens_per_second"), from_zero=True)],
        ),
        (
            "communication",
            "Exposed communication",
            "Left: share of rank 0's time in which its compute stood still for a round. Right: reduce-scatter and "
            "all-gather of a round (line), and the part of a round that compute waited for (dashes). Runs of "
            "DeepSpeed's own ZeRO-1 make no rounds and are not measured.",
            [
                Panel("waiting (% of time)", lambda r: 100.0 * exposed_share(r), from_zero=True),
                Panel(
                    "ms per round",
                    lambda r: r.number("communication_ms_per_round"),
                    lambda r: r.number("exposed_wait_ms_per_round"),
                    from_zero=True,
                ),
            ],
        ),
        (
            "gradient",
            "Gradient norm and skipped updates",
            "Left: norm of the averaged gradient before clipping. Right: updates skipped so far because a gradient was "
            "not finite.",
            [
                Panel("gradient norm", lambda r: r.number("grad_norm"), logarithmic=True),
                Panel("skipped updates", lambda r: float(skipped(r)), total=True, from_zero=True),
            ],
        ),
        (
            "batch",
            "Batch size",
            "Samples per update. With adaptive accumulation it grows until communication is hidden.",
            [Panel("samples per update", lambda r: r.number("global_batch_size"), from_zero=True)],
        ),
    ]
    for key, title, caption, parts in panels:
        if any(not math.isnan(part.value(record)) for record in records for part in parts if not part.total):
            made.append(Drawing(key, title, caption, partial(over_tokens, runs, parts)))
    if any(micro_batches(run) for run in runs):
        caption = "Micro-batches that each data-parallel rank has contributed. Adaptive ranks of unequal speed differ. "
        caption += "DeepSpeed's own ZeRO-1 notes none: its ranks do equal numbers."
        made.append(Drawing("ranks", "Micro-batches by rank", caption, partial(counts, runs)))
    for number, run in enumerate(runs):
        if run.spans:
            made.append(_timeline(number, run))
    return made


def png(drawing: Drawing, theme: Theme) -> bytes:
    """The figure as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    stream = io.BytesIO()
    # Names come from files: "$" in them is no formula, and a letter that the font lacks is no reason to warn.
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: dict[str, Any] = {**dict.fromkeys(ink, theme.ink), "text.parse_math": False, "font.size": 9.0}
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper)
    style |= dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False)
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        drawing.draw(theme).savefig(stream, format="png", dpi=_DPI)
    return stream.getvalue()


def loss(runs: Sequence[Curves], theme: Theme, size: tuple[float, float] = (10.0, 4.0)) -> Any:
    """Two panels, loss against tokens and against time of training, as a matplotlib figure of `size` inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, (by_tokens, by_time) = _figure(2, size, sharey=True)
    for number, curves in enumerate(runs):
        for axes, horizontal in ((by_tokens, "tokens"), (by_time, "seconds")):
            for points, kind, style in (
                (curves.training, "training", {"alpha": 0.5, "linewidth": 1.0}),
                (curves.validation, "validation", {"marker": "o", "markersize": 3.5}),
            ):
                if points:
                    axes.plot(
                        [getattr(point, horizontal) for point in points],
                        [point.loss for point in points],
                        color=theme.color(number),
                        label=_label(f"{curves.name}: {kind}"),
                        **style,
                    )
    by_tokens.set(ylabel="loss (nats per token)", title="against tokens")
    by_time.set(title="against time")
    _horizontal(by_tokens)
    _horizontal(by_time, time=True)
    _legend(by_tokens)
    return figure


@dataclass(frozen=True)
class Panel:
    """Figures of the training records against tokens.

    Attributes:
        label: of the vertical axis.
        value: of a record; NaN where it has none.
        dashed: a second one.
        total: add up from the start of the run.
        from_zero: the axis begins there.
        logarithmic: if the values span more than a factor of 20.
    """

    label: str
    value: Callable[[Record], float]
    dashed: Callable[[Record], float] | None = None
    total: bool = False
    from_zero: bool = False
    logarithmic: bool = False


def over_tokens(runs: Sequence[Run], panels: Sequence[Panel], theme: Theme) -> Any:
    """Panels side by side, a line per run, as a matplotlib figure."""
    figure, all_axes = _figure(len(panels), (10.0, 3.2))
    for panel, axes in zip(panels, all_axes, strict=True):
        seen: list[float] = []
        for number, run in enumerate(runs):
            tokens = [record.number("consumed_tokens") for record in run.records.train]
            for value, style in ((panel.value, "-"), (panel.dashed, "--")):
                if value is None:
                    continue
                values = [value(record) for record in run.records.train]
                if panel.total:
                    values = _sums(values)
                if all(map(math.isnan, values)):
                    continue
                # A single point, or one between gaps, has no line.
                dots = {"marker": "o", "markersize": 2.5} if len(values) <= 60 else {}
                label = _label(run.name) if style == "-" else None
                axes.plot(tokens, values, style, color=theme.color(number), label=label, linewidth=1.3, **dots)
                seen += [v for v in values if not math.isnan(v)]
        axes.set_ylabel(panel.label)
        positive = [value for value in seen if value > 0.0]
        if panel.logarithmic and positive and max(positive) > 20.0 * min(positive):
            axes.set_yscale("log")
        elif panel.from_zero:
            axes.set_ylim(0.0, 1.08 * max(positive, default=1.0))
        if panel.total:
            axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda value, position: _short(value))
        _horizontal(axes)
    _legend(all_axes[0])
    return figure


def counts(runs: Sequence[Run], theme: Theme) -> Any:
    """Micro-batches of every rank: bars, or lines where the ranks are many, as a matplotlib figure."""
    figure, (axes,) = _figure(1, (10.0, 3.2))
    shown = [(number, run.name, done) for number, run in enumerate(runs) if (done := micro_batches(run))]
    bars = sum(len(done) for _, _, done in shown) <= _MOST_BARS
    width = 0.8 / len(shown)
    for place, (number, name, done) in enumerate(shown):
        if bars:
            places = [rank - 0.4 + width * (place + 0.5) for rank in range(len(done))]
            axes.bar(places, done, 0.92 * width, color=theme.color(number), label=_label(name))
        else:
            axes.plot(range(len(done)), done, color=theme.color(number), label=_label(name), linewidth=1.0)
            axes.set_ylim(bottom=0.0)
    # A few bars shall not fill the picture.
    ranks = max(len(done) for _, _, done in shown)
    axes.set(xlabel="data-parallel rank", ylabel="micro-batches", xlim=(-0.6, max(ranks, 8) - 0.4))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.2)
    _legend(axes)
    return figure


def _timeline(number: int, run: Run) -> Drawing:
    ranks = sorted({span.rank for span in run.spans})
    spans = [span for span in run.spans if span.rank in ranks[:_TIMELINE_RANKS]]
    caption = "What compute and lane of each rank did: a lane that works beside compute costs nothing."
    if len(ranks) > _TIMELINE_RANKS:
        caption += f" The first {_TIMELINE_RANKS} of {len(ranks)} ranks."
    title = f"Timeline of rounds: {run.name}"
    return Drawing(f"timeline-{number + 1}", title, caption, lambda theme: timeline.figure(spans, width=10.0))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("matplotlib is not installed: pip install 'megatron-acco[plot]'") from error
    return matplotlib


def _figure(panels: int, size: tuple[float, float], **options: Any) -> tuple[Any, Sequence[Any]]:
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False, **options)[0]


def _horizontal(axes: Any, time: bool = False) -> None:
    """Of tokens or seconds, from 0."""
    axes.grid(alpha=0.2)
    axes.set_xlim(left=0)
    if not time:
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(lambda value, position: _short(value))
        return
    last = axes.get_xlim()[1]
    unit, size = next(((u, s) for u, s in (("hours", 3600.0), ("minutes", 60.0)) if last > 3.0 * s), ("seconds", 1.0))
    axes.set_xlabel(f"{unit} of training")
    if size > 1.0:
        from matplotlib.ticker import MaxNLocator

        axes.set_xticks([size * tick for tick in MaxNLocator(8).tick_values(0.0, last / size) if size * tick <= last])
        axes.xaxis.set_major_formatter(lambda value, position: f"{value / size:g}")


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _label(name: str) -> str:
    """matplotlib leaves names with a leading underscore out of legends."""
    short = name if len(name) <= 48 else f"{name[:47]}…"
    return f" {short}" if short.startswith("_") else short


def _sums(values: Iterable[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += 0.0 if math.isnan(value) else value
        sums.append(total)
    return sums


def _short(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"
