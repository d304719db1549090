"""Which rank failed first, and what it was doing: every rank leaves a sign of life in the job's store.

A collective that fails tells a rank that *a* peer is gone, seldom which one, and a process that was killed or stopped
tells nothing at all. So each rank has a thread that writes every two seconds what the rank is doing, and a rank that
fails reads what the others wrote before it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

INTERVAL_SECONDS = 2.0
STORE_SECONDS = 10.0
ANSWER_SECONDS = 10.0
_MOST_LINES = 8


@dataclass(frozen=True)
class Sign:
    """What a rank wrote: a counter, its host and process, what it was doing, and since when its failure is known."""

    number: int
    host: str
    process: int
    doing: str
    failure: str | None = None
    failed_at: float | None = None


class Liveness:
    """Signs of life of this rank, and those of the others.

    Attributes:
        describe: what the rank is doing, if no `doing` block says so (set once training has begun).
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.describe: Callable[[], str] = lambda: "starting"
        self._store = dist.PrefixStore("megatron_acco_liveness", store)
        self._rank, self._world_size = rank, world_size
        self._number = 0
        self._doing: str | None = None
        self._failure: tuple[str, float] | None = None
        self._keeper: Sign | None = None  # of rank 0, for the time when it cannot be asked any more
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._beat, name="acco-liveness", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, rank: int, world_size: int) -> Liveness:
        """Signs of life in the store at MASTER_ADDR and MASTER_PORT, on a connection of its own."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        return cls(store, rank, world_size)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While inside, the rank is doing `what`; a failure leaves it standing for the report."""
        before, self._doing = self._doing, what
        self._news.set()  # to be written at once, but by the other thread: this one must not wait for the store
        yield
        self._doing = before
        self._news.set()

    def report(self, failure: str) -> list[str]:
        """Say that this rank has failed, and learn of the others. Takes some seconds; raises nothing.

        Args:
            failure: one line.

        Returns:
            Lines for the log: who failed first and what the others were doing then; or what every rank that gives no
            sign of life was doing last.
        """
        self._failure = (failure, time.time())
        # A store whose process is stopped takes questions and never answers, whatever its time limit.
        lines: list[str] = []
        asking = threading.Thread(target=lambda: lines.extend(self._ask()), name="acco-report", daemon=True)
        asking.start()
        asking.join(2.0 * INTERVAL_SECONDS + ANSWER_SECONDS)
        if not asking.is_alive():
            return lines
        keeper = "rank 0"
        if self._keeper is not None:
            self._end(self._keeper)
            keeper += f" on {self._keeper.host}"
        return [f"{keeper}, which keeps the signs of life, does not answer; {self._own()}"]

    def _own(self) -> str:
        return f"rank {self._rank} was {self._doing or self.describe()}"

    def _ask(self) -> list[str]:
        try:
            self._write()
            before = self._read()
            time.sleep(2.0 * INTERVAL_SECONDS)
            after = self._read()
        except Exception:
            gone = "it is gone, its host is, or the way to it"
            return [f"rank 0, which keeps the signs of life, cannot be reached: {gone}; {self._own()}"]
        return self._judge(before, after)

    def _judge(self, before: dict[int, Sign], after: dict[int, Sign]) -> list[str]:
        lines = []
        silent = [
            rank
            for rank, sign in after.items()
            if rank != self._rank and sign.failure is None and sign.number == before.get(rank, sign).number
        ]
        for rank in silent:
            lines.append(f"rank {rank} on {after[rank].host} gives no sign of life; last it was {after[rank].doing}")
            self._end(after[rank])
        failed = [(s.failed_at, r, s) for r, s in after.items() if s.failed_at is not None]
        if failed and not silent:
            _, rank, sign = min(failed, key=lambda item: item[:2])
            lines.append(f"the first to fail: rank {rank} on {sign.host}, while {sign.doing}: {sign.failure}")
            # A time limit strikes the rank that waits. Those that it waited for are at something else.
            lines += [
                f"meanwhile rank {other} on {theirs.host}: {theirs.doing}"
                for other, theirs in before.items()
                if theirs.failure is None and theirs.doing != sign.doing
            ][:_MOST_LINES]
        return lines

    @staticmethod
    def _end(sign: Sign) -> None:
        """A stopped process of this host would outlive the job: the launcher's SIGTERM does not reach it."""
        if sign.host == socket.gethostname() and sign.process != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(sign.process, signal.SIGKILL)

    def stop(self) -> None:
        """Leave no more signs. A thread that is inside the store when Python ends would abort the process."""
        self._stopped = True
        self._news.set()
        self._thread.join(STORE_SECONDS)

    def _beat(self) -> None:
        while not self._stopped and self.sign():
            self._news.wait(INTERVAL_SECONDS)
            self._news.clear()

    def sign(self) -> bool:
        """Leave a sign of life now. False if that is not possible any more."""
        try:
            self._write()
        except Exception:
            return False  # rank 0 has ended; the collectives will say so
        return True

    def _write(self) -> None:
        with self._lock:
            self._number += 1
            failure, failed_at = self._failure or (None, None)
            doing = self._doing or self.describe()
            sign = Sign(self._number, socket.gethostname(), os.getpid(), doing, failure, failed_at)
            self._store.set(str(self._rank), json.dumps(asdict(sign)))
            if self._keeper is None and self._store.check(["0"]):
                self._keeper = Sign(**json.loads(self._store.get("0")))

    def _read(self) -> dict[int, Sign]:
        with self._lock:
            known = [rank for rank in range(self._world_size) if self._store.check([str(rank)])]
            return {rank: Sign(**json.loads(self._store.get(str(rank)))) for rank in known}


current: Liveness | None = None
"""Of this process, once it has met the others."""


def start(rank: int, world_size: int) -> None:
    """Begin to leave signs of life. One rank has nobody to leave them for."""
    global current
    if world_size > 1:
        current = Liveness.connect(rank, world_size)


def doing(what: str) -> contextlib.AbstractContextManager[None]:
    """See `Liveness.doing`."""
    return contextlib.nullcontext() if current is None else current.doing(what)


def stop() -> None:
    """Leave no more signs of life: the run has ended well."""
    global current
    if current is not None:
        current.stop()
        current = None


def describe(progress: Callable[[], str]) -> None:
    """Let `progress` say what this rank is doing outside of `doing` blocks."""
    if current is not None:
        current.describe = progress
        current.sign()


def report(failure: str) -> list[str]:
    """See `Liveness.report`; nothing before the ranks have met."""
    return [] if current is None else current.report(failure)
