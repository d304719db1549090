"""`megatron-acco preprocess-data`: from options to datasets.

Everything is written into `PREFIX.preprocess/` and published by renames at the end, index last, so a dataset that can
be opened is complete. The folder also holds `state.json`: how far the input has been read and how long the files were
then. It is replaced after each partition, when everything before it is on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_acco.preprocess.encode import BatchEncoder
from megatron_acco.preprocess.inputs import Position, Source, Task, check_sources, find_sources, read_tasks
from megatron_acco.preprocess.metadata import describe_tokenizer, metadata_path, write_metadata
from megatron_acco.preprocess.options import PreprocessOptions
from megatron_acco.preprocess.pool import run_tasks
from megatron_acco.preprocess.progress import Progress
from megatron_acco.preprocess.vocabulary import train_tokenizer
from megatron_acco.preprocess.work import Result, Worker, documents_of
from megatron_acco.preprocess.writer import IndexedWriter
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer

Log = Callable[[str], None]
_STATE_FORMAT = 1
_PARTITION_BYTES = 1 << 26
_BAD_SHOWN = 20


@dataclass
class Counts:
    """What has been done."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    partitions: int = 0


@dataclass(frozen=True)
class Summary:
    """What a run made. `documents` and `tokens` are of each key's dataset, by its prefix."""

    prefixes: dict[str, tuple[int, int]]
    counts: Counts
    input_bytes: int
    seconds: float
    resumed: bool
    way: str


def preprocess(options: PreprocessOptions, tokenizer_options: TokenizerOptions, log: Log = print) -> Summary:
    """Tokenize the input into one dataset per key.

    The files depend on the input, the keys, the tokenizer and --append-eod only: not on workers, partitions or
    interruptions.

    Raises:
        ValueError: for everything that the user can put right, before anything is written where that can be seen; a
            bad document ends the run without output, and what was done before it is kept.
    """
    started = time.perf_counter()
    sources = find_sources(options.input, options.input_format)
    check_sources(sources, options.keys)
    if options.train_tokenizer:
        tokenizer_options = _check_training(options, tokenizer_options)
    else:
        build_tokenizer(tokenizer_options)  # a bad tokenizer leaves no trace
    work = Path(f"{options.output_prefix}.preprocess")
    _check_outputs(options, tokenizer_options.tokenizer_model if options.train_tokenizer else None, work)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-prefix {options.output_prefix} cannot be written: {error}") from error
    with _locked(work):
        try:
            job = _Job(options, tokenizer_options, sources, work, log)
            job.run()
        except OSError as error:
            raise ValueError(f"writing {work} failed: {error}; the same command continues") from error
        finally:
            _remove_what_helps_nobody(work)
    seconds = time.perf_counter() - started
    size = sum(source.size for source in sources)
    return Summary(job.written, job.counts, size, seconds, job.resumed, job.encoder.way)


def dataset_prefix(output_prefix: str, key: str) -> str:
    """Prefix of a key's dataset, as Megatron-LM names it."""
    return f"{output_prefix}_{key}_document"


