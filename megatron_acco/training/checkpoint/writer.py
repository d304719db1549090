"""One rank's checkpoint files, through DeepSpeed's checkpoint-engine interface.

DeepSpeed's own asynchronous engines are not used: the decoupled one moves CPU tensors into shared memory and lets
training go on writing to them, both need its AIO extension, and its commit gives up after five minutes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megatron_acco.training.checkpoint.store import FileRecord


@dataclass
class Written:
    """What became of one save on this rank. `error` is None if all files are on the disk."""

    files: list[FileRecord] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


class CheckpointWriter(TorchCheckpointEngine):
    """Writes with torch.save, computes each file's checksum on the way and forces it to the disk.

    A failed write does not raise where DeepSpeed calls `save`: the other ranks wait in DeepSpeed's collectives, and
    would wait there for ever. It is kept for `result`, and the files of this save that are still to come are left out.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.background = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written = Written()
        self._futures: list[Future[None]] = []

    def start(self, background: bool) -> None:
        """Begin a save. In the background, `save` takes a copy in host memory and a thread writes it."""
        assert not self._futures, "the save before is still being written"
        self.background = background
        self._written = Written()

    def create(self, info: Any) -> None:
        """Nothing: the base announces every save in the log."""

    def save(self, state_dict: Any, path: str) -> None:
        """As the base, see above."""
        if self.background:
            self._futures.append(self._thread.submit(self._write, host_copy(state_dict), Path(path), self._written))
        else:
            self._write(state_dict, Path(path), self._written)

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """What else is written on the way, under the same rule."""
        if self._written.error is not None:
            return
        try:
            step(*args)
        except OSError as error:
            self._written.error = str(error)

    def done(self) -> bool:
        """Whether this rank's files are on the disk, or have failed."""
        return all(future.done() for future in self._futures)

    def failed(self) -> bool:
        """Whether a write has failed so far."""
        return self._written.error is not None

    def result(self) -> Written:
        """Wait for the files."""
        for future in self._futures:
            future.result()
        self._futures = []
        return self._written

    def later(self, job: Callable[..., None], *args: Any) -> None:
        """Run `job` in the writer thread, after what is being written and before the next save."""
        self._thread.submit(job, *args)

    def close(self) -> None:
        """Wait for the thread's work."""
        self._thread.shutdown(wait=True)

    @staticmethod
    def _write(state: Any, path: Path, written: Written) -> None:
        if written.error is not None:
            return
        started = time.perf_counter()
        try:
            written.files.append(write_file(state, path))
        except Exception as error:
            written.error = f"{path}: {error}"
            # Makes room on a full disk, for what others still have to write.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        written.seconds += time.perf_counter() - started


def write_file(state: Any, path: Path) -> FileRecord:
    """torch.save to `path` and to the disk.

    Raises:
        OSError: what the file system says, such as no space left on the device.
    """
    with open(path, "wb", buffering=0) as file:
        summing = _SummingFile(file)
        try:
            torch.save(state, summing)  # type: ignore[arg-type]
        except Exception:
            # torch replaces the reason by its own complaint about the unfinished archive.
            if summing.error is not None:
                raise summing.error from None
            raise
        os.fsync(file.fileno())
    return FileRecord(path.name, summing.size, summing.crc32)


class _SummingFile:
    """A file that only torch.save writes to, in one pass."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        start = 0
        try:
            while start < len(view):  # an unbuffered file may take less than it is given
                start += self.file.write(view[start:])
        except OSError as error:
            self.error = error
            raise
        self.size += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here."""


def host_copy(value: Any) -> Any:
    """A copy of dicts, lists, tuples and tensors in host memory, that training cannot change any more.

    Tensors that share storage share its copy, so that the file has it once too. Copies from an accelerator go to
    pinned memory, all of them beside each other.
    """
    copies: dict[int, torch.Tensor] = {}
    result = _copy(value, copies)
    if any(target.is_pinned() for target in copies.values()):
        get_accelerator().synchronize()
    return result


def _copy(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage._cdata not in copies:
            source = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)  # type: ignore[call-overload]
            on_host = value.device.type == "cpu"
            target = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=not on_host)
            copies[storage._cdata] = target.copy_(source, non_blocking=not on_host)
        result = torch.empty(0, dtype=value.dtype)
        result.set_(copies[storage._cdata].untyped_storage(), value.storage_offset(), value.size(), value.stride())
        return result.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        twin = copy.copy(value)  # of its own class and with its attributes, such as a state dict's versions
        for key, item in value.items():
            twin[key] = _copy(item, copies)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copy(item, copies) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_copy(item, copies) for item in value)
    return copy.deepcopy(value)  # DeepSpeed saves its loss scaler as an object
