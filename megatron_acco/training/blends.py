"""Which datasets train, valid and test are drawn from, in Megatron's argument names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from megatron_acco.training.options import option

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]
"""Prefixes and their weights; None: by size."""


@dataclass(frozen=True)
class DataOptions:
    """Where the tokens come from, in Megatron's argument names."""

    data_path: list[str] | None = option(
        None, "Prefix of an indexed dataset (without .bin/.idx), or weights and prefixes: 30 a 70 b."
    )
    data_args_path: str | None = option(None, "File with what would follow --data-path.")
    train_data_path: list[str] | None = option(None, "Training prefix(es), instead of --data-path and --split.")
    valid_data_path: list[str] | None = option(None, "Validation prefix(es), with --train-data-path.")
    test_data_path: list[str] | None = option(None, "Test prefix(es), with --train-data-path.")
    per_split_data_args_path: str | None = option(
        None, "JSON file with the lists train, valid and test of what would follow these three."
    )
    multiple_validation_sets: bool = option(
        False, "Evaluate each prefix of --valid-data-path by itself; NAME=PREFIX names it in the log."
    )
    sft: bool = option(
        False, "The data paths are jsonl files with prompt and response, to finetune with loss on the response only."
    )
    sft_packing: bool = option(False, "Put several examples of --sft into a sample; none sees another.")
    mock_data: bool = option(False, "Train on made-up tokens, to try out a configuration.")
    split: str | None = option(None, "Weights of train, valid and test in --data-path; 99,1,0 if not given.")
    data_cache_path: str | None = option(None, "Folder of the sample index (a folder beside the data).")
    eod_mask_loss: bool = option(False, "No loss at end-of-document tokens.")
    reset_position_ids: bool = option(False, "Restart positions after an end-of-document token.")
    num_workers: int = option(2, "Loader processes per rank.")

    def __post_init__(self) -> None:
        separate = any([self.train_data_path, self.valid_data_path, self.test_data_path])
        ways = {
            "--data-path": self.data_path is not None,
            "--data-args-path": self.data_args_path is not None,
            "--train-data-path, --valid-data-path and --test-data-path": separate,
            "--per-split-data-args-path": self.per_split_data_args_path is not None,
            "--mock-data": self.mock_data,
        }
        given = [way for way, is_given in ways.items() if is_given]
        if not given or (separate and self.train_data_path is None and len(given) == 1):
            raise ValueError("no training data: give --data-path or --train-data-path")
        if len(given) > 1:
            raise ValueError(f"{given[0]} contradicts {given[1]}")
        if self.split is not None and not self.from_one_blend:
            raise ValueError("--split needs --data-path or --data-args-path")
        if self.multiple_validation_sets and (self.from_one_blend or self.mock_data):
            raise ValueError("--multiple-validation-sets needs --valid-data-path or --per-split-data-args-path")
        if self.sft_packing and not self.sft:
            raise ValueError("--sft-packing needs --sft")
        if self.sft:
            self._check_instructions()
        if self.num_workers < 0:
            raise ValueError(f"--num-workers must be 0 or more, got {self.num_workers}")

    def _check_instructions(self) -> None:
        others = {
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--multiple-validation-sets": self.multiple_validation_sets,
            "--mock-data": self.mock_data,
            "--eod-mask-loss": self.eod_mask_loss,
            "--reset-position-ids": self.reset_position_ids,
        }
        for flag, value in others.items():
            if value:
                raise ValueError(f"--sft takes jsonl files by --data-path or --train-data-path; remove {flag}")

    @property
    def from_one_blend(self) -> bool:
        """Whether the three sets are shares of the same data."""
        return self.data_path is not None or self.data_args_path is not None

    @property
    def split_weights(self) -> str:
        """The split that holds."""
        return self.split or "99,1,0"


@dataclass(frozen=True)
class Source:
    """A set's prefixes, their weights (None: by size) and its share of each prefix.

    `kind` is train, valid or test; `name` that of a validation set of its own, else empty.
    """

    kind: str
    name: str
    flag: str
    prefixes: list[str]
    weights: list[float] | None
    share: tuple[float, float]

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.kind} set {self.name}" if self.name else self.kind


