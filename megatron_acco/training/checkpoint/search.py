"""The checkpoint that --load means: found and checked by every rank for itself, then agreed on by all.

Nothing is unpickled before the checkpoint is known to belong to this run: its manifest is JSON. Checkpoints of earlier
releases have none; their model file is what tells.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_acco.training.checkpoint import store
from megatron_acco.training.checkpoint.state import CLIENT_STATE, CheckpointOptions, Identity, compare
from megatron_acco.training.checkpoint.store import Damaged, FileRecord, Manifest

_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LATEST, _CONVERTED = "latest", "latest_universal"  # the second is written by DeepSpeed's ds_to_universal
# What other programs leave in their checkpoint folders.
_FOREIGN = ("latest_checkpointed_iteration.txt", "iter_*", "global_step*", "checkpoint-*", "*.pt", "*.safetensors")


class Refused(ValueError):
    """The ranks cannot start from the checkpoint that --load names. The message says what each of them lacks."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from, checked against the run.

    Attributes:
        folder: the --load folder.
        tag: name of the checkpoint in it.
        universal: whether it is in DeepSpeed's universal form.
        notices: for the log, of what is not as the user may think.
        warnings: the same, of damage.
        checked_bytes: bytes whose checksum this rank has compared.
        checked_seconds: how long that took.
    """

    folder: Path
    tag: str
    universal: bool = False
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    checked_bytes: int = 0
    checked_seconds: float = 0.0


@dataclass(frozen=True)
class Reader:
    """Which rank looks, and so which files it must find and whose checksums it compares.

    Attributes:
        rank: rank in the job.
        world_size: ranks in the job.
        local_rank: rank on its host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def reads_shard(self, shard: tuple[int, int], saved: Identity) -> bool:
        """Whether this rank loads the optimizer file (data-parallel rank, tensor-parallel rank).

        On another number of ranks all files of its part of the model are read.
        """
        parts = saved.tensor_parallel
        same = saved.shards * parts == self.world_size
        return shard[1] == self.rank % parts and (not same or shard[0] == self.rank // parts)

    def checks_shard(self, shard: tuple[int, int], saved: Identity) -> bool:
        """Whether this rank compares its checksum; the ranks that read a file share that work."""
        replicas = max(1, self.world_size // saved.tensor_parallel)
        mine = shard[0] % replicas == self.rank // saved.tensor_parallel % replicas
        return self.reads_shard(shard, saved) and mine


def find_checkpoint(
    options: CheckpointOptions, mine: Identity, override_schedule: bool, reader: Reader | None = None
) -> Search | None:
    """Look for the checkpoint that --load names. Reads no tensors and uses no collective.

    Returns:
        The search with its result in `found`; None if there is nothing to load, so that training starts fresh.

    Raises:
        ValueError: if the folder holds no whole checkpoint, or one of another model, schedule or batch.
    """
    if options.load is None:
        return None
    reader = reader or Reader()
    search = Search(options, mine, override_schedule, reader)
    try:
        if search.is_empty():
            return None
        search.found = search.choose()
    except (Damaged, OSError) as error:
        where = f"rank {reader.rank} on {socket.gethostname()}: " if reader.world_size > 1 else ""
        raise ValueError(f"--load {search.folder}: {where}{error}") from error
    return search


class Search:
    """One rank's view of the --load folder."""

    def __init__(self, options: CheckpointOptions, mine: Identity, override_schedule: bool, reader: Reader) -> None:
        assert options.load is not None
        self.folder = Path(options.load)
        self.options = options
        self.mine = _as_json(mine)
        self.override_schedule = override_schedule
        self.reader = reader
        checkpoint = mine.arguments.get("deepspeed", {}).get("checkpoint") or {}
        self.universal = bool(checkpoint.get("load_universal", False))
        self.found: Found | None = None
        self._faults: dict[str, str | None] = {}
        self._identities: dict[str, Identity] = {}
        self._iterations: dict[str, int] = {}
        self._bytes, self._seconds = 0, 0.0

    # ---- by this rank -----------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether there is nothing to load, and that is fine: --save is the same folder.

        Raises:
            ValueError: if there is no checkpoint to load, or something that is none of ours.
        """
        latest = self.folder / _LATEST
        if latest.exists() or (self.folder / _CONVERTED).exists() or store.list_tags(self.folder):
            return False
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--load {self.folder} is not a folder")
        save = self.options.save
        if save is None or self.folder.resolve() != Path(save).resolve():
            raise ValueError(f"--load {self.folder}: no checkpoint there (no file {latest})")
        foreign = sorted(path.name for pattern in _FOREIGN for path in self.folder.glob(pattern))
        if foreign:
            raise ValueError(
                f"--load {self.folder}: no checkpoint of pretrain_gpt_acco.py there, but {', '.join(foreign[:5])}; "
                f"give another folder, or remove what is there to start fresh"
            )
        return True

    def choose(self) -> Found:
        """The checkpoint that `latest` names or, if that is not whole, the newest whole one before it.

        Raises:
            Damaged: if there is none, or --load-strict forbids to take another one.
            ValueError: if it is not of this run.
        """
        warnings = []
        tag, fault = self._named()
        if fault is None:
            fault = self.fault(tag)
        if fault is not None:
            if self.options.load_strict:
                raise Damaged(fault)
            warnings.append(fault)
            for older in self.candidates(tag):
                try:
                    older_fault = self.fault(older)
                except ValueError as error:  # another program's, which nobody asked for
                    older_fault = str(error)
                if older_fault is None:
                    tag = older
                    break
                warnings.append(older_fault)
            else:
                raise Damaged("; ".join(warnings) + "; there is no other whole checkpoint in the folder")
            warnings.append(f"resuming from {tag}, the newest whole checkpoint before that")
        return self._accept(tag, tuple(warnings))

    def fault(self, tag: str) -> str | None:
        """What is wrong with a checkpoint as this rank sees it, None if it is whole. Looked at once.

        Raises:
            ValueError: if it is whole, but no checkpoint of this program.
        """
        if tag not in self._faults:
            try:
                self._identities[tag], self._iterations[tag] = self._check(tag)
                self._faults[tag] = None
            except Damaged as error:
                self._faults[tag] = f"{tag} is not whole: {error}"
            except OSError as error:  # a folder that may not be entered
                self._faults[tag] = f"{tag} cannot be read: {error}"
        return self._faults[tag]

    def candidates(self, tag: str) -> list[str]:
        """Other checkpoints of the folder, the newest before `tag` first.

        Later ones come last: they may be of a course that was given up by setting `latest` back.
        """
        others = [other for other in store.list_tags(self.folder) if other != tag]
        if store.step_of(tag) < 0:
            return others
        return sorted(others, key=lambda other: store.step_of(other) > store.step_of(tag))

    def _named(self) -> tuple[str, str | None]:
        """What `latest` names, and what is wrong with that.

        Where the JSON loads the universal form, it is what the converter made, until this run has saved later updates:
        the same command goes on from those.
        """
        plain = self._named_by(self.folder / _LATEST)
        if not self.universal or not (self.folder / _CONVERTED).exists():
            return plain
        converted = self._named_by(self.folder / _CONVERTED)
        return plain if store.step_of(plain[0]) > self._iteration(*converted) else converted

    def _iteration(self, tag: str, fault: str | None) -> int:
        try:
            return -1 if fault is not None or self.fault(tag) is not None else self._iterations[tag]
        except ValueError:  # another program's
            return -1

    def _named_by(self, latest: Path) -> tuple[str, str | None]:
        try:
            tag = latest.read_text().strip()
            # A name with a folder in it would lead out of this one.
            named = bool(tag) and Path(tag).name == tag and (self.folder / tag).is_dir()
        except FileNotFoundError:
            return "", f"there are checkpoints, but no file {latest}"
        except (OSError, ValueError) as error:
            return "", f"{latest} cannot be read: {error}"
        if not named:
            return tag, f"{latest} names {tag!r}, but there is no such folder"
        return tag, None

    def _accept(self, tag: str, warnings: tuple[str, ...]) -> Found:
        where = f"{self.folder}/{tag}"
        universal = store.is_universal(self.folder / tag)
        notices = compare(self._identities[tag], self.mine, where, self.override_schedule, universal)
        return Found(self.folder, tag, universal, notices, warnings, self._bytes, self._seconds)

    def _check(self, tag: str) -> tuple[Identity, int]:
        folder = self.folder / tag
        if not (folder / store.MANIFEST).is_file() and (folder / store.MODEL_FILE).is_file():
            return _check_without_manifest(folder, self.universal)
        manifest = store.read_manifest(folder)
        saved = _identity(manifest.identity, folder)
        store.check_sizes(folder, manifest.files.values())
        self._check_mine(manifest, saved)
        started = time.perf_counter()
        self._bytes += store.check_checksums(folder, self._to_compare(manifest, saved))
        self._seconds += time.perf_counter() - started
        return saved, manifest.iteration

    def _check_mine(self, manifest: Manifest, saved: Identity) -> None:
        """Ranks without a common file system have parts of the checkpoint each: is what this rank reads here?"""
        shards = {_numbers(match) for name in manifest.files if (match := _SHARD.fullmatch(name))}
        models = {_numbers(match)[0] for name in manifest.files if (match := _MODEL.fullmatch(name))}
        for part in range(saved.tensor_parallel):
            if part not in models:
                raise Damaged(f"its folder on this host has no weights of tensor-parallel rank {part}")
            for rank in range(saved.shards):
                if (rank, part) not in shards and self.reader.reads_shard((rank, part), saved):
                    raise Damaged(
                        f"its folder on this host has no optimizer file of data-parallel rank {rank}, "
                        f"tensor-parallel rank {part}"
                    )

    def _to_compare(self, manifest: Manifest, saved: Identity) -> list[FileRecord]:
        """This rank's share: shards are spread over the ranks, the rest is read once per host."""

        def mine(name: str) -> bool:
            shard = _SHARD.fullmatch(name)
            return self.reader.checks_shard(_numbers(shard), saved) if shard else self.reader.local_rank == 0

        return [record for name, record in manifest.files.items() if mine(name)]

    # ---- by all ranks -----------------------------------------------------------------------------------------------

    def require(self, tag: str) -> str | None:
        """As `fault`, for a checkpoint that another rank sees, and never raises."""
        try:
            return self.fault(tag) if (self.folder / tag).is_dir() else f"no folder {self.folder / tag}"
        except (OSError, ValueError) as error:
            return str(error)


def agree(search: Search | None, strict: bool, control: dist.ProcessGroup) -> Found | None:
    """One checkpoint for all ranks: the one that every rank has chosen or, failing that, the newest whole for all.

    Collective. Hosts may see different folders, and each rank has compared the checksums of its own files only.

    Raises:
        Refused: on all ranks, if there is none; the message says which rank lacks what.
    """
    host = socket.gethostname()
    found = None if search is None else search.found
    chosen = _gather((host, found, [] if search is None else store.list_tags(search.folder)), control)
    tags = {theirs.tag for _, theirs, _ in chosen if theirs is not None}
    nothing = any(theirs is None for _, theirs, _ in chosen)
    if nothing and not tags:
        return None
    if len(tags) == 1 and not nothing:
        assert found is not None
        return _with_warnings(found, [theirs.warnings for _, theirs, _ in chosen])
    table = [
        f"rank {rank} on {host} found {theirs.tag if theirs else 'no checkpoint'}"
        + "".join(f" ({warning})" for warning in (theirs.warnings if theirs else ()))
        for rank, (host, theirs, _) in enumerate(chosen)
    ]
    if nothing or strict:
        raise Refused(f"the ranks do not see the same checkpoint to load: {'; '.join(_merged(table))}")
    assert search is not None
    limit = min(tags, key=store.step_of)
    everywhere = {tag for _, theirs, listed in chosen for tag in [theirs.tag, *listed]}
    for tag in sorted(everywhere, key=lambda tag: (store.step_of(tag), tag), reverse=True):
        if store.step_of(tag) > store.step_of(limit):
            continue
        faults = _gather(search.require(tag), control)
        if not any(faults):
            warning = f"{'; '.join(_merged(table))}; resuming from {tag}, the newest that is whole for all ranks"
            try:
                return search._accept(tag, (warning,))
            except ValueError as error:
                raise Refused(str(error)) from error
        table += [f"rank {rank} on {chosen[rank][0]}: {fault}" for rank, fault in enumerate(faults) if fault]
    raise Refused(f"no checkpoint is whole for all ranks: {'; '.join(_merged(table))}")


def _gather(value: Any, control: dist.ProcessGroup) -> list[Any]:
    result: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(result, value, group=control)
    return result


def _with_warnings(found: Found, of_ranks: list[tuple[str, ...]]) -> Found:
    return dataclasses.replace(found, warnings=tuple(dict.fromkeys(w for warnings in of_ranks for w in warnings)))


def _merged(lines: list[str], most: int = 16) -> list[str]:
    """A job of a thousand ranks has a thousand lines."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def _as_json(identity: Identity) -> Identity:
    """As it comes back from a manifest: tuples as lists."""
    return Identity(**json.loads(json.dumps(dataclasses.asdict(identity), default=str)))


def _identity(fields: Mapping[str, Any], folder: Path) -> Identity:
    try:
        return Identity(**fields)
    except TypeError as error:
        raise Damaged(f"{folder} is of another release: {error}") from error


def _numbers(match: re.Match[str]) -> tuple[int, int]:
    first, *rest = (int(group) for group in match.groups())
    return first, (rest[0] if rest else 0)


# ---- checkpoints of earlier releases, and converted ones ------------------------------------------------------------


def _check_without_manifest(folder: Path, universal: bool) -> tuple[Identity, int]:
    """Presence of every file, and the identity from the model file, which has to be unpickled for it."""
    model_file = folder / store.MODEL_FILE
    try:
        content = torch.load(model_file, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise Damaged(f"{model_file} is damaged: {error}") from error
    header = content.get(CLIENT_STATE)
    if header is None:
        raise ValueError(f"--load {folder.parent}: {folder.name} was not written by pretrain_gpt_acco.py")
    saved = _as_json(_identity(header["identity"], folder))
    converted = store.is_universal(folder)
    if "format" in header and not converted:
        raise Damaged(f"no file {folder / store.MANIFEST}")
    if converted and not universal:
        raise ValueError(
            f"--load {folder.parent}: {folder.name} is a universal checkpoint; give "
            f'"checkpoint": {{"load_universal": true}} in the DeepSpeed JSON'
        )
    for part in range(saved.tensor_parallel):
        of_part = f" of tensor-parallel rank {part}" if saved.tensor_parallel > 1 else ""
        if not (folder / f"mp_rank_{part:02d}_model_states.pt").is_file():
            raise Damaged(f"it has no weights{of_part}")
        for rank in range(0 if converted else saved.ranks):
            _check_shard(folder, rank, part, of_part)
    return saved, int(content.get("global_steps", -1))


def _check_shard(folder: Path, rank: int, part: int, of_part: str) -> None:
    # DeepSpeed marks the files of bf16 runs.
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt" for prefix in ("", "bf16_")]
    shards = [folder / name for name in names if (folder / name).is_file()]
    if not shards:
        raise Damaged(f"it has no optimizer file of rank {rank}{of_part}")
    if not zipfile.is_zipfile(shards[0]):
        raise Damaged(f"{shards[0]} is damaged (cut off?)")
