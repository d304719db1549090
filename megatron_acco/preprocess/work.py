"""A task to the bytes that go into the files. Runs in the worker processes; output depends on the task only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_acco.preprocess.encode import BatchEncoder
from megatron_acco.preprocess.inputs import Task

BATCH_CHARACTERS = 1 << 20
"""Text tokenized in one call."""


@dataclass
class KeyOutput:
    """What one key's dataset gets: ids, tokens per sequence (i32), sequences per document (i32)."""

    tokens: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    empty: int = 0

    def packed(self) -> tuple[bytes, bytes, bytes]:
        """The arguments of `IndexedWriter.add`."""
        lengths, counts = (numpy.array(values, dtype=numpy.int32).tobytes() for values in (self.lengths, self.counts))
        return b"".join(self.tokens), lengths, counts


@dataclass
class Result:
    """What came of a task: packed output per key, number of documents, of empty values among them, of bad ones."""

    outputs: list[tuple[bytes, bytes, bytes]]
    documents: int
    empty: int
    bad: list[tuple[str, str]]
    """Place and what is wrong there."""


class Worker:
    """Turns tasks into results."""

    def __init__(self, encoder: BatchEncoder, keys: Sequence[str], end: int | None) -> None:
        """Args:
        encoder: of the tokenizer.
        keys: fields to tokenize.
        end: id to put behind each document, or None.
        """
        self.encoder = encoder
        self.keys = keys
        self.end = b"" if end is None else encoder.pack([end])

    def run(self, task: Task) -> Result:
        """Tokenize the documents of a task."""
        if task.kind == "piece":
            tokens = b"".join(self.encoder.encode([task.payload]))
            return Result([(tokens, b"", b"")], 0, 0, [])
        bad: list[tuple[str, str]] = []
        result = Result([], 0, 0, bad)
        outputs = [KeyOutput() for _ in self.keys]
        group: list[tuple[str, list[list[str]]]] = []
        size = 0
        for place, value in documents_of(task, self.keys):
            if isinstance(value, str):
                bad.append((place, value))
                continue
            group.append((place, value))
            size += sum(len(text) for texts in value for text in texts)
            if size >= BATCH_CHARACTERS:
                self._encode(group, outputs, result)
                group, size = [], 0
        self._encode(group, outputs, result)
        result.outputs = [output.packed() for output in outputs]
        result.empty = sum(output.empty for output in outputs)
        return result

    def _encode(self, group: list[tuple[str, list[list[str]]]], outputs: list[KeyOutput], result: Result) -> None:
        texts = [text for _, value in group for sequences in value for text in sequences]
        try:
            encoded = self.encoder.encode(texts)
        except Exception as error:
            # Which one was it? Then the others go on without it.
            if len(group) == 1:
                reason = f"cannot be tokenized: {error}" if str(error) else f"cannot be tokenized: {error!r}"
                result.bad.append((group[0][0], reason))
                return
            for document in group:
                self._encode([document], outputs, result)
            return
        result.documents += len(group)
        itemsize, position = self.encoder.dtype.itemsize, 0
        for _, value in group:
            for output, sequences in zip(outputs, value, strict=True):
                own = [ids for ids in encoded[position : position + len(sequences)] if ids]
                position += len(sequences)
                if not own:
                    output.empty += 1
                    continue
                own[-1] += self.end
                output.tokens += own
                output.lengths += [len(ids) // itemsize for ids in own]
                output.counts.append(len(own))


def documents_of(task: Task, keys: Sequence[str]) -> Iterator[tuple[str, list[list[str]] | str]]:
    """Place and per key the sequences of each document of a task, or what is wrong with it."""
    if task.kind == "too_long":
        limit = f"{task.payload / (1 << 20):.4g}"
        yield f"{task.source}:{task.first}", f"longer than the {limit} MB of --document-limit-mb"
    elif task.kind == "lines":
        for number, line in enumerate(task.payload.split(b"\n"), task.first):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line and not line.isspace():
                yield f"{task.source}:{number}", _parse(line, keys)
    elif task.kind == "texts":
        for name, blob in zip(task.names, task.payload, strict=True):
            try:
                yield name, [[blob.decode("utf-8-sig")]]
            except UnicodeDecodeError as error:
                yield name, f"not UTF-8 text near byte {error.start:,}"
    else:
        assert task.kind == "rows"
        for number, row in enumerate(zip(*task.payload, strict=True), task.first):
            place = f"{task.source}: row {number}"
            yield place, _values(dict(zip(keys, row, strict=True)), keys)


def _parse(line: bytes, keys: Sequence[str]) -> list[list[str]] | str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 near byte {error.start:,} of the line"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(record, dict):
        return f"not a JSON object but {_kind(record)}"
    value = _values(record, keys)
    if isinstance(value, list) and (b"\\ud" in line or b"\\uD" in line):
        try:
            for sequences in value:
                for text in sequences:
                    text.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is no character"
    return value


def _values(record: dict[str, Any], keys: Sequence[str]) -> list[list[str]] | str:
    values = []
    for key in keys:
        value = record.get(key)
        if isinstance(value, str):
            values.append([value])
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            values.append(value)
        elif key not in record:
            return f"no key {key!r}, only {', '.join(map(repr, list(record)[:8])) or 'none at all'}"
        else:
            return f"the value of {key!r} is {_kind(value)}, not text"
    return values


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
