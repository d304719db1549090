"""Finetuning data: jsonl files of prompts and responses, loss on the response only.

An example is one document, as pretraining puts it behind the end of another:

    tokens      EOD  prompt ...  response ...
    labels      prompt ...  response ...  EOD
    loss mask   0 0 0 ...   1 1 1 ...       1

Padding: a row is one example, and a micro-batch as long as its longest. Packing: a row is as many examples as fit; each
has positions of its own and does not see the others, so that packed examples give the losses of examples alone.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.indexed_dataset import DType

from megatron_acco.preprocess.encode import BatchEncoder
from megatron_acco.preprocess.inputs import Position, check_sources, find_sources, read_tasks
from megatron_acco.preprocess.work import documents_of
from megatron_acco.training.blends import SPLITS, DataOptions

KEYS = ("prompt", "response")
_NO_LIMIT = 1 << 31


@dataclass(frozen=True)
class Example:
    """Ids of an example with the end-of-document id on both sides; the first `prompt` labels carry no loss."""

    ids: numpy.ndarray
    prompt: int

    @property
    def length(self) -> int:
        """Tokens that the model sees."""
        return len(self.ids) - 1


@dataclass
class Examples:
    """The examples of a set, and what became of those that do not fit.

    Attributes:
        kept: in the order of the files.
        cut: number of those whose response has lost its end.
        dropped: number of those whose prompt alone fills a sample; they are not in `kept`.
    """

    kept: list[Example]
    cut: int = 0
    dropped: int = 0


class InstructionDataset(torch.utils.data.Dataset):
    """Rows of examples in an order that depends on the seed and the epoch only; as many samples as are asked for."""

    def __init__(
        self, examples: Sequence[Example], sequence_length: int, samples: int, seed: int, pad: int, packing: bool
    ) -> None:
        """
        Args:
            examples: one or more.
            sequence_length: tokens of a row.
            samples: length of the dataset; rows come again as often as that takes.
            seed: of the order.
            pad: id of padding.
            packing: put several examples into a row.
        """
        self.examples = examples
        lengths = [example.length for example in examples]
        self.rows = pack(lengths, sequence_length) if packing else [[number] for number in range(len(examples))]
        self.sequence_length = sequence_length
        self.samples = samples
        self.seed = seed
        self.pad = pad
        self.packing = packing
        self._epoch, self._order = -1, numpy.empty(0, dtype=numpy.int64)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`tokens`, `labels`, `loss_mask`, `position_ids`, with packing `segment_ids`, each [sequence]."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, numpy.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        size = self.sequence_length
        names = ("tokens", "labels", "position_ids", "segment_ids")
        row = {name: torch.zeros(size, dtype=torch.int64) for name in names}
        row["tokens"].fill_(self.pad)
        row["labels"].fill_(self.pad)
        row["loss_mask"] = torch.zeros(size)
        start = 0
        for number, which in enumerate(self.rows[self._order[place]], 1):
            example = self.examples[which]
            ids = torch.from_numpy(example.ids.astype(numpy.int64))
            end = start + example.length
            row["tokens"][start:end], row["labels"][start:end] = ids[:-1], ids[1:]
            row["position_ids"][start:end] = torch.arange(example.length)
            row["segment_ids"][start:end] = number
            row["loss_mask"][start + example.prompt : end] = 1.0
            start = end
        if not self.packing:
            del row["segment_ids"]
        return row


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Put examples into rows, longest first, each into the fullest row that has room for it.

    Args:
        lengths: of the examples, `size` at most each.
        size: of a row.

    Returns:
        The numbers of the examples of each row; every example is in one.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is free in a row, and its number, sorted
    for which in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[which], -1))
        if at == len(room):
            free, row = size, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(which)
        if free > lengths[which]:
            bisect.insort(room, (free - lengths[which], row))
    return rows


def attention_mask(segments: torch.Tensor | None) -> torch.Tensor | None:
    """Megatron's mask of packed rows: True where a token must not see another.

    Args:
        segments: [micro-batch, sequence], the number of each token's example in its row; None: nothing is packed.

    Returns:
        [micro-batch, 1, sequence, sequence], bool; None: causality says all.
    """
    if segments is None:
        return None
    later = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).triu(1)
    return ((segments.unsqueeze(2) != segments.unsqueeze(1)) | later).unsqueeze(1)


def read_examples(paths: Sequence[str], tokenizer: Any, sequence_length: int, flag: str = "--data-path") -> Examples:
    """Tokenize the examples of jsonl (or parquet) files with `prompt` and `response`.

    Raises:
        ValueError: a file, or a line with its place, that cannot be used; no example fits.
    """
    sources = find_sources(paths, flag=flag)
    check_sources(sources, KEYS)
    encoder = BatchEncoder(tokenizer, DType.optimal_dtype(tokenizer.vocab_size))
    end = numpy.array([tokenizer.eod], dtype=encoder.dtype)
    result = Examples([])
    for task in read_tasks(sources, KEYS, Position(), _NO_LIMIT, lambda text, start, before: None):
        pairs = list(_pairs(task))
        encoded = [numpy.frombuffer(ids, dtype=encoder.dtype) for ids in encoder.encode([t for p in pairs for t in p])]
        for prompt, response in zip(encoded[::2], encoded[1::2], strict=True):
            ids = numpy.concatenate([end, prompt, response, end])
            if len(prompt) >= sequence_length:
                result.dropped += 1
                continue
            result.cut += len(ids) > sequence_length + 1
            result.kept.append(Example(ids[: sequence_length + 1], len(prompt)))
    if not result.kept and not result.dropped:
        raise ValueError(f"{flag} {', '.join(paths)}: no examples there")
    if not result.kept:
        raise ValueError(
            f"{', '.join(paths)}: no example whose prompt is shorter than --seq-length {sequence_length} tokens"
        )
    return result


def _pairs(task: Any) -> Iterator[tuple[str, str]]:
    for place, value in documents_of(task, KEYS):
        if isinstance(value, str):
            raise ValueError(f"{place}: {value}")
        prompt, response = ("".join(texts) for texts in value)
        if not response:
            raise ValueError(f"{place}: the response is empty")
        yield prompt, response


@dataclass(frozen=True)
class InstructionSets:
    """Train, valid and test (None where there is no data), what names them, and what the user should know."""

    sets: dict[str, InstructionDataset | None]
    key: str
    notice: str


def build_instruction_sets(
    options: DataOptions, tokenizer: Any, sequence_length: int, seed: int, samples: tuple[int, int, int]
) -> InstructionSets:
    """Read the files of --train-data-path and its kin, or cut those of --data-path up by --split.

    Args:
        options: with `sft`.
        tokenizer: of the run.
        sequence_length: tokens of a row.
        seed: of the order.
        samples: samples wanted of train, valid and test; valid and test give one epoch at most.

    Raises:
        ValueError: see `read_examples`; or a set without examples.
    """
    if options.data_path is not None:
        whole = read_examples(options.data_path, tokenizer, sequence_length)
        shares, found = numpy.cumsum([0.0, *parse_and_normalize_split(options.split_weights)]), {"": whole}
        bounds = [int(round(share * len(whole.kept))) for share in shares]
        by_split = {kind: whole.kept[bounds[i] : bounds[i + 1]] for i, kind in enumerate(SPLITS)}
    else:
        paths = {"train": options.train_data_path, "valid": options.valid_data_path, "test": options.test_data_path}
        found = {
            kind: read_examples(given, tokenizer, sequence_length, f"--{kind}-data-path")
            for kind, given in paths.items()
            if given
        }
        by_split = {kind: found[kind].kept if kind in found else [] for kind in SPLITS}
    if not by_split["train"]:
        raise ValueError(f"--split {options.split_weights} leaves no examples to train on")
    sets: dict[str, InstructionDataset | None] = {}
    digest = hashlib.sha256(json.dumps([sequence_length, seed, options.sft_packing]).encode())
    for kind, wanted in zip(SPLITS, samples, strict=True):
        examples = by_split[kind]
        for example in examples:
            digest.update(example.ids.tobytes() + example.prompt.to_bytes(8, "little"))
        if not examples:
            sets[kind] = None
            continue
        made = InstructionDataset(examples, sequence_length, max(1, wanted), seed, tokenizer.eod, options.sft_packing)
        if kind != "train":
            made.samples = max(1, min(wanted, len(made.rows)))
        sets[kind] = made
    return InstructionSets(sets, digest.hexdigest()[:16], _notice(sets["train"], found))


def _notice(train: InstructionDataset | None, found: dict[str, Examples]) -> str:
    assert train is not None
    told = f"{len(train.examples):,} examples to train on in {len(train.rows):,} rows"
    for kind, examples in found.items():
        of_set = f" of the {kind} data" if kind else ""
        if examples.cut:
            told += f"; {examples.cut:,}{of_set} were longer than a row and have lost their end"
        if examples.dropped:
            told += f"; {examples.dropped:,}{of_set} have been left out, because their prompts alone fill a row"
    return told
