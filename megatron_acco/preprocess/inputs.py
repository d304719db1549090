"""Input files as a stream of tasks, with positions from which reading can go on after an interruption.

One process reads, so the order of the documents is that of the input whatever the number of workers. It does no more
than cut the input into tasks; JSON is parsed and text decoded where it is tokenized.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_acco.preprocess.encode import PIECE_CHARACTERS

FORMATS = ("jsonl", "text", "parquet", "datasets")
_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "text": (".txt", ".text", ".md"),
    "parquet": (".parquet",),
}
_COMPRESSED = (".gz", ".zst")
TASK_BYTES = 1 << 20
_ROWS = 256
_AHEAD = 1024  # characters behind a cut, which are looked at to judge it

FindCut = Callable[[str, int, int], tuple[int, int] | None]
"""`BatchEncoder.find_cut`: where a text can be cut, from start, before a position."""


@dataclass(frozen=True)
class Source:
    """One input file, or a folder that Hugging Face datasets wrote."""

    path: str
    kind: str
    size: int
    changed: int
    """Time of the last change, ns."""


@dataclass(frozen=True)
class Position:
    """A place between two documents: number of the source, offset in it (bytes after decompression, or rows), line."""

    source: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Task:
    """Documents to tokenize.

    Attributes:
        kind: `lines` (payload: bytes of whole lines), `too_long` (a line that was left out), `rows` (list of one list
            of values per key), `texts` (list of bytes of whole files), `piece` (str, a part of a document).
        source: for messages.
        first: line or row number of the first document, 1 for the first in the source.
        payload: see `kind`.
        after: where to go on after this task; None inside a document.
        read: bytes of the input files read up to here, as they are on the disk.
        names: of the files in `texts`.
    """

    kind: str
    source: str
    first: int
    payload: Any
    after: Position | None
    read: int
    names: tuple[str, ...] = ()


def read_lines(path: Path, flag: str) -> list[str]:
    """The lines of a UTF-8 file, ended by line feeds alone: text has other characters that Python takes for ends.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}") from error
    return text.removesuffix("\n").split("\n") if text else []


# ---- finding ------------------------------------------------------------------------------------------------------


def find_sources(inputs: Sequence[str], form: str = "auto", flag: str = "--input") -> list[Source]:
    """Files behind `--input`: files, folders (searched for known suffixes, in the order of their names), patterns.

    Args:
        inputs: paths.
        form: one of FORMATS for all files whatever their names, or `auto`.
        flag: the argument that named them, for messages.

    Raises:
        ValueError: a path does not exist, or nothing says what it holds.
    """
    found: list[Source] = []
    for given in inputs:
        paths = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        if not paths:
            raise ValueError(f"{flag} {given}: no such file or folder")
        for path in paths:
            found.extend(
                _below(path, form, flag) if os.path.isdir(path) else [_source(path, _kind(path, form, flag), flag)]
            )
    return found


def _kind(path: str, form: str, flag: str) -> str:
    if form != "auto":
        return form
    kind = _kind_by_suffix(path)
    if kind is None:
        known = " ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
        raise ValueError(
            f"{flag} {path}: its name does not say what it holds (known: {known}, the first two kinds also with .gz "
            f"or .zst){_hint(flag)}"
        )
    return kind


def _hint(flag: str) -> str:
    """Only what has --input has --input-format."""
    return "; give --input-format" if flag == "--input" else ""


def _kind_by_suffix(path: str) -> str | None:
    name = path.lower()
    for suffix in _COMPRESSED:
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            return next((k for k in ("jsonl", "text") if name.endswith(_SUFFIXES[k])), None)
    return next((kind for kind, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), None)


def _below(folder: str, form: str, flag: str) -> list[Source]:
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        parts = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        raise ValueError(f"{flag} {folder} holds several datasets; name one: {folder}/{{{','.join(parts)}}}")
    if form == "datasets" or os.path.isfile(os.path.join(folder, "dataset_info.json")):
        return [_source(folder, "datasets", flag)]
    # Hidden files and folders are no data: notebooks' and version control's.
    paths = sorted(
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    found = [
        _source(str(path), kind, flag)
        for path in paths
        if (kind := _kind_by_suffix(str(path)) if form == "auto" else form) is not None
    ]
    if not found:
        raise ValueError(f"{flag} {folder}: no file with a known suffix in it{_hint(flag)}")
    return found


def _source(path: str, kind: str, flag: str) -> Source:
    if kind == "datasets":
        if not os.path.isdir(path):
            raise ValueError(f"{flag} {path}: a folder written by save_to_disk was expected")
        stats = [entry.stat() for entry in os.scandir(path) if entry.is_file()]
        return Source(path, kind, sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats))
    try:
        with open(path, "rb"):
            stat = os.stat(path)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error
    return Source(path, kind, stat.st_size, stat.st_mtime_ns)


