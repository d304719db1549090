"""The folder of the sample index: built once per file system, published by one rename, rebuilt when it is damaged."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"
_ABANDONED_SECONDS = 86_400.0
_DAMAGE = (OSError, EOFError, ValueError, pickle.UnpicklingError)  # numpy takes what has no header for a pickle

Build = Callable[[Path], Any]
"""Builds the index in a folder, or loads it if it is there."""


def load_or_build(root: Path, key: str, build: Build) -> tuple[Any, str]:
    """Open the index `key` below `root`, after building it if there is none or it is damaged.

    Ranks that share a file system build it once: the first takes a lock, builds in a private folder and publishes it by
    a rename. A cache that is whole is only read, so it can be on a file system that cannot be written.

    Returns:
        What `build` returns, and a hash of the index files, to be compared between ranks with caches of their own.

    Raises:
        ValueError: the cache cannot be written.
    """
    final = root / key
    try:
        if not _is_whole(final):
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f"{key}.lock"):
                if not _is_whole(final):
                    _publish(build, root, final)
        try:
            return build(final), _digest(final)
        except _DAMAGE:
            # The sizes are right and the content is not: once more, after whoever else is at it.
            with _locked(root / f"{key}.lock"):
                with contextlib.suppress(*_DAMAGE):
                    return build(final), _digest(final)
                _publish(build, root, final)
            return build(final), _digest(final)
    except OSError as error:
        raise ValueError(f"cannot write the sample index to {root}: {error}; set --data-cache-path") from error


def _digest(final: Path) -> str:
    digest: str = json.loads((final / _MANIFEST).read_text())["digest"]
    return digest


def _is_whole(final: Path) -> bool:
    """Whether every file that was built is there with its size."""
    try:
        sizes = json.loads((final / _MANIFEST).read_text())["sizes"]
        return all((final / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; it goes with the process, so a killed builder leaves none behind."""
    with open(path, "a") as handle:
        # A file system without locks costs a repeated build only: publishing is atomic.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the process that builds the sample index {path.stem}", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _publish(build: Build, root: Path, final: Path) -> None:
    """Build the index in a private folder and give it its name in one step."""
    host = re.sub(r"\W", "_", socket.gethostname())
    for leftover in root.glob(f"{final.name}.building-*"):
        if _is_abandoned(leftover, host):
            shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{final.name}.building-{host}-{os.getpid()}-", dir=root))
    os.chmod(staging, 0o755)
    try:
        build(staging)
        _write_manifest(staging)
        if final.is_dir():
            shutil.rmtree(final)  # damaged
        os.rename(staging, final)
    except OSError:
        if not _is_whole(final):
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_abandoned(staging: Path, host: str) -> bool:
    """Whether the builder is gone. Locks may not reach over hosts, so another host's young folder is left alone."""
    match = re.search(r"building-(\w+)-(\d+)-", staging.name)
    if match and match[1] == host:
        return not Path(f"/proc/{match[2]}").exists()
    try:
        return time.time() - staging.stat().st_mtime > _ABANDONED_SECONDS
    except OSError:
        return False


def _write_manifest(folder: Path) -> None:
    sizes, digest = {}, hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sizes[path.name] = path.stat().st_size
        if path.suffix == ".npy":
            with open(path, "rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    (folder / _MANIFEST).write_text(json.dumps({"sizes": sizes, "digest": digest.hexdigest()[:16]}) + "\n")
