"""The weights of a checkpoint alone: for evaluation, export and the start of another run.

Any number of tensor-parallel ranks may have written them, and any number may take them: they are put together to whole
tensors here, and cut again where they go. What a checkpoint's model files hold is theta_t, in the type of its run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)

from megatron_acco.training.checkpoint import store
from megatron_acco.training.checkpoint.state import CLIENT_STATE, check_tokenizer, model_differences
from megatron_acco.training.checkpoint.store import Damaged
from megatron_acco.training.model import ModelOptions, universal_checkpoint_info
from megatron_acco.zero import shards

State = dict[str, torch.Tensor]

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The tensors with a row per token id, and rows of padding behind them."""

_MODEL_FILE = re.compile(r"mp_rank_\d+_model_states\.pt")
_SHARD_FILES = ("zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt", "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt")


@dataclass(frozen=True)
class Weights:
    """The weights that a checkpoint holds. Their files are mapped, not read, until `state` is called.

    Attributes:
        folder: the checkpoint.
        iteration: committed updates.
        model: the options of its model and `padded_vocab_size`, as in `Identity.model`.
        arguments: the command line of its run.
        vocab_size: ids that mean something; None if the checkpoint does not say.
        parts: content of the file of each tensor-parallel rank.
        tokenizer: `Identity.tokenizer`.
        optimizer: the optimizer files of each tensor-parallel rank, in the order of the data-parallel ranks; empty if
            the checkpoint came without them.
    """

    folder: Path
    iteration: int
    model: Mapping[str, Any]
    arguments: Mapping[str, Any]
    vocab_size: int | None
    parts: tuple[Mapping[str, Any], ...]
    optimizer: tuple[tuple[Path, ...], ...] = ()
    tokenizer: str | None = None

    @property
    def options(self) -> ModelOptions:
        """The options of the model."""
        known = {field.name for field in fields(ModelOptions)}
        return ModelOptions(**{name: value for name, value in self.model.items() if name in known})

    @property
    def rows(self) -> int:
        """Rows of the embedding, padding included."""
        return int(self.model["padded_vocab_size"])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored weights."""
        return next(iter(self.parts[0]["module"].values())).dtype

    @property
    def has_masters(self) -> bool:
        """Whether there are fp32 weights that say more than the stored ones."""
        return self.dtype is not torch.float32 and (bool(self.optimizer) or store.is_universal(self.folder))

    def told(self, masters: bool) -> str:
        """Where the weights of `state` come from, in words; empty where that goes without saying."""
        if not masters or self.dtype is torch.float32:
            return ""
        stored = str(self.dtype).removeprefix("torch.")
        return " (the optimizer's master weights)" if self.has_masters else f" (stored as {stored}; no master weights)"

    def state(self, rows: int | None = None, masters: bool = False) -> State:
        """All weights as one rank alone has them, in their stored type.

        Args:
            rows: rows that the embedding is to have, see `fit_rows`; None: those of the checkpoint.
            masters: in fp32 instead, and from the optimizer's master weights where the checkpoint `has_masters`: what
                is stored in a shorter type is those, rounded.

        Raises:
            ValueError: optimizer files that are missing, damaged or of another model.
        """
        modules = [part["module"] for part in self.parts]
        if masters and self.has_masters and self.optimizer:
            modules = [self._masters(part, files) for part, files in zip(self.parts, self.optimizer, strict=True)]
        whole = dict(modules[0]) if len(modules) == 1 else merge(modules, self.parts[0][UNIVERSAL_CHECKPOINT_INFO])
        if masters and self.has_masters and not self.optimizer:
            whole |= self._universal_masters()
        if masters:
            whole = {name: value.float() for name, value in whole.items()}
        return whole if rows is None else fit_rows(whole, self.vocab_size, rows)

    def _masters(self, part: Mapping[str, Any], files: Iterable[Path]) -> State:
        """A part's fp32 weights; what is not trained has none and is as stored."""
        module: State = part["module"]
        _check_files(self.folder, [file.name for file in files])
        states = (shards.load(str(file), mapped=True)[shards.OPTIMIZER_STATE_DICT] for file in files)
        found = shards.masters(states, {name: value.numel() for name, value in module.items()})
        missing = sorted(_trained(part) - found.keys())
        if missing:
            raise ValueError(f"the optimizer files of {self.folder} do not hold {', '.join(missing[:4])}")
        return {n: found[n].view_as(value) if n in found else value for n, value in module.items()}

    def _universal_masters(self) -> State:
        """The whole fp32 weights of DeepSpeed's universal form, which has a file for each."""
        return {
            name: shards.load(str(self.folder / "zero" / name / "fp32.pt"), mapped=True)["param"]
            for name in sorted(_trained(self.parts[0]))
        }


