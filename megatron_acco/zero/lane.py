"""One background lane: everything of a round runs here, beside the compute of the main thread.

One worker thread and, on accelerators, one stream of its own. The main thread only submits, polls and waits. There
is never more than one piece of work outstanding, so the order of collectives is the order of submission, the same
on every rank.

    main stream   ... backward | record A |   compute of the next half      | wait B | install ...
    lane stream                 wait A  reduce-scatter  optimizer  all-gather  record B
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

T = TypeVar("T")

_EXIT_SECONDS = 30.0  # that a normal exit waits for work in the lane


class LaneTimeoutError(RuntimeError):
    """The work in the lane did not finish within the lane's time limit."""


class DeviceClock:
    """Times of work on the device, without waiting for it: marks are made in passing and read when it is done.

    On a CPU, where work is done when the call returns, a mark is a reading of `time.perf_counter`; on accelerators it
    is an event on the current stream.
    """

    def __init__(self) -> None:
        self._events = not get_accelerator().is_synchronized_device()

    def mark(self) -> Any:
        """This point of the current stream."""
        if not self._events:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record(get_accelerator().current_stream())
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds from `first` to `last`, both of which the device has passed."""
        if not self._events:
            return float(last - first)
        return float(first.elapsed_time(last)) / 1000.0

    def wait(self, mark: Any) -> None:
        """Block until the device has passed `mark`."""
        if self._events:
            mark.synchronize()


class Ticket(Generic[T]):
    """Handle of the one piece of work in the lane."""

    def __init__(self, label: str, limit: timedelta) -> None:
        self.label = label
        self._limit = limit
        self._future: Future[T] = Future()
        self._done_event: Any = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> T:
        """Block until the work is finished and order the current stream after it.

        Raises:
            LaneTimeoutError: the time limit passed.
            BaseException: whatever the work raised, with its original traceback.
        """
        try:
            result = self._future.result(self._limit.total_seconds())
        except FutureTimeoutError as error:
            if self._future.done():  # the work itself raised a TimeoutError
                raise
            raise LaneTimeoutError(f"{self.label} did not finish within {self._limit}") from error
        if self._done_event is not None:
            get_accelerator().current_stream().wait_event(self._done_event)
        return result


class Lane:
    """A worker thread with at most one outstanding piece of work.

    Attributes:
        before_round: called in the lane with the label before each piece of work (tests inject delays and failures).
    """

    def __init__(self, name: str, limit: timedelta) -> None:
        self.before_round: Callable[[str], None] | None = None
        self._limit = limit
        self._outstanding: Ticket[Any] | None = None
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[tuple[Ticket[Any], Callable[[], Any], Any] | None] = queue.SimpleQueue()
        accelerator = get_accelerator()
        self._stream = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._device_index = None if self._stream is None else accelerator.current_device()
        # A daemon: if a peer died inside a collective, this process must still be able to exit.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        # A thread that comes back from a collective after Python's end aborts the process.
        atexit.register(self._finish)

    def submit(self, label: str, work: Callable[[], T]) -> Ticket[T]:
        """Start `work` behind everything that the current stream has been given so far.

        Raises:
            BaseException: the failure of earlier work; a lane that failed once takes nothing more.
        """
        if self._failure is not None:
            raise self._failure
        assert self._outstanding is None or self._outstanding.done(), "one outstanding piece of work per lane"
        ticket: Ticket[T] = Ticket(label, self._limit)
        ready = None
        if self._stream is not None:
            ready = get_accelerator().Event()
            ready.record(get_accelerator().current_stream())
        self._outstanding = ticket
        self._queue.put((ticket, work, ready))
        return ticket

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding."""
        return self._outstanding is None or self._outstanding.done()

    @property
    def outstanding_label(self) -> str | None:
        """What the lane is working on."""
        ticket = self._outstanding
        return None if ticket is None or ticket.done() else ticket.label

    @property
    def failed(self) -> bool:
        """Whether work in the lane has raised."""
        return self._failure is not None

    def poll(self) -> None:
        """Raise the failure of the lane, if it has failed."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let the thread end after the outstanding work; does not wait for it."""
        self._queue.put(None)

    def _finish(self) -> None:
        self.close()
        self._thread.join(_EXIT_SECONDS)

    def _serve(self) -> None:
        if self._device_index is not None:
            get_accelerator().set_device(self._device_index)
        while (item := self._queue.get()) is not None:
            self._serve_one(*item)
            del item  # while it waits, the thread must not keep the tensors of its last work
        atexit.unregister(self._finish)

    def _serve_one(self, ticket: Ticket[T], work: Callable[[], T], ready: Any) -> None:
        try:
            if self.before_round is not None:
                self.before_round(ticket.label)
            result = self._run(ticket, work, ready)
        except BaseException as error:  # carried to the main thread, whatever it is
            error.add_note(f"raised in the ACCO lane during {ticket.label}")
            self._failure = error
            ticket._future.set_exception(error)
        else:
            ticket._future.set_result(result)

    def _run(self, ticket: Ticket[T], work: Callable[[], T], ready: Any) -> T:
        with torch.no_grad():
            if self._stream is None:
                return work()
            with get_accelerator().stream(self._stream):
                self._stream.wait_event(ready)
                result = work()
                ticket._done_event = get_accelerator().Event()
                ticket._done_event.record(self._stream)
                # Only this thread waits: the times that the round reports are those of the device.
                self._stream.synchronize()
                return result
