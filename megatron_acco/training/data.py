"""Training, validation and test sets: megatron-core's indexed datasets, checked before anything is built on them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list

from megatron_acco.training.options import option

SPLITS = ("train", "valid", "test")
_SCANNED_TOKENS = 1 << 26
_SCANNED_BLOCKS = 256
_INDEX_MAGIC = b"MMIDIDX\x00\x00"


@dataclass(frozen=True)
class DataOptions:
    """Where the tokens come from, in Megatron's argument names."""

    data_path: list[str] | None = option(
        None, "Prefix of an indexed dataset (without .bin/.idx), or weights and prefixes: 30 a 70 b."
    )
    train_data_path: list[str] | None = option(None, "Training prefix(es), instead of --data-path and --split.")
    valid_data_path: list[str] | None = option(None, "Validation prefix(es), with --train-data-path.")
    test_data_path: list[str] | None = option(None, "Test prefix(es), with --train-data-path.")
    split: str | None = option(None, "Weights of train, valid and test in --data-path; 99,1,0 if not given.")
    data_cache_path: str | None = option(None, "Folder of the sample index (a folder beside the data).")
    eod_mask_loss: bool = option(False, "No loss at end-of-document tokens.")
    reset_position_ids: bool = option(False, "Restart positions after an end-of-document token.")
    num_workers: int = option(2, "Loader processes per rank.")

    def __post_init__(self) -> None:
        separate = [self.train_data_path, self.valid_data_path, self.test_data_path]
        if self.data_path is None and self.train_data_path is None:
            raise ValueError("no training data: give --data-path or --train-data-path")
        if self.data_path is not None and any(separate):
            raise ValueError("--data-path contradicts --train-data-path, --valid-data-path and --test-data-path")
        if self.split is not None and self.data_path is None:
            raise ValueError("--split needs --data-path")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers must be 0 or more, got {self.num_workers}")

    @property
    def split_weights(self) -> str:
        """The split that holds."""
        return self.split or "99,1,0"


@dataclass(frozen=True)
class Datasets:
    """The three sets; a set that has no data is None. `key` names the sample index, equal on all ranks."""

    train: Any
    valid: Any
    test: Any
    key: str


def build_datasets(
    options: DataOptions, tokenizer: Any, sequence_length: int, seed: int, samples: tuple[int, int, int]
) -> Datasets:
    """Check the data, build or load the sample index, and open the three sets.

    Uses no collective, so that bad data ends every rank with the same message and a slow index build meets no
    communication time limit. Ranks that share a file system build the index once: the first takes a lock, builds
    in a private folder and publishes it by one rename.

    Args:
        options: paths and split.
        tokenizer: what the data was written with.
        sequence_length: tokens per sample.
        seed: of the sample order.
        samples: samples wanted of train, valid and test; valid and test give one epoch at most.

    Raises:
        ValueError: for a missing prefix, a split without documents, or token ids beyond the vocabulary.
    """
    sources = _sources(options)
    sizes = _check_sources(sources, options, sequence_length, samples)
    for prefix in sorted({prefix for source in sources.values() for prefix in source.prefixes}):
        check_token_ids(prefix, tokenizer.vocab_size)

    key = _index_key(sources, options, tokenizer, sequence_length, seed, sizes)
    root = Path(options.data_cache_path or Path(next(iter(sources.values())).prefixes[0]).parent / "cache")

    def build(cache: Path) -> list[Any]:
        return _build(options, tokenizer, sequence_length, seed, sizes, cache)

    final = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            if not final.is_dir():
                _publish_index(build, root, final)
    except OSError as error:
        raise ValueError(f"cannot write the sample index to {root}: {error}; set --data-cache-path") from error
    try:
        train, valid, test = build(final)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"the sample index {final} is damaged: {error}; delete that folder") from error
    if len(train) < sizes[0]:
        raise ValueError(
            f"training wants {sizes[0]} samples, but prefixes without weights give one epoch of {len(train)}; put a "
            f"weight before each prefix, or train for fewer updates"
        )
    return Datasets(train, valid, test, key)


@dataclass(frozen=True)
class _Source:
    """One split's prefixes, their weights (None: by size) and its share of each prefix."""

    flag: str
    prefixes: list[str]
    weights: list[float] | None
    share: tuple[float, float]


def _sources(options: DataOptions) -> dict[str, _Source]:
    if options.data_path is not None:
        prefixes, weights = _blend("--data-path", options.data_path) or ([], None)
        _check_split(options.split_weights)
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(options.split_weights))
        shares = dict(zip(SPLITS, matrix, strict=True))
        return {
            name: _Source("--data-path", prefixes, weights, share)
            for name, share in shares.items()
            if share is not None and share[1] > share[0]
        }
    sources = {}
    for name in SPLITS:
        blend = _blend(f"--{name}-data-path", getattr(options, f"{name}_data_path"))
        if blend is not None:
            sources[name] = _Source(f"--{name}-data-path", blend[0], blend[1], (0.0, 1.0))
    return sources