def _trained(part: Mapping[str, Any]) -> set[str]:
    """Names of the parameters that have an optimizer state."""
    return {name for group in part.get("param_shapes") or () for name in group}


def find_weights(path: Path, flag: str = "--checkpoint", checksums: bool = True) -> Weights:
    """The weights in a --save folder (of the checkpoint that `latest` names) or in one checkpoint's own folder.

    Args:
        path: either folder.
        flag: the argument that named it, for messages.
        checksums: compare the checksums of the files, not only their sizes, where there is a manifest.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is not of pretrain_gpt_acco.py.
    """
    folder = path
    if (path / "latest").is_file():
        try:
            tag = (path / "latest").read_text().strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag} {path}: {path / 'latest'} cannot be read: {error}") from error
        if not tag or Path(tag).name != tag:
            raise ValueError(f"{flag} {path}: {path / 'latest'} names {tag!r}, which is no folder's name")
        folder = path / tag
    if not (folder / store.MODEL_FILE).is_file():
        is_other = (path / "config.json").is_file()
        hint = "; of a Hugging Face folder `megatron-acco import` makes a checkpoint" if is_other else ""
        raise ValueError(f"{flag} {path}: no checkpoint there (no file {folder / store.MODEL_FILE}){hint}")
    try:
        files = _files(folder, checksums)
    except Damaged as error:
        raise ValueError(f"{flag} {path} is damaged: {error}") from error
    parts = tuple(_read(file) for file in files)
    header = parts[0][CLIENT_STATE]
    identity = header["identity"]
    size = int(identity.get("tensor_parallel", 1))
    if len(parts) != size:
        raise ValueError(f"{flag} {path}: {folder} has weights of {len(parts)} of {size} tensor-parallel ranks")
    if size > 1 and not all(UNIVERSAL_CHECKPOINT_INFO in part for part in parts):
        raise ValueError(f"{flag} {path}: {folder} does not say how its tensor-parallel parts fit together")
    iteration = header.get("state", {}).get("iteration", max(0, store.step_of(folder.name)))
    vocab_size, arguments = identity.get("vocab_size"), identity.get("arguments", {})
    optimizer = _optimizer_files(folder, int(identity.get("partitions") or identity.get("ranks", 0)), size)
    return Weights(
        folder, int(iteration), identity["model"], arguments, vocab_size, parts, optimizer, identity.get("tokenizer")
    )


def _files(folder: Path, checksums: bool) -> list[Path]:
    """The model files, in the order of the ranks, checked as far as the checkpoint allows.

    Raises:
        Damaged: a file is missing, cut off or altered.
    """
    if not (folder / store.MANIFEST).is_file():  # of an earlier release
        return sorted(path for path in folder.iterdir() if _MODEL_FILE.fullmatch(path.name))
    manifest = store.read_manifest(folder)
    records = [record for name, record in sorted(manifest.files.items()) if _MODEL_FILE.fullmatch(name)]
    store.check_sizes(folder, records)
    if checksums:
        store.check_checksums(folder, records)
    return [folder / record.name for record in records]


def _optimizer_files(folder: Path, ranks: int, parts: int) -> tuple[tuple[Path, ...], ...]:
    """Where the optimizer states of all ranks are or should be; empty if there are none at all."""
    for name in _SHARD_FILES:
        files = tuple(tuple(folder / name.format(rank, part) for rank in range(ranks)) for part in range(parts))
        if any(file.is_file() for of_part in files for file in of_part):
            return files
    return ()