def check_sources(sources: Sequence[Source], keys: Sequence[str]) -> None:
    """Refuse what can be seen to be wrong before anything is read.

    Raises:
        ValueError: several keys of plain text, a missing column, a column that is not text.
        ModuleNotFoundError: a package for one of the formats is missing.
    """
    for source in sources:
        if source.kind == "text" and len(keys) != 1:
            raise ValueError(
                f"{source.path} is plain text, which has no fields, and {len(keys)} are asked for ({', '.join(keys)})"
            )
        if source.kind == "parquet":
            with _parquet(source.path) as table:
                _check_columns(source.path, table.schema_arrow, keys)
        elif source.kind == "datasets":
            _check_columns(source.path, _dataset(source.path).features.arrow_schema, keys)
        elif source.path.lower().endswith(".zst"):
            _zstandard(source.path)


def _check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    import pyarrow.types as kinds

    for key in keys:
        if key not in schema.names:
            raise ValueError(f"{path} has no column {key!r}, only {', '.join(schema.names)}")
        kind = schema.field(key).type
        if kinds.is_list(kind) or kinds.is_large_list(kind):
            kind = kind.value_type
        if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)):
            raise ValueError(f"{path}: column {key!r} holds {schema.field(key).type}, not text")


# ---- reading ------------------------------------------------------------------------------------------------------


def read_tasks(
    sources: Sequence[Source], keys: Sequence[str], start: Position, longest: int, find_cut: FindCut
) -> Iterator[Task]:
    """Tasks from a position on.

    Args:
        sources: what to read.
        keys: columns of tables.
        start: first document.
        longest: bytes that a line may have, and a text that cannot be cut.
        find_cut: see `FindCut`.

    Raises:
        ValueError: a file is damaged, or a text is too long and cannot be cut.
    """
    before = sum(source.size for source in sources[: start.source])
    pending: list[tuple[str, bytes]] = []
    for number in range(start.source, len(sources)):
        source = sources[number]
        place = start if number == start.source else Position(number)
        following = Position(number + 1)
        small = source.kind == "text" and source.size <= TASK_BYTES and not _is_compressed(source.path)
        if small:
            # Small files share a task.
            pending.append((source.path, _read_whole(source.path)))
        size = sum(len(text) for _, text in pending)
        last = number + 1 == len(sources)
        if pending and (size >= TASK_BYTES or not small or last):
            names = tuple(name for name, _ in pending)
            read = before + (source.size if small else 0)
            after = following if small else Position(number)
            yield Task("texts", names[0], 1, [text for _, text in pending], after, read, names)
            pending.clear()
        if not small:
            yield from _READERS[source.kind](source, keys, place, before, longest, find_cut)
        before += source.size


def _read_lines(
    source: Source, keys: Sequence[str], place: Position, before: int, longest: int, find_cut: FindCut
) -> Iterator[Task]:
    offset, line = place.offset, place.line
    with _open(source.path) as (stream, progress):
        _skip(stream, offset, source.path)
        while blob := stream.read(TASK_BYTES):
            complete, head = blob, b""
            too_long = False
            if not blob.endswith(b"\n"):
                cut = blob.rfind(b"\n") + 1
                complete, head = blob[:cut], blob[cut:]
                room = max(1, longest - len(head))
                rest = stream.readline(room)
                too_long = len(rest) == room and not rest.endswith(b"\n")
                if not too_long:
                    complete, head = blob + rest, b""
            if complete:
                offset += len(complete)
                first, line = line, line + complete.count(b"\n") + (not complete.endswith(b"\n"))
                after = Position(place.source, offset, line)
                yield Task("lines", source.path, first, complete, after, before + progress())
            if too_long:
                offset += len(head) + len(rest)
                while more := stream.readline(TASK_BYTES):
                    offset += len(more)
                    if more.endswith(b"\n"):
                        break
                after = Position(place.source, offset, line + 1)
                yield Task("too_long", source.path, line, longest, after, before + progress())
                line += 1


