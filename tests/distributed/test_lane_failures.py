"""A failure in the lane fails the run: on its own rank with the original traceback, elsewhere without a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from tests.distributed.harness import RankFailure, RankPool
from tests.distributed.training import Run, batch, one_update, running, train

pytestmark = pytest.mark.alone


class BrokenCableError(RuntimeError):
    """What the tests raise in the lane."""


def cut_cable(label: str) -> None:
    raise BrokenCableError(f"no carrier, {label}")


def fail_everywhere(run: Run, when: str) -> tuple[str, float]:
    """Job: the second round fails on every rank; what the main thread sees, and at which call."""
    import traceback

    import megatron_acco

    rank = torch.distributed.get_rank()
    with running(run) as (engine, zero):
        one_update(engine, 0)
        megatron_acco.drain(engine)
        zero.lane.before_round = cut_cable
        try:
            for micro in range(run.gas):
                engine.backward(engine(*batch(1, rank, micro)))
                engine.step()
            if when == "drain":
                megatron_acco.drain(engine)
            elif when == "real_parameters":
                with megatron_acco.real_parameters(engine):
                    pass
            elif when == "next_update":
                one_update(engine, 2)
        except BrokenCableError:
            text = traceback.format_exc()
        else:
            raise AssertionError("the failure of the lane was swallowed")
        # And it stays a failure: nothing goes on as if nothing had been.
        try:
            one_update(engine, 3)
            megatron_acco.drain(engine)
        except Exception:
            return text
        raise AssertionError("training went on after a failure of the lane")


@pytest.mark.parametrize(("mode", "when"), [("acco", "next_update"), ("dpu", "drain"), ("dpu", "real_parameters")])
def test_lane_exception_reaches_main_with_its_traceback(doomed: RankPool, mode: str, when: str) -> None:
    for rank, text in enumerate(doomed.run(fail_everywhere, Run(mode), when)):
        assert "cut_cable" in text, "the original traceback"
        assert "no carrier" in text
        assert f"rank {rank}" in text and "update 1" in text, "B24: named with rank and round"


def fail_on_rank_1(run: Run) -> Any:
    """Job: the lane of rank 1 fails in update 1, its process ends; the time that this rank took to notice."""
    start = time.monotonic()
    rank = torch.distributed.get_rank()
    try:
        with running(run) as (engine, zero):
            one_update(engine, 0)
            if rank == 1:
                zero.lane.before_round = cut_cable
            for update in range(1, 5):
                one_update(engine, update)
    except BaseException:
        if rank == 1:
            os._exit(1)  # as a process does that does not catch the exception
        raise
    return time.monotonic() - start


@pytest.mark.parametrize("mode", ["acco", "dpu", "sync"])
def test_lane_failure_of_one_rank_ends_the_others(doomed: RankPool, mode: str) -> None:
    answers = doomed.run_each(fail_on_rank_1, Run(mode), timeout=60.0)
    assert answers[1] == ("error", "the process ended without an answer")
    state, text = answers[0]
    assert state == "error", f"rank 0: {state} {text}"
    assert "Connection" in text or "gloo" in text.lower(), text


def lane_threads() -> list[str]:
    import threading

    return [thread.name for thread in threading.enumerate() if "lane" in thread.name]


def threads_after_destroy(run: Run) -> tuple[list[str], list[str]]:
    """Job: lane threads while an engine lives and after it was destroyed."""
    before = set(lane_threads())
    with running(run) as (engine, _):
        one_update(engine, 0)
        alive = lane_threads()
    for _ in range(50):
        if set(lane_threads()) <= before:
            break
        time.sleep(0.1)
    return alive, [name for name in lane_threads() if name not in before]


def test_destroy_ends_the_lane(ranks) -> None:
    for alive, left in ranks(2).run(threads_after_destroy, Run("acco")):
        assert alive and not left


# A training script that is at its end while a round is in flight: its thread comes back from C++ again and again.
AT_THE_END = """
import time
from datetime import timedelta
import torch.distributed as dist
from megatron_acco.zero.lane import Lane

store = dist.TCPStore("127.0.0.1", 0, is_master=True)

def work():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        store.set("key", "value")
    print("done", flush=True)

Lane("acco-lane", timedelta(seconds=60)).submit("a round", work)
"""


def test_a_script_may_end_with_a_round_in_flight() -> None:
    """Python ends its daemon threads by unwinding them, which from inside C++ aborts the process."""
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=60.0)
    assert ended.returncode == 0 and ended.stdout.endswith("done\n"), ended.stderr


def test_harness_reports_hangs_and_errors(doomed: RankPool) -> None:
    """The harness itself: a rank that hangs is a failure that names it."""
    with pytest.raises(RankFailure, match=r"no answer within 1\.0 s") as failure:
        doomed.run(hang_on_rank_1, timeout=1.0)
    assert list(failure.value.errors) == [1]
    assert all(doomed.run(train, Run("sync", updates=1))), "a new pool after a failure"


def hang_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        time.sleep(30.0)
