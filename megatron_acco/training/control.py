"""Decisions that all ranks take at the same update, and the group of processes they are taken in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Ask for a save and the end of the run. Slurm sends SIGUSR1 ahead of the time limit (`--signal=USR1@120`)."""


class Stop(IntEnum):
    """Why training ends before its last iteration; the larger one wins if ranks differ."""

    NO = 0
    DURATION = 1
    SIGNAL = 2


class Saving(IntEnum):
    """How far a rank's files of a checkpoint that is written beside training are; the largest of all ranks counts."""

    NONE = 0
    WRITTEN = 1
    WRITING = 2
    FAILED = 3


class Verdict(NamedTuple):
    """What the ranks' votes of one update come to.

    Attributes:
        stop: whether and why to stop.
        saving: how far the ranks' files are.
        about: the update whose checkpoint was being written when the votes were cast, None if none was.
    """

    stop: Stop = Stop.NO
    saving: Saving = Saving.NONE
    about: int | None = None


class StopVote:
    """One small all-reduce per update: launched at its end, read at the end of the next, so that nobody waits.

    It runs on CPU tensors in a group of its own, beside the device and beside the gradient exchanges. All ranks read
    the same result at the same update.
    """

    def __init__(
        self, control: dist.ProcessGroup, duration_in_mins: float | None, launcher: Sequence[int] = ()
    ) -> None:
        """Begin.

        Args:
            control: the group.
            duration_in_mins: stop when the program has run for as long; None: never for that reason.
            launcher: process ids of this process's parent and of its parent, as far as their end ends the run.
        """
        self.control = control
        # From the start of the program, as Megatron counts: a job's time limit knows no set-up either.
        running = time.time() - psutil.Process().create_time()
        self.deadline = None if duration_in_mins is None else time.monotonic() - running + 60.0 * duration_in_mins
        self.signalled = False
        self.interrupts = 0
        self._launcher = tuple(launcher)
        self._vote: torch.Tensor | None = None
        self._about: int | None = None
        self._work: Any = None

    def exchange(self, saving: Saving = Saving.NONE, about: int | None = None) -> Verdict:
        """The verdict on the previous update's votes; casts this rank's votes for the next.

        Args:
            saving: how far this rank's files of the checkpoint in flight are.
            about: the update of that checkpoint, the same on all ranks.
        """
        verdict = self.finish()
        self._vote = torch.tensor([self._mine(), saving], dtype=torch.int32)
        self._about = about
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return verdict

    def finish(self) -> Verdict:
        """The verdict on the votes in flight; none is in flight afterwards."""
        if self._work is None:
            return Verdict()
        self._work.wait()
        assert self._vote is not None
        stop, saving = self._vote.tolist()
        verdict = Verdict(Stop(stop), Saving(saving), self._about)
        self._work = self._vote = None
        return verdict

    def _mine(self) -> Stop:
        if not self.signalled and _parents(len(self._launcher)) != self._launcher:
            # DeepSpeed's single-node command dies of SIGTERM without passing it on: nobody is left to stop us.
            os.write(2, b"the launcher is gone: finishing the update, then saving and leaving\n")
            self.signalled = True
        if self.signalled:
            return Stop.SIGNAL
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return Stop.DURATION if late else Stop.NO

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, SIGTERM, SIGUSR1 and Ctrl-C ask for a stop at an update boundary.

        A second Ctrl-C stops at once.
        """

        def on_signal(number: int, frame: Any) -> None:
            self.interrupts += number == signal.SIGINT
            if self.interrupts > 1:
                raise KeyboardInterrupt
            if not self.signalled:
                name = signal.Signals(number).name
                os.write(2, f"{name} received: finishing the update, then saving and leaving\n".encode())
            self.signalled = True

        before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _parents(count: int) -> tuple[int, ...]:
    """Process ids of this process's parent, and of its parent."""
    return tuple(process.pid for process in psutil.Process().parents()[:count])
