"""Reading run folders: metrics.jsonl, arguments.json beside it, and the profile of the rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_acco.timeline import Span, is_trace, read_trace

METRICS, ARGUMENTS = "metrics.jsonl", "arguments.json"


class Record(dict[str, Any]):
    """One line of metrics.jsonl."""

    @property
    def iteration(self) -> int:
        """Updates so far."""
        return int(self["iteration"])

    def number(self, key: str) -> float:
        """A finite number, or NaN where there is none."""
        return _number(self.get(key))

    def numbers(self, key: str) -> list[float]:
        """A list with an entry per rank, empty where there is none."""
        value = self.get(key)
        return [_number(item) for item in value] if isinstance(value, list) else []


@dataclass(frozen=True)
class Records:
    """The records of a metrics.jsonl, each kind in the order of iterations.

    Attributes:
        train, validation, test: records of that kind.
        sets: of several validation sets, by name.
        cut: the last line is not whole: the run is at work, or was cut off.
    """

    train: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)
    test: list[Record] = field(default_factory=list)
    sets: dict[str, list[Record]] = field(default_factory=dict)
    cut: bool = False


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        name: in legends and tables.
        folder: that holds metrics.jsonl.
        records: of the whole run.
        arguments: the resolved arguments and JSON of its last start, empty if they are not there.
        spans: of its profile, empty if it has none.
        notes: what a reader of the figures should know.
    """

    name: str
    folder: Path
    records: Records
    arguments: dict[str, Any]
    spans: list[Span]
    notes: list[str]

    def section(self, name: str) -> dict[str, Any]:
        """A group of the arguments, empty if it is not there."""
        value = self.arguments.get(name)
        return value if isinstance(value, dict) else {}


def read_records(path: Path) -> Records:
    """Read a metrics.jsonl.

    An iteration that stands twice (a run continued from an older checkpoint) counts as last written.

    Raises:
        ValueError: no such file, or a damaged line other than a last one that is cut off.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    found: dict[tuple[str, str], dict[int, Record]] = {}
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    cut = bool(rest)
    for number, line in enumerate((*lines, rest), start=1):
        if not line and number > len(lines):
            break
        try:
            record = Record(json.loads(line))
            key = str(record["kind"]), str(record.get("set", ""))
            found.setdefault(key, {})[record.iteration] = record
            cut = cut and number <= len(lines)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number < len(lines) + bool(rest):
                raise ValueError(f"{path}, line {number} is not a record of a training log: {error}") from error
            cut = True
    ordered = {key: [by_iteration[i] for i in sorted(by_iteration)] for key, by_iteration in found.items()}
    sets = {name: records for (kind, name), records in ordered.items() if kind == "validation_set"}
    train, validation, test = (ordered.get((kind, ""), []) for kind in ("train", "validation", "test"))
    return Records(train, validation, test, sets, cut)


def split_name(text: str) -> tuple[str, Path]:
    """NAME and path of `[NAME=]PATH`; the default name is the folder's. Both may hold a "=" if the path exists."""
    ends = [] if Path(text).exists() else [i for i, letter in enumerate(text) if letter == "="]
    if ends:
        end = next((i for i in ends if Path(text[i + 1 :]).exists()), ends[0])
        return text[:end], Path(text[end + 1 :])
    folder = Path(text) if Path(text).is_dir() else Path(text).parent
    return folder.resolve().name or str(folder), Path(text)


def read_runs(texts: Sequence[str]) -> list[Run]:
    """The runs of `[NAME=]PATH` each, PATH a run folder or its metrics.jsonl.

    Raises:
        ValueError: a path that is no run, a damaged log, or two runs of one name.
    """
    named = [split_name(text) for text in texts]
    names = [name for name, _ in named]
    for i, (name, path) in enumerate(named):
        if names.count(name) > 1 and not texts[i].startswith(f"{name}="):
            named[i] = str(path), path
    for name, path in named:
        if [other for other, _ in named].count(name) > 1:
            raise ValueError(f'two runs are called "{name}" ({path}); give names: NAME=RUN')
    return [_read_run(name, path) for name, path in named]


def _read_run(name: str, path: Path) -> Run:
    metrics = path / METRICS if path.is_dir() else path
    if not metrics.is_file():
        what = f"no {METRICS} in this folder" if path.is_dir() else "no such file or folder"
        raise ValueError(f"{path}: {what}; name the folder that --save or --metrics-file wrote to")
    records, notes = read_records(metrics), []
    if not (records.train or records.validation):
        raise ValueError(f"{metrics} holds no records of training yet")
    if records.cut:
        notes.append("the last line of its log is not whole: it is at work, or was cut off")
    arguments = _read_arguments(metrics.with_name(ARGUMENTS), notes)
    run = Run(name, metrics.parent, records, arguments, [], notes)
    return Run(name, metrics.parent, records, arguments, _read_profile(run), notes)


def _read_arguments(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(arguments, dict):
            return arguments
        notes.append(f"its {ARGUMENTS} does not hold arguments")
    except FileNotFoundError:
        notes.append(f"it has no {ARGUMENTS}: its configuration is not known")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"its {ARGUMENTS} cannot be read: {error}")
    return {}


def _read_profile(run: Run) -> list[Span]:
    """Of the newest trace in the folder, or where the arguments say."""
    told = run.section("logging").get("profile_rounds")
    candidates = set(run.folder.glob("*.json"))
    if isinstance(told, str) and told:
        candidates |= {Path(told), run.folder / Path(told).name}
    traces = sorted((path for path in candidates if is_trace(path)), key=lambda path: path.stat().st_mtime)
    if not traces:
        return []
    try:
        return read_trace(traces[-1])
    except (OSError, ValueError) as error:
        run.notes.append(f"its profile {traces[-1].name} cannot be read: {error}")
        return []


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested objects that is not an object itself."""
    if isinstance(tree, dict) and (tree or not prefix):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number beyond the largest float
        return math.nan