def find_sources(options: DataOptions) -> list[Source]:
    """The sets that a run has, train first; none with --mock-data.

    Raises:
        ValueError: for weights, splits or files that do not say what to do.
    """
    if options.mock_data:
        return []
    if options.from_one_blend:
        flag = "--data-path" if options.data_path is not None else "--data-args-path"
        prefixes, weights = parse_blend(flag, options.data_path or _read_words(options.data_args_path))
        check_split(options.split_weights)
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(options.split_weights))
        shares = zip(SPLITS, matrix, strict=True)
        return [
            Source(kind, "", flag, prefixes, weights, share)
            for kind, share in shares
            if share is not None and share[1] > share[0]
        ]
    values = _separate_values(options)
    sources: list[Source] = []
    for kind, (flag, words) in values.items():
        if kind == "valid" and options.multiple_validation_sets:
            sources += _named_sets(flag, words)
        elif words:
            prefixes, weights = parse_blend(flag, words)
            sources.append(Source(kind, "", flag, prefixes, weights, (0.0, 1.0)))
    return sources


def parse_blend(flag: str, values: list[str]) -> Blend:
    """Prefixes, or weights and prefixes in turn.

    Raises:
        ValueError: anything in between, or a weight that is none.
    """
    numbers = [_is_number(value) for value in values]
    alternate = len(values) % 2 == 0 and all(numbers[::2])
    # A prefix may be a number as well; what exists is one.
    stray = [
        value for value, number in zip(values, numbers, strict=True) if number and not os.path.exists(value + ".idx")
    ]
    if stray and not alternate:
        raise ValueError(
            f"{flag} {' '.join(values)}: give prefixes only, or a weight before each prefix; {stray[0]} is neither"
        )
    blend: Blend = get_blend_from_list(values)
    for weight in blend[1] or []:
        if not 0.0 < weight < float("inf"):
            raise ValueError(f"{flag}: the weight of a prefix must be above 0, got {weight:g}")
    return blend


def check_split(split: str) -> None:
    """Raise ValueError for what is no --split."""
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(SPLITS) or min(weights) < 0.0 or not 0.0 < sum(weights) < float("inf"):
        raise ValueError(f"--split {split}: must be up to three weights of train, valid and test, such as 99,1,0")
    if weights[0] == 0.0:
        raise ValueError(f"--split {split}: leaves nothing to train on")


def _separate_values(options: DataOptions) -> dict[str, tuple[str, list[str]]]:
    """Flag and words per kind of set."""
    path = options.per_split_data_args_path
    if path is None:
        return {kind: (f"--{kind}-data-path", getattr(options, f"{kind}_data_path") or []) for kind in SPLITS}
    flag = f"--per-split-data-args-path {path}"
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} cannot be read: {error}") from error
    fits = isinstance(values, dict) and set(values) <= set(SPLITS) and values.get("train")
    if not fits or not all(isinstance(v, list) and all(isinstance(word, str) for word in v) for v in values.values()):
        raise ValueError(f"{flag}: must be an object with lists of strings, train and perhaps valid and test")
    return {kind: (f"{flag}: {kind}", values.get(kind, [])) for kind in SPLITS}


def _named_sets(flag: str, words: list[str]) -> list[Source]:
    sources: dict[str, Source] = {}
    if not words:
        raise ValueError("--multiple-validation-sets: there is no validation set")
    for word in words:
        name, equals, prefix = word.partition("=")
        if not equals or "/" in name:
            name, prefix = os.path.basename(word), word
        if _is_number(prefix) and not os.path.exists(prefix + ".idx"):
            raise ValueError(f"{flag}: --multiple-validation-sets takes no weights, got {prefix}")
        if not name or name in sources:
            raise ValueError(f"{flag}: two validation sets have the name {name!r}; give NAME=PREFIX")
        sources[name] = Source("valid", name, flag, [prefix], None, (0.0, 1.0))
    return list(sources.values())


def _read_words(path: str | None) -> list[str]:
    try:
        words = Path(str(path)).read_text().split()
    except (OSError, ValueError) as error:
        raise ValueError(f"--data-args-path {path} cannot be read: {error}") from error
    if not words:
        raise ValueError(f"--data-args-path {path} is empty")
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
