"""A folder that is whole or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_acco.training.checkpoint.store import sync_folder


def check_output(out: Path) -> None:
    """Refuse a place that cannot take a new folder.

    Raises:
        ValueError: something is there, or nothing can be written there.
    """
    if out.is_dir() and not any(out.iterdir()):
        pass
    elif out.exists() or out.is_symlink():
        raise ValueError(f"--out {out} is there already; give another folder")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--out {out}: cannot write to {parent}")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name at the end, and is removed if anything fails before.

    Raises:
        ValueError: what the file system says, such as no space left on the device.
    """
    check_output(out)
    out = out.absolute()
    staged = out.with_name(f".partial-{out.name}-{secrets.token_hex(4)}")
    try:
        staged.mkdir(parents=True)
        yield staged
        for path in [*(path for path in staged.rglob("*") if path.is_dir()), staged]:
            sync_folder(path)
        os.replace(staged, out)  # over an empty folder at most
        sync_folder(out.parent)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
