"""Reading the optimizer shards of a checkpoint before anything is loaded, and cutting them to this run's layout.

DeepSpeed's ZeRO writes one file per data-parallel rank. It holds that rank's flat partition of every parameter group
(fp32 weights, moments) and `param_slice_mappings`: for each parameter that has a part in it, the first element and the
number of elements. The parts of a parameter, in rank order, are the whole parameter. Nothing else is needed to cut
them for another number of ranks, another order of parameters, or another padding, so this works for files of ACCO, of
stages 1 and 2 (elastic ones, too) and of DeepSpeed's BF16_Optimizer. ACCO's own shards (theta~) have the same layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    BASE_OPTIMIZER_STATE_STEP,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

__all__ = [
    "EXTRAS_KEY",
    "EXTRAS_VERSION",
    "OPTIMIZER_STATE_DICT",
    "Partition",
    "Piece",
    "check_universal",
    "cut",
    "existing_files",
    "fits",
    "group_state",
    "layout_of",
    "load",
    "masters",
    "on_all_ranks",
]
T = TypeVar("T")
Shard = Mapping[str, Any]
# ACCO's own part of a shard. Other versions than this one are never looked into.
EXTRAS_KEY, EXTRAS_VERSION = "acco", 1
_FP32 = "fp32 weights"
_GLOBAL_STATE = "optimizer_state.pt"


@dataclass(frozen=True)
class Piece:
    """A parameter's part in a partition: its first element in the parameter, in the partition, and its length."""

    in_param: int
    in_partition: int
    numel: int


@dataclass(frozen=True)
class Partition:
    """One rank's partition of one parameter group.

    Attributes:
        size: elements, padding included.
        padding: of these, elements at the end that belong to no parameter.
        pieces: the parameters that have a part in it, by name, in their order.
        sizes: elements of every trainable parameter of the group, by name, wherever it lies.
    """

    size: int
    padding: int
    pieces: Mapping[str, Piece]
    sizes: Mapping[str, int]


def layout_of(optimizer: Any) -> list[Partition]:
    """This rank's partitions of a ZeRO stage 1 optimizer, one per parameter group."""
    result = []
    for group, params in enumerate(optimizer.bit16_groups):
        pieces = {}
        for param in params:
            mapping = param._hp_mapping
            if mapping is not None:
                where, own = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                pieces[optimizer.param_names[param]] = Piece(where.start, own.start, own.numel)
        sizes = {optimizer.param_names[param]: param.numel() for param in params}
        size, padding = optimizer.single_partition_of_fp32_groups[group].numel(), optimizer.groups_padding[group]
        result.append(Partition(size, padding, pieces, sizes))
    return result


