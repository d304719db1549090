"""The --save folder on disk. No processes, no torch: every step is a file operation that can be tested by itself.

DIR/latest                     name of the checkpoint to resume from, replaced last and atomically
DIR/global_step<N>/            a whole checkpoint: it got this name by a rename
    manifest.json              names, sizes and CRC-32 of its files, and what it belongs to; written last
    mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_optim_states.pt, ...
DIR/.saving-global_step<N>-*/  a save that has not got there
DIR/.replaced-global_step<N>-* a checkpoint that one of the same name is about to replace
DIR/.deleting-global_step<N>-* one that --save-retain deletes
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MODEL_FILE = "mp_rank_00_model_states.pt"
FORMAT = 1
_SAVING, _REPLACED, _DELETING, _LATEST, _RANK = ".saving-", ".replaced-", ".deleting-", ".latest-", ".rank-"
_BLOCK = 1 << 22


class Damaged(Exception):
    """A checkpoint is not whole; the message names the file and the fault."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint. `name` is relative to its folder, `crc32` is over its `size` bytes."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a folder's part of a checkpoint consists of.

    Attributes:
        tag: name of the checkpoint's folder.
        iteration: committed updates.
        saved_at: seconds since the epoch.
        identity: the fields of `Identity`, as JSON gives them back.
        files: by name.
    """

    tag: str
    iteration: int
    saved_at: float
    identity: dict[str, Any]
    files: dict[str, FileRecord]


def tag_of(iteration: int) -> str:
    """Name of the folder of a checkpoint, as DeepSpeed would choose it."""
    return f"global_step{iteration}"


def step_of(tag: str) -> int:
    """The update in a folder's name, -1 if there is none."""
    match = re.search(r"(\d+)$", tag)
    return int(match[1]) if match else -1


# ---- writing ------------------------------------------------------------------------------------------------------


def staging_folder(save: Path, tag: str, job: str) -> Path:
    """Where a save is written: DeepSpeed makes the folder `tag` inside it. `job` sets jobs apart."""
    return save / f"{_SAVING}{tag}-{job}"


def write_manifest(folder: Path, iteration: int, identity: Mapping[str, Any], files: Iterable[FileRecord]) -> None:
    """Write the manifest of `folder` (a checkpoint under its staging name), which must hold `files` and no others.

    Raises:
        Damaged: if the folder holds other files than were reported as written.
    """
    records = sorted(files, key=lambda record: record.name)
    names, there = [record.name for record in records], sorted(path.name for path in folder.iterdir())
    if names != there:
        raise Damaged(f"{folder} holds {there}, but the ranks reported {names}")
    content: dict[str, Any] = {
        "format": FORMAT,
        "tag": folder.name,
        "iteration": iteration,
        "saved_at": time.time(),
        "identity": identity,
        "files": {record.name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for record in records},
    }
    _write(folder / MANIFEST, json.dumps({**content, "crc32": _own_checksum(content)}, indent=1).encode())
    sync_folder(folder)


def publish(save: Path, staging: Path, tag: str, job: str) -> None:
    """Give a finished checkpoint its name. What had that name is replaced; without a manifest it is set aside."""
    target, before = save / tag, save / f"{_REPLACED}{tag}-{job}"
    sync_folder(staging)
    if os.path.lexists(target):
        if not (target / MANIFEST).is_file():
            before = _free_name(save / f"{tag}.before")
        os.rename(target, before)
    os.rename(staging / tag, target)
    for script in staging.iterdir():  # DeepSpeed puts zero_to_fp32.py beside the checkpoint's folder
        os.replace(script, save / script.name)
    sync_folder(save)
    staging.rmdir()
    if before.name.startswith(_REPLACED):
        _remove(before, ignore_errors=True)


def stage_latest(save: Path, tag: str, job: str) -> Path:
    """Write `latest` under another name, so that naming a checkpoint later takes no space on the disk."""
    staged = save / f"{_LATEST}{job}"
    _write(staged, tag.encode())
    return staged


def move_latest(save: Path, staged: Path) -> None:
    """Put `latest` in force."""
    os.replace(staged, save / "latest")
    sync_folder(save)


def discard(staging: Path, job: str) -> None:
    """Remove what a failed save has left. Never fails: the reason of the failure is what the user must see."""
    shutil.rmtree(staging, ignore_errors=True)
    with contextlib.suppress(OSError):
        (staging.parent / f"{_LATEST}{job}").unlink(missing_ok=True)


