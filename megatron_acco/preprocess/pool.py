"""Run tasks on worker processes, results in the order of the tasks, and never more than a few in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron_acco.preprocess.inputs import Task
from megatron_acco.preprocess.work import Result, Worker

_worker: Worker | None = None


def run_tasks(worker: Worker, tasks: Iterable[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """Results in the order of the tasks.

    Args:
        worker: what runs a task; the processes are forked with it, so it is not sent to them.
        tasks: read no faster than results are taken.
        workers: number of processes; 1 runs the tasks in this one.

    Raises:
        ValueError: a worker process died.
    """
    if workers == 1:
        for task in tasks:
            yield task, worker.run(task)
        return
    # Threads of a tokenizer library in each of the workers would be more than there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    global _worker
    _worker = worker
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_start)
    waiting: deque[tuple[Task, Future[Result]]] = deque()
    try:
        # Forks all workers now, before reading starts threads in this process (pyarrow does).
        pool.submit(os.getpid).result()
        for task in tasks:
            waiting.append((task, pool.submit(_run, task)))
            if len(waiting) >= 2 * workers + 2:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died, most likely for lack of memory; use fewer --workers. What was done is kept: the "
            "same command continues"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _worker = None


def _start() -> None:
    # The parent decides what an interruption means, and its workers must not outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(task: Task) -> Result:
    assert _worker is not None
    return _worker.run(task)