def _check_files(folder: Path, names: list[str]) -> None:
    """Raise ValueError for optimizer files that are missing, or not as the manifest has them, if there is one."""
    hint = "; without --dtype fp32 the weights are taken as they are stored"
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing[:4])}, which hold the fp32 master weights{hint}")
    if not (folder / store.MANIFEST).is_file():
        return
    try:
        files = store.read_manifest(folder).files
        records = [files[name] for name in names if name in files]
        store.check_sizes(folder, records)
        store.check_checksums(folder, records)
    except Damaged as error:
        raise ValueError(f"{folder} is damaged: {error}{hint}") from error


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    try:
        content[CLIENT_STATE]["identity"]["model"]["padded_vocab_size"]
        module = {name: value for name, value in content["module"].items() if torch.is_tensor(value)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} was not written by pretrain_gpt_acco.py") from error
    return {**content, "module": module}


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def merge(parts: list[State], layout: Mapping[str, Iterable[str]]) -> State:
    """Whole tensors from those of every tensor-parallel rank.

    Args:
        parts: the state of each rank, in their order.
        layout: what `megatron_acco.training.model.universal_checkpoint_info` says of the model.
    """
    whole = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if _is(name, layout[TP_REPLICATED_PARAMETER_PATTERNS]):
            whole[name] = pieces[0]
        elif _is(name, layout[PARAMETER_WITH_ROW_PARALLELISM_PATTERNS]):
            whole[name] = torch.cat(pieces, dim=1)
        elif _is(name, layout[PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0]):
            halves = [piece.chunk(2) for piece in pieces]
            whole[name] = torch.cat([half[number] for number in (0, 1) for half in halves])
        else:
            whole[name] = torch.cat(pieces)
    return whole


def cut(whole: State, layout: Mapping[str, Iterable[str]], rank: int, size: int) -> State:
    """The inverse of `merge`: the part of tensor-parallel rank `rank` of `size`."""
    own = {}
    for name, value in whole.items():
        if _is(name, layout[TP_REPLICATED_PARAMETER_PATTERNS]):
            own[name] = value
        elif _is(name, layout[PARAMETER_WITH_ROW_PARALLELISM_PATTERNS]):
            own[name] = value.chunk(size, dim=1)[rank]
        elif _is(name, layout[PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0]):
            own[name] = torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
        else:
            own[name] = value.chunk(size)[rank]
    return own


def _is(name: str, patterns: Iterable[str]) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)


# ---- the vocabulary -------------------------------------------------------------------------------------------------


def fit_rows(whole: State, vocab_size: int | None, rows: int) -> State:
    """The state with `rows` rows in its embedding and output layer; untouched if it has them already.

    Padding is cut off first. New padding is the mean of the real rows: its logit is then the mean of the real logits
    and, the exponential being convex, its probability at most the average one, 1 / vocab_size. Zeros or copies of a row
    could be likely.

    Args:
        whole: the weights.
        vocab_size: rows that are no padding; None: not known, all of them count.
        rows: rows wanted.
    """
    result = dict(whole)
    for name in VOCABULARY:
        if name not in whole or whole[name].shape[0] == rows:
            continue
        real = whole[name][: vocab_size or whole[name].shape[0]][:rows]
        padding = real.float().mean(dim=0, keepdim=True).to(real.dtype).expand(rows - real.shape[0], -1)
        result[name] = torch.cat([real, padding])
    return result


# ---- the start of a run ---------------------------------------------------------------------------------------------


def check_weights(
    weights: Weights, options: Mapping[str, Any], vocab_size: int, tokenizer: str | None, flag: str
) -> None:
    """Raise ValueError if a run's model cannot take the weights.

    Args:
        weights: what it is to begin with.
        options: the model options of the run and `padded_vocab_size`.
        vocab_size: ids of the run's tokenizer.
        tokenizer: its `Identity.tokenizer`.
        flag: the argument that named the weights.
    """
    free = {"padded_vocab_size"}
    if options["position_embedding_type"] != "learned_absolute":
        free.add("max_position_embeddings")
    different = model_differences(weights.model, options, frozenset(free))
    if different:
        raise ValueError(f"{flag} {weights.folder} is of another model: {different}")
    known = weights.vocab_size or weights.rows
    if vocab_size > known:
        raise ValueError(
            f"the tokenizer has {vocab_size} ids, {flag} {weights.folder} only {known}: it was trained with another "
            f"tokenizer"
        )
    check_tokenizer(weights.tokenizer, tokenizer, f"{flag} {weights.folder}")


def load_weights(model: torch.nn.Module, weights: Weights, rows: int, rank: int, size: int) -> None:
    """Put the weights into the part of a model that tensor-parallel rank `rank` of `size` holds.

    Args:
        model: what `build_model` gives, of any type; the weights are converted.
        weights: checked by `check_weights`.
        rows: rows of its whole embedding.
        rank: tensor-parallel rank.
        size: number of those.
    """
    model.load_state_dict(cut(weights.state(rows), universal_checkpoint_info(model), rank, size))