def on_all_ranks(work: Callable[[], T]) -> T:
    """`work()`, which must not communicate. If it raises on any rank, every rank raises the same error. Collective.

    Raises:
        ValueError: with the messages of the ranks on which it failed.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else _describe(error))
    ranks = {text: [r for r, other in enumerate(errors) if other == text] for text in errors if text is not None}
    if ranks:
        raise ValueError("; ".join(f"{text} (on {_ranks(where)})" for text, where in ranks.items())) from error
    return result  # type: ignore[return-value]


def _describe(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def load(path: str, mapped: bool) -> Mapping[str, Any]:
    """The content of a file of `torch.save`, on the CPU.

    Args:
        mapped: tensors are read where they are used, and only as long as the file is there and unchanged.

    Raises:
        ValueError: it is missing or damaged.
    """
    if not Path(path).is_file():
        raise ValueError(f"the checkpoint has no file {path}")
    try:
        # DeepSpeed's files hold objects (loss scaler, slice mappings), which weights_only would refuse.
        content: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return content


def existing_files(candidates: Sequence[Sequence[str]]) -> list[str]:
    """The first of the lists of which any file exists (the first if none does).

    Raises:
        ValueError: naming the files of that list that are missing.
    """
    chosen = next((names for names in candidates if any(Path(name).is_file() for name in names)), candidates[0])
    missing = [Path(name).name for name in chosen if not Path(name).is_file()]
    if missing:
        raise ValueError(
            f"the checkpoint {Path(chosen[0]).parent} is incomplete: {len(missing)} of {len(chosen)} optimizer files "
            f"are missing ({', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''})"
        )
    return list(chosen)


def check_universal(folder: Path, layout: Sequence[Partition]) -> None:
    """Refuse a universal form that lacks what this rank reads of it: DeepSpeed loads what there is, and no more.

    Args:
        folder: that holds a folder for every parameter.
        layout: this rank's partitions.

    Raises:
        ValueError: naming the files that are missing, or one that is damaged.
    """
    missing = [] if (folder / _GLOBAL_STATE).is_file() else [_GLOBAL_STATE]
    for part in layout:
        names = [name for name, size in part.sizes.items() if size]  # there is nothing of an empty one
        there = {name: {path.name for path in (folder / name).glob("*.pt")} for name in names}
        # The parameters of a group have the same state.
        wanted = {"fp32.pt"}.union(*there.values())
        missing += [f"{name}/{file}" for name, files in there.items() for file in sorted(wanted - files)]
    if missing:
        raise ValueError(
            f"the universal checkpoint {folder.parent} lacks {len(missing)} files of this model "
            f"({', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''})"
        )
    for part in layout:
        for name in part.pieces:
            for path in sorted((folder / name).glob("*.pt")):
                load(str(path), mapped=True)


def fits(shard: Shard, layout: Sequence[Partition]) -> bool:
    """Whether a rank's saved state has exactly this layout, so that DeepSpeed's own load of it is right."""
    if not isinstance(shard[BASE_OPTIMIZER_STATE], Mapping):  # elastic: DeepSpeed asks more of it than a shard holds
        return False
    weights, mappings = shard[SINGLE_PARTITION_OF_FP32_GROUPS], shard.get(PARAM_SLICE_MAPPINGS)
    if mappings is None or len(mappings) != len(layout):
        return False
    for saved, mapping, part in zip(weights, mappings, layout, strict=True):
        pieces = [(name, piece.in_partition, piece.numel) for name, piece in part.pieces.items()]
        if pieces != [(name, where.start, where.numel) for name, where in mapping.items()]:
            return False
        if saved.numel() not in (part.size, part.size - part.padding):
            return False
    return True


def cut(shards: Iterable[Shard], layout: Sequence[Partition], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """This rank's state in its own layout, from the states of all ranks that saved; no shard is kept in memory whole.

    Args:
        shards: optimizer states in rank order.
        layout: this rank's partitions, one per parameter group.
        options: this run's parameter groups, for checkpoints that do not hold any (elastic ones).

    Returns:
        A state as stage 1 saves it, with padding, for `load_state_dict`.

    Raises:
        ValueError: the shards are of other parameters or groups, or do not hold all elements.
    """
    first: Shard | None = None
    groups: list[_Cut] = []
    for shard in shards:
        if first is None:
            first = shard
            if len(shard[SINGLE_PARTITION_OF_FP32_GROUPS]) != len(layout) or PARAM_SLICE_MAPPINGS not in shard:
                raise ValueError(
                    f"the checkpoint has {len(shard[SINGLE_PARTITION_OF_FP32_GROUPS])} parameter groups, this run has "
                    f"{len(layout)} (or it is of a DeepSpeed that did not save where parameters lie)"
                )
            groups = [_Cut(part, f"parameter group {index}") for index, part in enumerate(layout)]
        for index, group in enumerate(groups):
            tensors = _flat_tensors(shard, index)
            if uncut := _flat_tensors(first, index).keys() ^ tensors.keys():
                raise ValueError(
                    f"the checkpoint's parameter group {index} has {', '.join(sorted(uncut))} of whole parameters, as "
                    f"DeepSpeed's Muon keeps it without acco; load it with load_optimizer_states=False"
                )
            group.add(shard[PARAM_SLICE_MAPPINGS][index], tensors)
    assert first is not None
    for group in groups:
        group.check()
    return _assemble(first, groups, options)


def masters(shards: Iterable[Shard], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The fp32 weights of whole parameters, flat, by name; frozen ones have none.

    Args:
        shards: optimizer states in rank order.
        sizes: elements of the parameters of the model.

    Raises:
        ValueError: the shards are of another model, or do not hold all elements.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    for shard in shards:
        mappings = shard.get(PARAM_SLICE_MAPPINGS)
        if mappings is None:
            raise ValueError("the checkpoint is of a DeepSpeed that did not save where parameters lie")
        for mapping, weights in zip(mappings, shard[SINGLE_PARTITION_OF_FP32_GROUPS], strict=True):
            for name, where in mapping.items():
                if name not in whole:
                    whole[name] = torch.zeros(sizes.get(name, 0), dtype=torch.float32)
                begin = seen.get(name, 0)
                seen[name] = begin + where.numel
                if seen[name] <= whole[name].numel():
                    whole[name][begin : seen[name]] = weights.narrow(0, where.start, where.numel)
    for name, value in whole.items():
        if seen[name] != value.numel():
            raise ValueError(f"the optimizer files hold {seen[name]} elements of {name}, the model {value.numel()}")
    return whole


class _Cut:
    """One partition while it is put together."""

    def __init__(self, part: Partition, label: str) -> None:
        self._part = part
        self._label = label
        self._seen: dict[str, int] = dict.fromkeys(part.sizes, 0)
        self.tensors: dict[str, Tensor] = {}

    def add(self, mapping: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Copy what the next rank's shard has for this partition."""
        for name, where in mapping.items():
            if name not in self._seen:
                raise ValueError(f"the checkpoint's {self._label} has the parameter {name}, this run's has not")
            begin = self._seen[name]
            self._seen[name] += where.numel
            piece = self._part.pieces.get(name)
            if piece is None:
                continue
            first, last = max(begin, piece.in_param), min(begin + where.numel, piece.in_param + piece.numel)
            if first >= last:
                continue
            for key, source in tensors.items():
                if key not in self.tensors:
                    self.tensors[key] = torch.zeros(self._part.size, dtype=source.dtype)
                target = self.tensors[key].narrow(0, piece.in_partition + first - piece.in_param, last - first)
                target.copy_(source.narrow(0, where.start + first - begin, last - first))

    def whole(self, key: str, like: Tensor) -> Tensor:
        """The partition of `key`; zeros of the dtype of `like` where all of it is padding."""
        return self.tensors[key] if key in self.tensors else torch.zeros(self._part.size, dtype=like.dtype)

    def check(self) -> None:
        """All elements of all parameters must have been there."""
        for name, size in self._part.sizes.items():
            if self._seen[name] != size:
                raise ValueError(
                    f"the checkpoint's {self._label} holds {self._seen[name]} elements of {name}, this run's has {size}"
                )


