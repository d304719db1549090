"""Whether hosts see the same files, and how much room they have."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
_BLOCKS = 128


@dataclass(frozen=True)
class Room:
    """Where a folder is or would be made, and the bytes free there."""

    folder: str
    existing: str
    free: int
    writable: bool


def mark(path: str) -> str:
    """A mark of a file's content: its size and a hash of blocks spread over it. Empty if it cannot be read."""
    try:
        size = os.path.getsize(path)
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            for number in range(_BLOCKS):
                file.seek(number * max(_BLOCK, size // _BLOCKS))
                digest.update(file.read(_BLOCK))
            file.seek(max(0, size - _BLOCK))
            digest.update(file.read())
    except OSError:
        return ""
    return digest.hexdigest()[:16]


def marks(paths: Iterable[str]) -> dict[str, str]:
    """`mark` of every path."""
    return {path: mark(path) for path in paths}


def room(folder: str) -> dict[str, Any]:
    """The fields of `Room`."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    return asdict(Room(folder, str(existing), usage.free, _can_be_written(existing)))


def _can_be_written(existing: Path) -> bool:
    """Tried, not asked: root may do everything by its permissions, also in /proc and where the server says no."""
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def leave_token(folder: str, name: str) -> str:
    """Leave an empty file where `folder` is or would be made; its path, empty if that is impossible."""
    path = Path(room(folder)["existing"]) / name
    try:
        path.touch()
    except OSError:
        return ""
    return str(path)


def data_files(words: Sequence[str]) -> list[str]:
    """The files of --data-path: prefixes, between which weights may stand."""
    files = []
    for word in words:
        try:
            float(word)
        except ValueError:
            files += [f"{word}.idx", f"{word}.bin"]
    return files
