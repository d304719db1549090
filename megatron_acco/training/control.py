"""Decisions that all ranks take at the same update, and the group of processes they are taken in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import psutil
import torch
import torch.distributed as dist


class Stop(IntEnum):
    """Why training ends before its last iteration; the larger one wins if ranks differ."""

    NO = 0
    DURATION = 1
    SIGNAL = 2


class StopVote:
    """One small all-reduce per update: launched at its end, read at the end of the next, so that nobody waits.

    It runs on CPU tensors in a group of its own, beside the device and beside the gradient exchanges. All ranks read
    the same result at the same update.
    """

    def __init__(self, control: dist.ProcessGroup, duration_in_mins: float | None) -> None:
        self.control = control
        self.deadline = None if duration_in_mins is None else time.monotonic() + 60.0 * duration_in_mins
        self.signalled = False
        self.interrupts = 0
        self._launcher = _launcher_chain()
        self._vote: torch.Tensor | None = None
        self._work: Any = None

    def exchange(self) -> Stop:
        """The verdict on the previous update's votes; casts this rank's vote for the next."""
        verdict = self.finish()
        self._vote = torch.tensor([int(self._mine())], dtype=torch.int32)
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return verdict

    def finish(self) -> Stop:
        """The verdict on the votes in flight; none is in flight afterwards."""
        if self._work is None:
            return Stop.NO
        self._work.wait()
        assert self._vote is not None
        verdict = Stop(int(self._vote.item()))
        self._work = self._vote = None
        return verdict

    def _mine(self) -> Stop:
        if not self.signalled and _launcher_chain() != self._launcher:
            # DeepSpeed's single-node command dies of SIGTERM without passing it on: nobody is left to stop us.
            os.write(2, b"the launcher is gone: finishing the update, then saving and leaving\n")
            self.signalled = True
        if self.signalled:
            return Stop.SIGNAL
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return Stop.DURATION if late else Stop.NO

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, SIGTERM and Ctrl-C ask for a stop at an update boundary; a second Ctrl-C stops at once."""

        def on_signal(number: int, frame: Any) -> None:
            self.interrupts += number == signal.SIGINT
            if self.interrupts > 1:
                raise KeyboardInterrupt
            if not self.signalled:
                name = signal.Signals(number).name
                os.write(2, f"{name} received: finishing the update, then saving and leaving\n".encode())
            self.signalled = True

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _launcher_chain() -> tuple[int, int]:
    """Process ids of the node's launcher, which is this process's parent, and of the command that started it."""
    parent = os.getppid()
    try:
        return parent, psutil.Process(parent).ppid()
    except psutil.Error:
        return parent, 0