class _Job:
    """One run in its working folder."""

    def __init__(
        self,
        options: PreprocessOptions,
        tokenizer_options: TokenizerOptions,
        sources: list[Source],
        work: Path,
        log: Log,
    ) -> None:
        from megatron.core.datasets.indexed_dataset import DType

        self.options, self.sources, self.work, self.log = options, sources, work, log
        self.model_target = tokenizer_options.tokenizer_model if options.train_tokenizer else None
        if self.model_target is not None:
            assert tokenizer_options.vocab_size is not None
            model = self._trained_model(tokenizer_options.vocab_size)
            tokenizer_options = dataclasses.replace(tokenizer_options, tokenizer_model=str(model))
        tokenizer = build_tokenizer(tokenizer_options)
        self.tokenizer = describe_tokenizer(tokenizer)
        self.encoder = BatchEncoder(tokenizer, DType.optimal_dtype(tokenizer.vocab_size))
        self.worker = Worker(self.encoder, options.keys, tokenizer.eod if options.append_eod else None)
        self.counts = Counts()
        self.position = Position()
        self.resumed = False
        self.written: dict[str, tuple[int, int]] = {}
        self.writers: list[IndexedWriter] = []

    def run(self) -> None:
        """Tokenize what is left and publish."""
        state = self._load_state()
        if state is None or not state["complete"]:
            self._open(state)
            try:
                self._tokenize()
                if not all(writer.documents for writer in self.writers):
                    raise ValueError(f"the input holds no text for {self._empty_key()!r}; nothing was written")
                self._finish()
            finally:
                for writer in self.writers:
                    writer.close()
        self._publish()

    def _open(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self._clear()
        else:
            self.resumed = True
            self.position = Position(**state["position"])
            self.counts = Counts(**state["counts"])
            place = self.sources[self.position.source].path if self.position.source < len(self.sources) else "the end"
            self.log(f"continuing an interrupted run after {self.counts.documents:,} documents, in {place}")
        sizes = state["files"] if state is not None else [None] * len(self.options.keys)
        self.writers = [
            IndexedWriter(self.work / key, self.encoder.dtype, resume)
            for key, resume in zip(self.options.keys, sizes, strict=True)
        ]

    def _tokenize(self) -> None:
        options = self.options
        total = sum(source.size for source in self.sources)
        partition = total / options.partitions if options.partitions else _PARTITION_BYTES
        tasks = read_tasks(self.sources, options.keys, self.position, options.longest, self.encoder.find_cut)
        progress = Progress(self.log, options.log_interval, total, self.counts.documents)
        kept: int | None = None
        try:
            for task, result in run_tasks(self.worker, tasks, options.number_of_workers):
                if kept is None:
                    kept = task.read
                self._take(task, result)
                progress.show(self.counts.documents, task.read)
                if task.after is not None:
                    self.position = task.after
                    if task.read - kept >= partition:
                        kept = task.read
                        self._keep()
        finally:
            progress.close()

    def _take(self, task: Task, result: Result) -> None:
        for place, reason in result.bad:
            if not self.options.skip_bad_lines:
                raise ValueError(
                    f"{place}: {reason}; nothing was published. --skip-bad-lines leaves such documents out, and "
                    f"continues from the last partition that was finished"
                )
            self.counts.bad += 1
            if self.counts.bad <= _BAD_SHOWN:
                self.log(f"left out {place}: {reason}")
            elif self.counts.bad == _BAD_SHOWN + 1:
                self.log("further documents that are left out are counted only")
        if task.kind == "piece":
            (tokens, _, _), (writer,) = result.outputs[0], self.writers
            before = writer.documents
            writer.add_piece(tokens)
            if task.after is not None:
                writer.end_document(self.worker.end)
                self.counts.documents += 1
                self.counts.empty += writer.documents == before
            return
        for writer, output in zip(self.writers, result.outputs, strict=True):
            writer.add(*output)
        self.counts.documents += result.documents
        self.counts.empty += result.empty

    def _keep(self) -> None:
        self.counts.partitions += 1
        self._save_state([writer.checkpoint() for writer in self.writers], complete=False)

    def _finish(self) -> None:
        for key, writer in zip(self.options.keys, self.writers, strict=True):
            writer.finish()
            numbers = {
                "dtype": writer.dtype.name,
                "documents": writer.documents,
                "sequences": writer.sequences,
                "tokens": writer.tokens,
            }
            write_metadata(self.work / f"{key}.meta.json", self.tokenizer, self.options.append_eod, **numbers)
        self._save_state([], complete=True)

    def _publish(self) -> None:
        if self.model_target is not None and (self.work / _MODEL).exists():
            os.replace(self.work / _MODEL, self.model_target)
        for key in self.options.keys:
            prefix = dataset_prefix(self.options.output_prefix, key)
            staged = [(self.work / f"{key}.{suffix}", Path(f"{prefix}.{suffix}")) for suffix in _PUBLISHED]
            if staged[-1][0].exists():
                # An old index must not describe new tokens, not even for a moment.
                staged[-1][1].unlink(missing_ok=True)
            for source, target in staged:
                if source.exists():
                    os.replace(source, target)
            record = json.loads(metadata_path(prefix).read_text())
            self.written[prefix] = (record["documents"], record["tokens"])
        shutil.rmtree(self.work)

    # ---- the working folder ----

    def _identity(self) -> dict[str, Any]:
        """All that the output depends on."""
        return {
            "format": _STATE_FORMAT,
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "keys": list(self.options.keys),
            "tokenizer": self.tokenizer,
            "append_eod": self.options.append_eod,
            "document_limit": self.options.longest,
        }

    def _load_state(self) -> dict[str, Any] | None:
        """How far an interrupted run of this job came, None if it is to be done from the start."""
        state = _read_json(self.work / _STATE)
        if state is None:
            return None
        if state.get("identity") != self._identity():
            self.log(f"{self.work} is of a run with other input or settings: starting over")
            return None
        if state["counts"]["bad"] and not self.options.skip_bad_lines:
            self.log("the interrupted run left out bad documents: starting over without --skip-bad-lines")
            return None
        sizes = {
            self.work / f"{key}.{suffix}": size
            for key, files in zip(self.options.keys, state["files"], strict=not state["complete"])
            for suffix, size in files.items()
        }
        if any(not path.exists() or path.stat().st_size < size for path, size in sizes.items()):
            self.log(f"{self.work} has lost files: starting over")
            return None
        return state

    def _save_state(self, files: list[dict[str, int]], complete: bool) -> None:
        state = {
            "identity": self._identity(),
            "position": dataclasses.asdict(self.position),
            "files": files,
            "counts": dataclasses.asdict(self.counts),
            "complete": complete,
        }
        _write_json(self.work / _STATE, state)

    def _clear(self) -> None:
        for path in self.work.iterdir():
            if path.name not in (_MODEL, _MODEL_STATE):
                path.unlink()

    def _empty_key(self) -> str:
        return next(key for key, writer in zip(self.options.keys, self.writers, strict=True) if not writer.documents)

    # ---- the trained tokenizer ----

    def _trained_model(self, size: int) -> Path:
        """Train the model, or take the one that an interrupted run of this job trained."""
        path, record = self.work / _MODEL, self.work / _MODEL_STATE
        if not path.exists() and _is_complete(self.work):
            assert self.model_target is not None
            return Path(self.model_target)  # published just before an interruption
        wanted = {
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "keys": list(self.options.keys),
            "sample": self.options.tokenizer_sample_mb,
            "size": size,
        }
        if path.exists() and _read_json(record) == wanted:
            return path
        started = time.perf_counter()
        path.write_bytes(train_tokenizer(self._sample(), size))
        _write_json(record, wanted)
        self.log(f"trained a SentencePiece model of {size:,} pieces in {time.perf_counter() - started:.1f} s")
        return path

    def _sample(self) -> Iterator[str]:
        """Texts from all over the input, --tokenizer-sample-mb of it at most."""

        def at_any_space(text: str, start: int, before: int) -> tuple[int, int] | None:
            at = text.rfind(" ", start + 1, before)
            return None if at < 0 else (at, at)

        total = sum(source.size for source in self.sources)
        every = max(1, math.ceil(total / (self.options.tokenizer_sample_mb * (1 << 20))))
        tasks = read_tasks(self.sources, self.options.keys, Position(), self.options.longest, at_any_space)
        for task in itertools.islice(tasks, 0, None, every):
            if task.kind == "piece":
                yield task.payload
                continue
            for _, value in documents_of(task, self.options.keys):
                # Bad documents are reported when they are tokenized.
                for sequences in [] if isinstance(value, str) else value:
                    yield from sequences


_STATE = "state.json"
_MODEL = "tokenizer.model"
_MODEL_STATE = "tokenizer.json"
_PUBLISHED = ("bin", "meta.json", "idx")


def _remove_what_helps_nobody(work: Path) -> None:
    """Remove the folder if there is neither progress nor a trained model in it to continue from."""
    if work.is_dir() and not (work / _STATE).exists() and not (work / _MODEL).exists():
        shutil.rmtree(work, ignore_errors=True)


def _check_training(options: PreprocessOptions, tokenizer: TokenizerOptions) -> TokenizerOptions:
    """The options of the tokenizer that will be trained."""
    if tokenizer.tokenizer_type != "SentencePieceTokenizer":
        raise ValueError(f"--train-tokenizer trains a SentencePieceTokenizer, not a {tokenizer.tokenizer_type}")
    if tokenizer.vocab_size is None:
        raise ValueError("--train-tokenizer needs --vocab-size, the number of pieces")
    size = tokenizer.vocab_size
    if not 300 <= size <= 1_000_000:
        raise ValueError(f"--vocab-size must be between 300 (256 bytes and the special pieces) and 1000000, got {size}")
    return dataclasses.replace(tokenizer, tokenizer_model=tokenizer.tokenizer_model or f"{options.output_prefix}.model")


def _check_outputs(options: PreprocessOptions, model: str | None, work: Path) -> None:
    if options.overwrite or _is_complete(work):
        return
    prefixes = [dataset_prefix(options.output_prefix, key) for key in options.keys]
    paths = [f"{prefix}.{suffix}" for prefix in prefixes for suffix in _PUBLISHED]
    for path in [*paths, *([model] if model is not None else [])]:
        if os.path.exists(path):
            raise ValueError(f"{path} exists; move it away or give --overwrite")


def _is_complete(work: Path) -> bool:
    """Whether an interrupted run had everything but the last renames behind it."""
    state = _read_json(work / _STATE)
    return state is not None and bool(state.get("complete"))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    staged = path.with_name(path.name + ".tmp")
    with open(staged, "w") as handle:
        json.dump(value, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(staged, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder; the lock goes with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder} is in use by another preprocess-data") from error
        yield
    finally:
        os.close(handle)
