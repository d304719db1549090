"""DeepSpeed's compiled ops on a CPU, compiled by one process of a machine before any rank waits for another.

torch marks a compilation in progress by a file, which a killed process leaves behind and every later one waits for,
without a word and without a limit.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# No op of DeepSpeed takes this long to compile.
STALE_SECONDS = 600.0


def prepare_cpu_ops(builders: Sequence[str]) -> None:
    """Compile DeepSpeed's ops of these builder names, if the accelerator is the CPU. No collective.

    Says so if it has to wait for another process; a marker older than `STALE_SECONDS` is removed.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return
    _use_own_ninja()
    ask_cpu_info_once()
    for name in builders:
        builder = accelerator.create_op_builder(name)
        if builder is None or not __compatible_ops__.get(builder.NAME, False):
            continue
        folder = _build_folder(builder.name)
        with (folder / ".megatron-acco.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            wait_for_marker(folder / "lock", STALE_SECONDS)
            builder.load(verbose=False)


def ask_cpu_info_once() -> None:
    """Keep what py-cpuinfo says: DeepSpeed asks twice for each op, and every answer starts an interpreter."""
    import cpuinfo  # comes with deepspeed

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def _use_own_ninja() -> None:
    """Put the interpreter's folder first on PATH if it holds ninja, which this package depends on.

    A login by ssh, as launchers make it, has no environment activated. And another release of ninja, where one is
    installed, hashes commands differently: the two would compile everything anew in turn.
    """
    own = Path(sys.executable).parent
    if (own / "ninja").exists() and shutil.which("ninja") != str(own / "ninja"):
        os.environ["PATH"] = os.pathsep.join([str(own), os.environ.get("PATH", os.defpath)])


def wait_for_marker(marker: Path, stale_seconds: float) -> None:
    """Return once `marker` is gone; remove it when it is older than `stale_seconds`."""
    told = False
    while marker.exists():
        try:
            age = time.time() - marker.stat().st_mtime
        except FileNotFoundError:
            return
        if age > stale_seconds:
            marker.unlink(missing_ok=True)
            return
        if not told:
            told = True
            print(
                f"another process is compiling in {marker.parent}; if none is (it was killed), delete {marker}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(1.0)


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    os.makedirs(folder, exist_ok=True)
    return folder
