"""Training, validation and test sets: megatron-core's indexed datasets, checked before anything is built on them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_acco.preprocess.metadata import check_metadata, describe_tokenizer
from megatron_acco.preprocess.writer import INDEX_MAGIC
from megatron_acco.training.blends import SPLITS, DataOptions, Source, find_sources
from megatron_acco.training.index_cache import load_or_build
from megatron_acco.training.instructions import build_instruction_sets

__all__ = ["DataOptions", "Datasets", "build_datasets", "check_prefix", "check_token_ids"]

_SCANNED_TOKENS = 1 << 26
_SCANNED_BLOCKS = 256


@dataclass(frozen=True)
class Datasets:
    """The three sets; a set that has no data is None.

    Attributes:
        valid_sets: with --multiple-validation-sets, the sets by their names; then `valid` is None.
        key: names the sample index, equal on all ranks.
        digest: of the content of the sample index, equal on all ranks.
        notice: what the user should know about the data.
    """

    train: Any
    valid: Any
    test: Any
    key: str
    digest: str = ""
    valid_sets: dict[str, Any] = dataclasses.field(default_factory=dict)
    notice: str | None = None

    @property
    def validation(self) -> dict[str, Any]:
        """All validation sets by name; a single one has an empty name."""
        return self.valid_sets or ({} if self.valid is None else {"": self.valid})


@dataclass(frozen=True)
class _Request:
    """What the sample index is built from. `sizes`: samples to draw, one number per source (or split, if mock)."""

    options: DataOptions
    sources: list[Source]
    sizes: list[int]
    tokenizer: Any
    sequence_length: int
    seed: int

    def config(self, cache: Path | None, blends: list[Any] | None) -> GPTDatasetConfig:
        """megatron-core's configuration; `blends` per split, or None for those of --data-path."""
        one_blend = self.options.from_one_blend
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.sequence_length,
            blend=(self.sources[0].prefixes, self.sources[0].weights) if one_blend else None,
            blend_per_split=blends,
            split=self.options.split_weights if one_blend else None,
            path_to_cache=None if cache is None else str(cache),
            tokenizer=self.tokenizer,
            reset_position_ids=self.options.reset_position_ids,
            reset_attention_mask=False,
            eod_mask_loss=self.options.eod_mask_loss,
            create_attention_mask=False,
        )


def build_datasets(
    options: DataOptions, tokenizer: Any, sequence_length: int, seed: int, samples: tuple[int, int, int]
) -> Datasets:
    """Check the data, build or load the sample index, and open the sets.

    Uses no collective, so that bad data ends every rank with the same message and a slow index build meets no
    communication time limit.

    Args:
        options: paths and split.
        tokenizer: what the data was written with.
        sequence_length: tokens per sample.
        seed: of the sample order.
        samples: samples wanted of train, valid and test; valid and test give one epoch at most, and each of several
            validation sets gives as many as a single one would.

    Raises:
        ValueError: for a missing prefix, a split without documents, data of another tokenizer, or token ids beyond the
            vocabulary.
    """
    if options.sft:
        made = build_instruction_sets(options, tokenizer, sequence_length, seed, samples)
        train, valid, test = (made.sets[kind] for kind in SPLITS)
        return Datasets(train, valid, test, made.key, notice=made.notice)
    sources = find_sources(options)
    sizes = [_samples_of(source, options, sequence_length, samples) for source in sources]
    described = describe_tokenizer(tokenizer)
    for prefix in sorted({prefix for source in sources for prefix in source.prefixes}):
        check_metadata(prefix, described)
        check_token_ids(prefix, tokenizer.vocab_size)
    request = _Request(options, sources, sizes or [max(1, n) for n in samples], tokenizer, sequence_length, seed)
    key = _index_key(request)
    if options.mock_data and options.data_cache_path is None:
        built, digest = _build(request, None), ""
    else:
        root = options.data_cache_path or Path(sources[0].prefixes[0]).parent / "cache"
        built, digest = load_or_build(Path(root), key, lambda cache: _build(request, cache))
    train, valid, test, valid_sets = built
    if len(train) < request.sizes[0]:
        raise ValueError(
            f"training wants {request.sizes[0]} samples, but prefixes without weights give one epoch of {len(train)}; "
            f"put a weight before each prefix, or train for fewer updates"
        )
    return Datasets(train, valid, test, key, digest, valid_sets)


