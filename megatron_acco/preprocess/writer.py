"""A writer of Megatron indexed datasets whose memory does not grow with the number of documents.

The files are byte for byte those of `megatron.core.datasets.indexed_dataset.IndexedDatasetBuilder`, which keeps two
Python numbers per document in memory until the end and cannot go on after an interruption.

Layout of the index (little endian): magic, version (u64), code of the token type (u8), number of sequences (u64),
number of document bounds (u64), tokens of each sequence (i32), byte offset of each sequence (i64), bounds of the
documents in sequences (i64), starting with 0.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy

INDEX_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_CHUNK = 1 << 16
LONGEST_SEQUENCE = (1 << 31) - 1
"""Tokens of one sequence: the index holds them as i32."""


class IndexedWriter:
    """Appends documents to `STEM.bin`, with `STEM.lengths` and `STEM.counts` beside it until `finish`."""

    def __init__(self, stem: Path, dtype: Any, resume: dict[str, int] | None = None) -> None:
        """Open for writing.

        Args:
            stem: path without suffix.
            dtype: numpy type of the token ids.
            resume: what `checkpoint` returned; everything written after it is dropped. None: start empty.

        Raises:
            OSError: a file to be continued is missing or shorter than it was.
        """
        self.stem = stem
        self.dtype = numpy.dtype(dtype)
        self.tokens = 0
        self.sequences = 0
        self.documents = 0
        self._open_tokens = 0
        self._bin, self._lengths, self._counts = (self._open(suffix, resume) for suffix in _SUFFIXES)
        if resume is not None:
            self.tokens = resume["bin"] // self.dtype.itemsize
            self.sequences = resume["lengths"] // 4
            self.documents = resume["counts"] // 4

    def add(self, tokens: bytes, lengths: bytes, counts: bytes) -> None:
        """Append whole documents.

        Args:
            tokens: the ids of all documents, in the dataset's type.
            lengths: tokens of each sequence, i32.
            counts: sequences of each document, i32.
        """
        assert not self._open_tokens, "a document is open"
        self._bin.write(tokens)
        self._lengths.write(lengths)
        self._counts.write(counts)
        self.tokens += len(tokens) // self.dtype.itemsize
        self.sequences += len(lengths) // 4
        self.documents += len(counts) // 4

    def add_piece(self, tokens: bytes) -> None:
        """Append to the document that is open, or open one; `end_document` closes it.

        Raises:
            ValueError: the document is longer than the format can say.
        """
        self._open_tokens += len(tokens) // self.dtype.itemsize
        if self._open_tokens >= LONGEST_SEQUENCE:
            raise ValueError(
                f"a document of more than {LONGEST_SEQUENCE:,} tokens does not fit into the indexed format"
            )
        self._bin.write(tokens)

    def end_document(self, end: bytes) -> None:
        """Close the document that `add_piece` opened, with the ids in `end`. Does nothing if it has no token."""
        if self._open_tokens:
            self.add_piece(end)
            length, self._open_tokens = self._open_tokens, 0
            self._lengths.write(struct.pack("<i", length))
            self._counts.write(struct.pack("<i", 1))
            self.tokens += length
            self.sequences += 1
            self.documents += 1

    def checkpoint(self) -> dict[str, int]:
        """Bring everything written to the disk and return the sizes to continue from."""
        assert not self._open_tokens, "a document is open"
        sizes = {}
        for suffix, handle in zip(_SUFFIXES, (self._bin, self._lengths, self._counts), strict=True):
            handle.flush()
            os.fsync(handle.fileno())
            sizes[suffix] = handle.tell()
        return sizes

    def finish(self) -> tuple[Path, Path]:
        """Write the index and remove what only the writer needed.

        Returns:
            Paths of the `.bin` and the `.idx` file.
        """
        self.checkpoint()
        self.close()
        index = self._path("idx")
        with open(index, "wb") as out:
            out.write(INDEX_MAGIC)
            out.write(struct.pack("<QBQQ", _VERSION, self._type_code(), self.sequences, self.documents + 1))
            for lengths in _int32_chunks(self._path("lengths")):
                out.write(lengths.tobytes())
            position = 0
            for lengths in _int32_chunks(self._path("lengths")):
                ends = position + numpy.cumsum(lengths, dtype=numpy.int64) * self.dtype.itemsize
                out.write(numpy.concatenate([[position], ends[:-1]]).astype(numpy.int64).tobytes())
                position = int(ends[-1])
            bound = 0
            out.write(struct.pack("<q", bound))
            for counts in _int32_chunks(self._path("counts")):
                bounds = bound + numpy.cumsum(counts, dtype=numpy.int64)
                out.write(bounds.tobytes())
                bound = int(bounds[-1])
            out.flush()
            os.fsync(out.fileno())
        for suffix in ("lengths", "counts"):
            self._path(suffix).unlink()
        return self._path("bin"), index

    def close(self) -> None:
        """Close the files, leaving them as they are."""
        for handle in (self._bin, self._lengths, self._counts):
            handle.close()

    def _type_code(self) -> int:
        from megatron.core.datasets.indexed_dataset import DType

        return DType.code_from_dtype(self.dtype.type)

    def _path(self, suffix: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{suffix}")

    def _open(self, suffix: str, resume: dict[str, int] | None) -> BinaryIO:
        path = self._path(suffix)
        if resume is None:
            return open(path, "wb")
        if path.stat().st_size < resume[suffix]:
            raise OSError(f"{path} is shorter than the {resume[suffix]} bytes that were written")
        handle = open(path, "r+b")  # noqa: SIM115 (open as long as the writer)
        handle.truncate(resume[suffix])
        handle.seek(resume[suffix])
        return handle


_SUFFIXES = ("bin", "lengths", "counts")


def _int32_chunks(path: Path) -> Iterator[numpy.ndarray]:
    with open(path, "rb") as handle:
        while chunk := handle.read(4 * _CHUNK):
            yield numpy.frombuffer(chunk, dtype=numpy.int32)
