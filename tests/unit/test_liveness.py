"""Signs of life when the rank that keeps them is stopped (CASES B43)."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_acco.training import liveness
from megatron_acco.training.liveness import Liveness

pytestmark = pytest.mark.alone


def store(port: int, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, timeout=timedelta(seconds=10), wait_for_workers=False)


def test_a_report_ends_in_time_if_rank_0_is_stopped_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keeper = os.fork()
    if keeper == 0:  # rank 0, whose process answers for the store
        try:
            Liveness(store(port, is_master=True), 0, 2)
            time.sleep(60.0)
        finally:
            os._exit(0)
    try:
        own = Liveness(store(port, is_master=False), 1, 2)
        own.describe = lambda: "training"
        limit = time.monotonic() + 30.0
        while own._keeper is None:
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.kill(keeper, signal.SIGSTOP)
        started = time.monotonic()
        assert own.report("a peer is gone") == [
            f"rank 0 on {socket.gethostname()}, which keeps the signs of life, does not answer; rank 1 was training"
        ]
        assert time.monotonic() - started < 10.0
        assert os.waitpid(keeper, 0)[1] == signal.SIGKILL
        keeper = 0
    finally:
        if keeper:
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)


def test_no_thread_is_left_in_the_store_when_the_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends its daemon threads by unwinding them, which from inside C++ aborts the process."""
    monkeypatch.setattr(liveness, "INTERVAL_SECONDS", 0.0)
    own = Liveness(store(0, is_master=True), 0, 1)
    own.stop()
    assert not own._thread.is_alive()
    left = own._number
    time.sleep(0.1)
    assert own._number == left