def remove_leftovers(save: Path) -> list[str]:
    """Clean up after jobs that were killed in a save. Returns the names that are gone. One process per folder."""
    gone = []
    for path in sorted(save.glob(".*")):
        name = path.name
        if name.startswith(_REPLACED):
            tag = name.removeprefix(_REPLACED).rpartition("-")[0]
            if tag and not (save / tag).exists():
                os.rename(path, save / tag)
                continue
        elif not name.startswith((_SAVING, _DELETING, _LATEST, _RANK)):
            continue
        _remove(path)
        if not name.startswith(_RANK):
            gone.append(name)
    return gone


def delete_older(save: Path, keep: int, newest: str, job: str) -> list[str]:
    """Delete all but the `keep` checkpoints saved last; `newest` stays whatever the clocks say.

    Only folders with a manifest count and are deleted, by a rename first: a half deleted one is no checkpoint. A link
    that leads to a checkpoint elsewhere is none of them.

    Returns:
        The deleted tags.
    """
    found = []
    for tag in list_tags(save):
        if (save / tag).is_symlink():
            continue
        try:
            found.append(read_manifest(save / tag))
        except Damaged:
            continue  # damaged or of a later format: not ours to delete
    others = sorted((m for m in found if m.tag != newest), key=lambda m: (m.saved_at, m.iteration), reverse=True)
    deleted = [manifest.tag for manifest in others[keep - 1 :]]
    for tag in deleted:
        doomed = save / f"{_DELETING}{tag}-{job}"
        os.rename(save / tag, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return deleted


# ---- reading ------------------------------------------------------------------------------------------------------


def list_tags(folder: Path) -> list[str]:
    """Checkpoints, whole or not, the latest update first. Those of earlier releases have no manifest."""
    try:
        files = [*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"*/{MODEL_FILE}")]
    except OSError:
        return []
    tags = {path.parent.name for path in files if not path.parent.name.startswith(".")}
    return sorted(tags, key=lambda tag: (step_of(tag), tag), reverse=True)


def is_universal(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder is in DeepSpeed's universal form."""
    return (checkpoint / "zero").is_dir()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        Damaged: if it is missing, cut off, altered, of another folder, or of a later format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("crc32")
    except FileNotFoundError as error:
        raise Damaged(f"no file {path}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if content.get("format") != FORMAT:
        raise Damaged(f"{path} has format {content.get('format')}, this release reads {FORMAT}")
    if checksum != _own_checksum(content):
        raise Damaged(f"{path} was altered: its checksum is wrong")
    if content["tag"] != folder.name:
        raise Damaged(f"{path} belongs to a checkpoint named {content['tag']}")
    files = {
        name: FileRecord(name, record["size"], int(record["crc32"], 16)) for name, record in content["files"].items()
    }
    return Manifest(content["tag"], content["iteration"], content["saved_at"], content["identity"], files)


def check_sizes(folder: Path, files: Iterable[FileRecord]) -> None:
    """Raise Damaged for the first file that is missing or has another size."""
    for record in files:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise Damaged(f"no file {path}") from error
        if size != record.size:
            raise Damaged(f"{path} has {size} bytes instead of {record.size}")


def check_checksums(folder: Path, files: Iterable[FileRecord]) -> int:
    """Read the files and compare their checksums. Returns the bytes read.

    Raises:
        Damaged: for the first file whose content is not what was written.
    """
    total = 0
    for record in files:
        path, checksum = folder / record.name, 0
        try:
            with open(path, "rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    checksum = zlib.crc32(block, checksum)
                    total += len(block)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if checksum != record.crc32:
            raise Damaged(f"{path} is damaged: its checksum is {checksum:08x} instead of {record.crc32:08x}")
    return total


# ---- the folder ---------------------------------------------------------------------------------------------------


def lock_folder(folder: Path) -> Any:
    """Take the folder for this job, for as long as the returned handle lives. Called on one rank.

    Raises:
        ValueError: if another job holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "a")  # noqa: SIM115 (the lock lives as long as the handle)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another job is writing to {folder}; give each job its own --save folder") from error
    except OSError:
        pass  # a file system without locks: nothing to hold on to
    return handle


def leave_token(folder: Path, job: str, rank: int) -> Path:
    """Make the folder, and in it a file by which other ranks see whether it is their folder too."""
    folder.mkdir(parents=True, exist_ok=True)
    token = token_of(folder, job, rank)
    token.touch()
    return token


def token_of(folder: Path, job: str, rank: int) -> Path:
    """The file that `leave_token` makes."""
    return folder / f"{_RANK}{job}-{rank}"


def lowest_token(folder: Path, job: str, rank: int) -> int:
    """The lowest rank that sees this folder. Asks by name: the listing of a network folder may be old."""
    return next(other for other in range(rank + 1) if token_of(folder, job, other).exists())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _own_checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder, a file or a link, never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
