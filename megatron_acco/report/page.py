"""A report as one HTML file that needs nothing else: no network, no script; pictures are inside.

Everything that comes from files or the command line passes through `html.escape`; the page forbids itself to load
anything (Content-Security-Policy), so that a mistake there could not reach out either.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from megatron_acco.report.comparison import (
    Summary,
    common,
    differences,
    micro_batches,
    summarize,
    versions,
)
from megatron_acco.report.figures import DARK, LIGHT, Drawing, png
from megatron_acco.report.runs import Run

_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --soft: #57606a; --line: #d0d7de; --paper: #ffffff; --back: #f6f8fa;
        --link: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #c9d1d9; --soft: #9aa4ae; --line: #353c44; --paper: #14181d; --back: #0d1014; --link: #6cb6ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 4px 0 12px; }
.soft, figcaption { color: var(--soft); }
nav { margin: 12px 0; } nav a { margin-right: 14px; white-space: nowrap; }
a { color: var(--link); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 16px 20px;
          margin: 16px 0; }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: 6px; }
th, td { padding: 5px 12px 5px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; }
td, tbody th { white-space: nowrap; }
th:first-child, .text td, .text th { text-align: left; }
tbody th { font-weight: 600; }
.text td, .text tbody th { white-space: normal; overflow-wrap: anywhere; font-size: 13px;
                           font-family: ui-monospace, monospace; font-weight: normal; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; }
pre { overflow-x: auto; font-size: 12.5px; background: var(--back); padding: 12px; border-radius: 6px; }
summary { cursor: pointer; padding: 3px 0; }
ul { margin: 4px 0; padding-left: 20px; }
@media print { body { background: none; } section { border: none; padding: 0; break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Picture:
    """A drawing as PNGs, for light pages and for dark ones."""

    drawing: Drawing
    light: bytes
    dark: bytes


def render(drawings: Sequence[Drawing]) -> list[Picture]:
    """All drawings in both themes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return [Picture(drawing, png(drawing, LIGHT), png(drawing, DARK)) for drawing in drawings]