def _read_text(
    source: Source, keys: Sequence[str], place: Position, before: int, longest: int, find_cut: FindCut
) -> Iterator[Task]:
    """One document, in pieces that tokenize as the whole does."""
    after = Position(place.source + 1)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, offset, number = "", 0, 1
    with _open(source.path) as (stream, progress):
        while True:
            blob = stream.read(TASK_BYTES)
            try:
                text += decoder.decode(blob, final=not blob)
            except UnicodeDecodeError as error:
                raise ValueError(f"{source.path}: not UTF-8 text near byte {offset + error.start:,}") from error
            offset += len(blob)
            if not blob:
                break
            if len(text) < 2 * PIECE_CHARACTERS:
                continue
            cut = find_cut(text, 0, len(text) - _AHEAD)
            if cut is not None:
                yield Task("piece", source.path, number, text[: cut[0]], None, before + progress())
                text, number = text[cut[1] :], number + 1
            elif len(text) > longest:
                raise ValueError(
                    f"{source.path}: this tokenizer gives no place at which a text of more than {longest:,} bytes can "
                    f"be cut without changing its ids; split the file, or raise --document-limit-mb"
                )
    yield Task("piece", source.path, number, text, after, before + source.size)


def _read_parquet(
    source: Source, keys: Sequence[str], place: Position, before: int, longest: int, find_cut: FindCut
) -> Iterator[Task]:
    with _parquet(source.path) as table:
        total, row = max(1, table.metadata.num_rows), 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= place.offset:
                row += rows
                continue
            for batch in table.iter_batches(_ROWS, row_groups=[group], columns=list(dict.fromkeys(keys))):
                skipped = min(max(0, place.offset - row), batch.num_rows)
                row += batch.num_rows
                if skipped < batch.num_rows:
                    columns = [batch.column(key).slice(skipped).to_pylist() for key in keys]
                    yield _rows(source, place, columns, row, before, total)


def _read_dataset(
    source: Source, keys: Sequence[str], place: Position, before: int, longest: int, find_cut: FindCut
) -> Iterator[Task]:
    dataset = _dataset(source.path).select_columns(list(dict.fromkeys(keys))).with_format(None)
    for start in range(place.offset, len(dataset), _ROWS):
        batch = dataset[start : start + _ROWS]
        end = min(start + _ROWS, len(dataset))
        yield _rows(source, place, [batch[key] for key in keys], end, before, len(dataset))


def _rows(source: Source, place: Position, columns: list[list[Any]], end: int, before: int, total: int) -> Task:
    after = Position(place.source, end, end + 1)
    first = end - len(columns[0]) + 1
    return Task("rows", source.path, first, columns, after, before + source.size * end // total)


_READERS: dict[str, Callable[..., Iterator[Task]]] = {
    "jsonl": _read_lines,
    "text": _read_text,
    "parquet": _read_parquet,
    "datasets": _read_dataset,
}


# ---- opening ------------------------------------------------------------------------------------------------------


def _is_compressed(path: str) -> bool:
    return path.lower().endswith(_COMPRESSED)


def _read_whole(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _open(path: str) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The decompressed stream, and a function that tells how many bytes of the file have been read.

    Raises:
        ValueError: the file cannot be read or is damaged.
    """
    raw = open(path, "rb")  # noqa: SIM115 (closed below)
    name = path.lower()
    stream: Any = raw
    damage: tuple[type[BaseException], ...] = (EOFError, zlib.error, OSError)
    if name.endswith(".gz"):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), TASK_BYTES)  # type: ignore[arg-type]
    elif name.endswith(".zst"):
        zstandard = _zstandard(path)
        # A file may be several frames, one after the other, as parallel compressors write it.
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(raw, read_across_frames=True)
        stream = io.BufferedReader(reader, TASK_BYTES)
        damage = (*damage, zstandard.ZstdError)
    try:
        yield stream, raw.tell
    except damage as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error
    finally:
        raw.close()


def _skip(stream: BinaryIO, offset: int, path: str) -> None:
    if not _is_compressed(path):
        stream.seek(offset)
        return
    while offset > 0:
        blob = stream.read(min(offset, TASK_BYTES))
        if not blob:
            raise EOFError("shorter than it was")
        offset -= len(blob)


def _zstandard(path: str) -> Any:
    return _needs("zstandard", path)


def _parquet(path: str) -> Any:
    parquet = _needs("pyarrow.parquet", path)
    import pyarrow

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _dataset(path: str) -> Any:
    datasets = _needs("datasets", path)
    try:
        return datasets.load_from_disk(path)
    except Exception as error:
        raise ValueError(f"{path} is not a readable Hugging Face dataset: {error}") from error


def _needs(module: str, path: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        what = "datasets" if package == "datasets" else "'megatron-acco[data]'"
        raise ModuleNotFoundError(
            f"{path}: reading it needs {package}, which is not installed: pip install {what}"
        ) from error