def _blend(flag: str, values: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    blend = get_blend_from_list(values)
    for weight in (blend[1] or []) if blend is not None else []:
        if not 0.0 < weight < float("inf"):
            raise ValueError(f"{flag}: the weight of a prefix must be above 0, got {weight:g}")
    return blend


def _check_split(split: str) -> None:
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(SPLITS) or min(weights) < 0.0 or not 0.0 < sum(weights) < float("inf"):
        raise ValueError(f"--split {split}: must be up to three weights of train, valid and test, such as 99,1,0")
    if weights[0] == 0.0:
        raise ValueError(f"--split {split}: leaves nothing to train on")


def _check_sources(
    sources: dict[str, _Source], options: DataOptions, sequence_length: int, samples: tuple[int, int, int]
) -> list[int]:
    """Check that every prefix exists and every split has documents; return the samples to draw per split."""
    sizes: list[int] = []
    for name, wanted in zip(SPLITS, samples, strict=True):
        source = sources.get(name)
        if source is None:
            sizes.append(0)
            continue
        available = 0
        for prefix in source.prefixes:
            documents, tokens = _share_of(prefix, source)
            needed = sequence_length + 1
            if tokens < needed:
                split = f"--split {options.split_weights} of {prefix}" if options.data_path else prefix
                raise ValueError(
                    f"{split} leaves {documents} documents with {tokens} tokens for {name}, fewer than the {needed} "
                    f"tokens of one sample (--seq-length {sequence_length}); use more data or another --split"
                )
            available += (tokens - 1) // sequence_length
        # One epoch at most of what is evaluated: a repeated sample adds nothing to a mean.
        sizes.append(max(1, wanted) if name == "train" else max(1, min(wanted, available)))
    return sizes


def _share_of(prefix: str, source: _Source) -> tuple[int, int]:
    """Documents and tokens of a split's share of a prefix."""
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise ValueError(f"{source.flag} {prefix}: no file {prefix + suffix}")
    try:
        # megatron-core's reader stumbles over its own half-built object when the header is wrong.
        with open(prefix + ".idx", "rb") as index:
            if index.read(len(_INDEX_MAGIC)) != _INDEX_MAGIC:
                raise ValueError("the .idx file has another header")
        dataset = IndexedDataset(prefix)
    except Exception as error:
        raise ValueError(f"{source.flag} {prefix}: not a readable indexed dataset: {error}") from error
    # A view of a mapped file that goes with the dataset object, which must outlive it.
    lengths = dataset.sequence_lengths
    # megatron-core's own rounding.
    first, last = (int(round(bound * float(len(lengths)))) for bound in source.share)
    return last - first, int(lengths[first:last].sum(dtype=numpy.int64))


def check_token_ids(prefix: str, vocab_size: int) -> None:
    """Scan a dataset for token ids outside [0, vocab_size): all of it up to 64 M tokens, else spaced blocks.

    The loader checks every micro-batch as well.

    Raises:
        ValueError: naming the id and the document.
    """
    dataset = IndexedDataset(prefix)
    lengths = dataset.sequence_lengths
    if os.path.getsize(prefix + ".bin") == 0:
        return
    tokens = numpy.memmap(prefix + ".bin", dtype=dataset.index.dtype, mode="r")
    if len(tokens) <= _SCANNED_TOKENS:
        starts, block = [0], len(tokens)
    else:
        block = _SCANNED_TOKENS // _SCANNED_BLOCKS
        starts = numpy.linspace(0, len(tokens) - block, _SCANNED_BLOCKS, dtype=numpy.int64).tolist()
    for start in starts:
        piece = tokens[start : start + block]
        outside = numpy.flatnonzero((piece >= vocab_size) | (piece < 0))
        if len(outside):
            position = int(start + outside[0])
            document = int(numpy.searchsorted(numpy.cumsum(lengths), position, side="right"))
            raise ValueError(
                f"{prefix}: token id {int(tokens[position])} in document {document} is beyond the vocabulary of "
                f"{vocab_size} ids; was the data written with another tokenizer?"
            )


def _index_key(
    sources: dict[str, _Source],
    options: DataOptions,
    tokenizer: Any,
    sequence_length: int,
    seed: int,
    sizes: list[int],
) -> str:
    """A name for the sample index: changes with everything that it depends on, the data files included."""
    files = sorted({prefix + ".idx" for source in sources.values() for prefix in source.prefixes})
    described = {
        "sources": {name: [s.prefixes, s.weights, s.share] for name, s in sources.items()},
        "files": [
            [os.path.getsize(path), hashlib.sha256(Path(path).read_bytes()[: 1 << 20]).hexdigest()] for path in files
        ],
        "tokenizer": [tokenizer.vocab_size, tokenizer.eod],
        "sequence_length": sequence_length,
        "seed": seed,
        "sizes": sizes,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _build(
    options: DataOptions, tokenizer: Any, sequence_length: int, seed: int, sizes: list[int], cache: Path
) -> list[Any]:
    paths = [options.train_data_path, options.valid_data_path, options.test_data_path]
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=get_blend_from_list(options.data_path),
        blend_per_split=None if options.data_path else [get_blend_from_list(path) for path in paths],
        split=options.split_weights if options.data_path else None,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=options.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=options.eod_mask_loss,
        create_attention_mask=False,
    )
    blended = any(path is not None and len(path) > 1 for path in (options.data_path, *paths))
    with _process_group_of_one() if blended else contextlib.nullcontext():
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@contextlib.contextmanager
def _process_group_of_one() -> Iterator[None]:
    """megatron-core's blended dataset asks for its rank without looking whether there are ranks."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; it goes with the process, so a killed builder leaves none behind."""
    with open(path, "a") as handle:
        # A file system without locks costs a repeated build only: publishing is atomic.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _publish_index(build: Any, root: Path, final: Path) -> None:
    """Build the index in a private folder and give it its name in one step."""
    for leftover in root.glob(f"{final.name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{final.name}.building-", dir=root))
    os.chmod(staging, 0o755)
    try:
        build(staging)
        os.rename(staging, final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
