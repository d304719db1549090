"""Pools of real gloo ranks that many tests share.

Start-up of a rank costs seconds (importing DeepSpeed), a tiny training job costs tenths. So there is one pool of
processes per world size: they join one process group, then wait for jobs. A job is a function at module level of a
test module (it travels by name), called on every rank with the same arguments; its return values come back in rank
order. An exception on any rank, or a job that is not done in its time limit (a hang), fails the test with the
traceback of every rank; the pool is then thrown away, because its process group may be in any state.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# A hang is a failure. A machine that is busy with other things may need more patience.
JOB_SECONDS = float(os.environ.get("MEGATRON_ACCO_TEST_JOB_SECONDS", "60"))
START_SECONDS = 300.0

_context = multiprocessing.get_context("forkserver")
# The server imports these once; each rank is a fork of it, made before any thread or process group exists.
_PRELOAD = ["torch", "torch._dynamo", "torch._inductor", "deepspeed", "deepspeed.module_inject.auto_ep_layer"]
_PRELOAD += ["tests.distributed.preload"]
_context.set_forkserver_preload(_PRELOAD)


class RankFailure(AssertionError):
    """A job failed or hung on some rank. `errors` maps ranks to their tracebacks."""

    def __init__(self, message: str, errors: dict[int, str]):
        super().__init__("\n\n".join([message, *(f"--- rank {r} ---\n{text}" for r, text in sorted(errors.items()))]))
        self.errors = errors


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankPool:
    """`world_size` processes in one gloo process group, waiting for jobs."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = JOB_SECONDS, **kwargs: Any) -> list[Any]:
        """Call `job(*args, **kwargs)` on every rank; the results in rank order.

        Raises:
            RankFailure: if the job raises or does not return within `timeout` seconds on some rank.
        """
        results = self.run_each(job, *args, timeout=timeout, **kwargs)
        errors = {rank: text for rank, (state, text) in enumerate(results) if state != "ok"}
        if errors:
            raise RankFailure(f"{job.__module__}.{job.__name__} failed on ranks {sorted(errors)}", errors)
        return [value for _, value in results]

    def run_each(self, job: Callable[..., Any], *args: Any, timeout: float = JOB_SECONDS, **kwargs: Any) -> list[Any]:
        """As `run`, but errors are results too: per rank ("ok", value), ("error", traceback) or ("hang", message)."""
        self._start()
        for pipe in self._pipes:
            pipe.send((job, args, kwargs))
        results = self._collect(timeout, grace=5.0)
        if any(state != "ok" for state, _ in results):
            self.close()
        return results

    def _start(self) -> None:
        if self._processes:
            return
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_rank_main, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        results = self._collect(START_SECONDS)
        errors = {rank: text for rank, (state, text) in enumerate(results) if state != "ok"}
        if errors:
            self.close()
            raise RankFailure(f"{self.world_size} ranks did not start", errors)

    def _collect(self, timeout: float, grace: float | None = None) -> list[tuple[str, Any]]:
        """One answer per rank. After a first error the others get `grace` seconds, unless the limit is nearer."""
        results: list[tuple[str, Any]] = [("hang", f"no answer within {timeout} s")] * self.world_size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = ("error", "the process ended without an answer")
                if results[rank][0] != "ok" and grace is not None:
                    deadline = min(deadline, time.monotonic() + max(grace, 0.25 * timeout))
        return results

    def close(self) -> None:
        """End the processes: by asking, then by force."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def load_kernels() -> None:
    """Job: compile DeepSpeed's Adam kernels (a no-op once they are cached)."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    FusedAdamBuilder().load()
    CPUAdamBuilder().load()


def _rank_main(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """Body of one rank: join the process group, answer jobs until None arrives."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        import logging

        import torch

        torch.set_num_threads(1)
        import deepspeed

        from megatron_acco.shared_memory import release_shared_memory

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="gloo")
        release_shared_memory()
        pipe.send(("ok", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        return
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if message is None:
            break
        job, args, kwargs = message
        try:
            answer = ("ok", job(*args, **kwargs))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)
    # No orderly shutdown of the process group: a failed peer would make it wait.
    os._exit(0)