def page(runs: Sequence[Run], pictures: Sequence[Picture], title: str, here: dict[str, str]) -> str:
    """The HTML.

    Args:
        here: versions of the packages that make the report.
    """
    parts: list[tuple[str, str, str]] = [("summary", "Summary", _summary(runs))]
    parts += [(p.drawing.key, p.drawing.title, _figure(p)) for p in pictures]
    parts.append(("configuration", "Configuration", _configuration(runs)))
    parts.append(("versions", "Versions", _versions(runs, here)))
    links = "".join(f'<a href="#{key}">{escape(name)}</a> ' for key, name, _ in parts)
    sections = "\n".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(name)}</h2>\n{body}</section>'
        for key, name, body in parts
    )
    keys = "\n".join(
        f".key-{i} {{ background: {LIGHT.color(i)}; }} "
        f"@media (prefers-color-scheme: dark) {{ .key-{i} {{ background: {DARK.color(i)}; }} }}"
        for i in range(len(runs))
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{keys}
</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="soft">Made by megatron-acco report, {made}.</p>
<nav aria-label="Sections">{links}</nav>
{sections}
</main>
</body>
</html>
"""


def _summary(runs: Sequence[Run]) -> str:
    reached = common(runs)
    rows = [summarize(run, reached) for run in runs]
    several, first = len(runs) > 1, rows[0]
    validated = several and not math.isnan(reached.loss)
    head = ["run", "method", "updates", "tokens", "time", "validation loss"]
    head += [f"at {_count(reached.tokens)} tokens", "to the first"] if validated else []
    head += ["tokens/s", *(["to the first"] if several else []), "waiting", "skipped"]
    head += [f"time to {reached.loss:.4g}", "speed-up"] if validated else []
    cells = []
    for number, (run, row) in enumerate(zip(runs, rows, strict=True)):
        line = [row.method or "not known", _updates(row), _count(row.tokens), _duration(row.seconds), _loss(row)]
        if validated:
            line += [_number(row.common_loss, ".4f"), _relative(row.common_loss, first.common_loss) if number else ""]
        line.append(_number(row.tokens_per_second, ",.0f"))
        if several:
            line.append(_ratio(row.tokens_per_second, first.tokens_per_second) if number else "")
        line += [_number(row.exposed, ".1%"), str(row.skipped)]
        if validated:
            line.append(_duration(row.seconds_to_loss))
            line.append(_ratio(first.seconds_to_loss, row.seconds_to_loss) if number else "")
        key = f'<span class="key key-{number}"></span>'
        cells.append((key + escape(run.name), [escape(cell) for cell in line]))
    notes = "".join(f"<li>{escape(run.name)}: {escape(note)}</li>" for run in runs for note in _notes(run))
    caption = "Validation loss in nats per token, at the committed weights; tokens/s: median over the log, all ranks; "
    caption += "waiting: median share of the time in which compute stood still for a round"
    if validated:
        caption += (
            f". Every validated run has reached {_count(reached.tokens)} tokens and a loss of {reached.loss:.6g}; "
        )
        caption += "speed-up: the first run's time to that loss over this one's"
    return _table(caption, head, cells) + (f"<ul>{notes}</ul>" if notes else "")


def _notes(run: Run) -> list[str]:
    """What a reader should know about a run, from its records."""
    notes = list(run.notes)
    for kind, records in (("training", run.records.train), ("validation", run.records.validation)):
        bad = [record.iteration for record in records if math.isnan(record.number("lm_loss"))]
        if bad:
            notes.append(
                f"the {kind} loss is not finite in {len(bad)} of {len(records)} records, first at update {bad[0]}"
            )
    if not run.records.validation:
        notes.append("no validation")
    for name, records in run.records.sets.items():
        notes.append(f"validation set {name}: {_number(records[-1].number('lm_loss'), '.4f')}")
    if run.records.test:
        notes.append(f"test loss {_number(run.records.test[-1].number('lm_loss'), '.4f')}")
    counts = micro_batches(run)
    if counts and min(counts) != max(counts):
        notes.append(f"micro-batches by rank: {min(counts):,} to {max(counts):,} on {len(counts)} ranks")
    return notes


def _figure(picture: Picture) -> str:
    light, dark = ("data:image/png;base64," + base64.b64encode(data).decode() for data in (picture.light, picture.dark))
    drawing = picture.drawing
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(drawing.title)}. {escape(drawing.caption)}" src="{light}"></picture>'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    names = [escape(run.name) for run in runs]
    known = sum(bool(run.arguments) for run in runs)
    if known > 1:
        rows = differences(runs)
        if rows:
            caption = "Arguments and DeepSpeed JSON, as resolved at each run's last start: what differs"
            cells = [(escape(key), [escape("–" if v is None else v) for v in values]) for key, values in rows]
            parts.append(_table(caption, ["argument", *names], cells, text=True))
        else:
            parts.append("<p>The configurations are the same.</p>")
    for run, name in zip(runs, names, strict=True):
        if run.arguments:
            text = escape(json.dumps(run.arguments, indent=2, ensure_ascii=False))
            parts.append(f"<details><summary>{name}: the whole configuration</summary><pre>{text}</pre></details>")
    return "\n".join(parts) or "<p>None of the runs has its configuration beside it.</p>"


def _versions(runs: Sequence[Run], here: dict[str, str]) -> str:
    found = dict(versions(runs))
    cells = [
        (escape(name), [escape(v or "–") for v in (*found.get(name, [None] * len(runs)), here.get(name))])
        for name in dict.fromkeys((*found, *here))
    ]
    caption = "As noted at each run's last start, and of this report. A dash: not noted"
    return _table(caption, ["package", *(escape(run.name) for run in runs), "report"], cells, text=True)


def _table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], text: bool = False) -> str:
    """A table whose first column heads its rows. `head` and cells are HTML, the caption is not."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    kind = ' class="text"' if text else ""
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}\u00a0{unit}"
    return _number(value, ".0f")


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60.0)
    return f"{seconds / 60.0:.1f} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _updates(row: Summary) -> str:
    if math.isnan(row.done) or row.done >= 0.9995:
        return f"{row.updates:,}"
    return f"{row.updates:,} ({row.done:.0%} of the run)"


def _loss(row: Summary) -> str:
    return f"{_number(row.loss, '.4f')}{' (not finite at the end)' if row.diverged else ''}"


def _relative(value: float, base: float) -> str:
    return _number(value / base - 1.0, "+.2%") if base else "–"


def _ratio(value: float, base: float) -> str:
    return "–" if not base else _number(value / base, ".3f") + ("" if math.isnan(value / base) else " x")