def _samples_of(source: Source, options: DataOptions, sequence_length: int, samples: tuple[int, int, int]) -> int:
    """Check that every prefix exists and has tokens for the set; return the samples to draw."""
    available = 0
    for prefix in source.prefixes:
        documents, tokens = _share_of(prefix, source)
        needed = sequence_length + 1
        if tokens < needed:
            split = f"--split {options.split_weights} of {prefix}" if options.from_one_blend else prefix
            raise ValueError(
                f"{split} leaves {documents} documents with {tokens} tokens for {source.title}, fewer than the "
                f"{needed} tokens of one sample (--seq-length {sequence_length}); use more data or another --split"
            )
        available += (tokens - 1) // sequence_length
    wanted = samples[SPLITS.index(source.kind)]
    # One epoch at most of what is evaluated: a repeated sample adds nothing to a mean.
    return max(1, wanted) if source.kind == "train" else max(1, min(wanted, available))


def _share_of(prefix: str, source: Source) -> tuple[int, int]:
    """Documents and tokens of a set's share of a prefix."""
    check_prefix(prefix, source.flag)
    try:
        # megatron-core's reader stumbles over its own half-built object when the header is wrong.
        with open(prefix + ".idx", "rb") as index:
            if index.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
                raise ValueError("the .idx file has another header")
        dataset = IndexedDataset(prefix)
    except Exception as error:
        raise ValueError(f"{source.flag} {prefix}: not a readable indexed dataset: {error}") from error
    # A view of a mapped file that goes with the dataset object, which must outlive it.
    lengths = dataset.sequence_lengths
    # megatron-core's own rounding.
    first, last = (int(round(bound * float(len(lengths)))) for bound in source.share)
    return last - first, int(lengths[first:last].sum(dtype=numpy.int64))


def check_prefix(prefix: str, flag: str) -> None:
    """Raise ValueError if there is no indexed dataset of this prefix, with what may have been meant."""
    for suffix in (".bin", ".idx"):
        if os.path.isfile(prefix + suffix):
            continue
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f"; give the name without {prefix[-4:]}"
        elif os.path.isfile(prefix):
            hint = (
                "; it takes what `megatron-acco preprocess-data` makes of text (or, for finetuning, jsonl with --sft)"
            )
        raise ValueError(f"{flag} {prefix}: no file {prefix + suffix}{hint}")


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


def _index_key(request: _Request) -> str:
    """A name for the sample index: changes with everything that it depends on, the data files included."""
    files = sorted({prefix + ".idx" for source in request.sources for prefix in source.prefixes})
    described = {
        "mock": request.options.mock_data,
        "sources": [dataclasses.asdict(source) for source in request.sources],
        "files": [
            [os.path.getsize(path), hashlib.sha256(Path(path).read_bytes()[: 1 << 20]).hexdigest()] for path in files
        ],
        "tokenizer": [request.tokenizer.vocab_size, request.tokenizer.eod],
        "sequence_length": request.sequence_length,
        "seed": request.seed,
        "sizes": request.sizes,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _build(request: _Request, cache: Path | None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Train, valid and test, and the validation sets with names."""
    options = request.options
    if options.mock_data:
        return (*_build_splits(request.config(cache, None), request.sizes, MockGPTDataset), {})
    single = {s.kind: (s, size) for s, size in zip(request.sources, request.sizes, strict=True) if not s.name}
    blends: list[Any] | None = None
    if not options.from_one_blend:
        blends = [(single[k][0].prefixes, single[k][0].weights) if k in single else None for k in SPLITS]
    sizes = [single[kind][1] if kind in single else 0 for kind in SPLITS]
    train, valid, test = _build_splits(request.config(cache, blends), sizes)
    named = {}
    for source, size in zip(request.sources, request.sizes, strict=True):
        if source.name:
            own = request.config(cache, [None, (source.prefixes, None), None])
            named[source.name] = _build_splits(own, [0, size, 0])[1]
    return train, valid, test, named


def _build_splits(config: GPTDatasetConfig, sizes: list[int], cls: type[Any] = GPTDataset) -> tuple[Any, Any, Any]:
    blends = [config.blend, *(config.blend_per_split or [])]
    blended = any(blend is not None and (len(blend[0]) > 1 or blend[1] is not None) for blend in blends)
    with _process_group_of_one() if blended else contextlib.nullcontext():
        train, valid, test = BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()
    return train, valid, test


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
