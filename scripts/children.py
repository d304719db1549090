"""Child processes that end when this one is asked to: Ctrl-C, SIGTERM and SIGHUP leave nothing running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO


class Interrupted(BaseException):
    """A signal asked the program to stop. Like KeyboardInterrupt, no `except Exception` swallows it."""


class _Starting:
    """While a process is being started a signal waits, else it could leave a process that nobody knows of."""

    active = False
    pending: str | None = None

    def finish(self) -> None:
        """Raise for a signal that came meanwhile; called where the process can be stopped again."""
        self.active = False
        if self.pending is not None:
            raise Interrupted(self.pending)


_starting = _Starting()


def raise_on_signals() -> None:
    """Turn SIGINT, SIGTERM and SIGHUP into `Interrupted`, also where the caller had them ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if _starting.active:
            _starting.pending = name
        else:
            raise Interrupted(name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    output: IO[bytes] | None = None,
    errors: IO[bytes] | None = None,
    poll: Callable[[], None] | None = None,
    ask_to_stop: Callable[[int], None] | None = None,
    grace_seconds: float = 5.0,
) -> int:
    """Run a command to its end and return its exit code.

    The command gets a process group of its own, so that the terminal's Ctrl-C reaches only this process, which then
    stops the group in order.

    Args:
        output: file for stdout and stderr (default: inherited).
        errors: file for stderr alone.
        poll: called a few times per second while the command runs.
        ask_to_stop: called with the process id when a signal arrives; default: SIGINT to the group, upon
            which Python programs clean up.
        grace_seconds: time to stop by itself after that, before the group is killed.

    Raises:
        Interrupted: a signal arrived; no process of the group is left.
    """
    _starting.active = True
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output if errors is None else errors,
            start_new_session=True,
        )
    except OSError:
        _starting.active = False
        raise
    try:
        _starting.finish()
        while process.poll() is None:
            if poll is not None:
                poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
        return process.returncode
    except BaseException:
        # A second signal during the grace time ends it.
        with contextlib.suppress(Interrupted):
            _stop(process, ask_to_stop, grace_seconds)
        raise
    finally:
        # Whatever the command left behind, on every way out.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _stop(process: subprocess.Popen[bytes], ask_to_stop: Callable[[int], None] | None, grace_seconds: float) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if ask_to_stop is not None:
            ask_to_stop(process.pid)
        else:
            os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + grace_seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