def group_state(shard: Shard, index: int) -> Mapping[str, Any]:
    """What the base optimizer keeps for a group; empty before its first step."""
    base = shard[BASE_OPTIMIZER_STATE]
    if not isinstance(base, Mapping):
        return base[index]  # type: ignore[no-any-return]
    return base["state"].get(base["param_groups"][index]["params"][0], {})  # type: ignore[no-any-return]


def _flat_tensors(shard: Shard, index: int) -> dict[str, Tensor]:
    """Everything in a shard that has one element per element of the partition: weights, moments, theta~."""
    weights = shard[SINGLE_PARTITION_OF_FP32_GROUPS][index]
    sizes = (weights.numel(), weights.numel() + shard[GROUP_PADDINGS][index])
    tensors = {_FP32: weights}
    for key, value in group_state(shard, index).items():
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() in sizes:
            tensors[key] = value
    for key, value in _extras(shard).items():
        if isinstance(value, list):
            tensors[f"{EXTRAS_KEY}.{key}"] = value[index]
    return tensors


def _extras(shard: Shard) -> Mapping[str, Any]:
    extras = shard.get(EXTRAS_KEY) or {}
    return extras if extras.get("version") == EXTRAS_VERSION else {k: v for k, v in extras.items() if k == "version"}


def _assemble(first: Shard, groups: Sequence[_Cut], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A rank's state from its cut tensors, and from the first rank's shard what is the same on all ranks."""
    saved = first[BASE_OPTIMIZER_STATE]
    state: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        own = group_state(first, index)
        if own:
            flat = _flat_tensors(first, index)
            # Small tensors are cloned, too: the file that they are mapped from may be removed during the training.
            state[index] = {k: group.whole(k, v) if k in flat else copy.deepcopy(v) for k, v in own.items()}
    if isinstance(saved, Mapping):
        param_groups = [{**group, "params": [index]} for index, group in enumerate(saved["param_groups"])]
    else:
        step = {"step": first[BASE_OPTIMIZER_STATE_STEP]} if BASE_OPTIMIZER_STATE_STEP in first else {}
        param_groups = [{**group, **step, "params": [index]} for index, group in enumerate(options)]
    weights = [group.whole(_FP32, first[SINGLE_PARTITION_OF_FP32_GROUPS][i]) for i, group in enumerate(groups)]
    result = {
        **first,
        BASE_OPTIMIZER_STATE: {"state": state, "param_groups": param_groups},
        SINGLE_PARTITION_OF_FP32_GROUPS: weights,
    }
    result.pop(PARAM_ALIGNMENT_PADDINGS, None)
    if first.get(EXTRAS_KEY):
        result[EXTRAS_KEY] = {
            key: [group.whole(f"{EXTRAS_KEY}.{key}", value[i]) for i, group in enumerate(groups)]
            if isinstance(value, list)
            else value
            for key, value in _extras(first).items()
        }
    return result
