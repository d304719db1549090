"""A failure on one rank ends all ranks, in time, and names itself (CASES B43, B24, B46)."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_pretrain import (
    command,
    data,  # noqa: F401 (a fixture)
    jobs,  # noqa: F401 (a fixture)
    write_json,
)

pytestmark = pytest.mark.alone

LIMIT_SECONDS = 9.0
GRACE_SECONDS = 30.0


def faulty(words: list[str], fault: str, rank: int, call: int, limit_seconds: float = LIMIT_SECONDS) -> list[str]:
    """The launch with faulty_run.py in the place of pretrain_gpt_acco.py."""
    script = str(Path(__file__).with_name("faulty_run.py"))
    place = words.index("pretrain_gpt_acco.py")
    limit = ["--distributed-timeout-minutes", str(limit_seconds / 60.0), "--train-iters", "5000"]
    return [*words[:place], script, fault, str(rank), str(call), *words[place + 1 :], *limit]


def end_of(job: Any) -> tuple[int, str, float]:
    """Exit code, log, and seconds since the last line of training; asserts that nothing is left."""
    job.wait_for("iteration        3/")
    port = int(re.search(r"--master_port[= ](\d+)", job.log.read_text()).group(1))
    ranks, last, seen = job.ranks(), "", time.monotonic()
    while job.process.poll() is None:
        lines = [line for line in job.log.read_text().splitlines() if line.startswith(" iteration")]
        if lines[-1] != last:
            last, seen = lines[-1], time.monotonic()
        assert time.monotonic() - seen < LIMIT_SECONDS + 2 * GRACE_SECONDS, job.log.read_text()[-4000:]
        time.sleep(0.1)
    seconds = time.monotonic() - seen
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
    return job.process.returncode, job.log.read_text(), seconds


@pytest.mark.slow
def test_an_exception_in_the_lane_of_one_rank_ends_the_job_with_its_traceback(
    data: Path,  # noqa: F811
    tmp_path: Path,
    jobs: Any,  # noqa: F811
) -> None:
    words = command(data, write_json(tmp_path, "acco"))
    code, log, seconds = end_of(jobs(faulty(words, "raise", 1, 24)))
    assert code != 0 and seconds < GRACE_SECONDS
    assert "[rank 1] ArithmeticError: a fault in the lane" in log and "reduce_scatter" in log
    assert re.search(r"raised in the ACCO lane during the \w+ round of update 5 on rank 1", log)
    assert re.search(r"the first to fail: rank 1 on \S+, while .*update \d: ", log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fault", "rank", "seconds", "named"),
    [
        pytest.param(
            "acco", "kill", 1, GRACE_SECONDS,
            r"\[rank 0\] rank 1 on \S+ gives no sign of life; last it was computing micro-batch",
            id="killed in a round",
        ),
        pytest.param(
            "dpu", "kill", 0, GRACE_SECONDS,
            r"\[rank 1\] rank 0, which keeps the signs of life, cannot be reached",
            id="rank 0 killed",
        ),
        pytest.param(
            "acco", "stop", 1, LIMIT_SECONDS + GRACE_SECONDS,
            r"\[rank 0\] rank 1 on \S+ gives no sign of life",
            id="stopped",
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_gone_is_named_and_ends_the_job_in_time(
    data: Path,  # noqa: F811
    tmp_path: Path,
    jobs: Any,  # noqa: F811
    mode: str,
    fault: str,
    rank: int,
    seconds: float,
    named: str,
) -> None:
    code, log, took = end_of(jobs(faulty(command(data, write_json(tmp_path, mode)), fault, rank, 24)))
    assert code != 0 and took < seconds
    assert re.search(named, log)


@pytest.mark.slow
def test_a_rank_that_is_slow_to_set_up_meets_one_limit_and_is_named_with_its_stage(
    data: Path,  # noqa: F811
    tmp_path: Path,
    jobs: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B46, scaled down: 2 of 5 seconds late at the meeting is early enough; then rank 0 does not get on at all."""
    monkeypatch.setenv("MEGATRON_ACCO_FOLDER", str(tmp_path))
    words = command(data, write_json(tmp_path, "acco"), "--save", str(tmp_path / "run"))
    job = jobs(faulty(words, "slow", 0, 2, limit_seconds=5.0))
    job.wait_for("groups with the limits")
    ranks, started = job.ranks(), time.monotonic()
    assert job.end() != 0 and time.monotonic() - started < 5.0 + GRACE_SECONDS
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    log = job.log.read_text()
    (limits,) = re.findall(r"(\d+) groups with the limits (\{.*\})", log)
    assert int(limits[0]) > 4 and limits[1] == "{5.0}"
    assert re.search(r"\[rank 1\] the first to fail: rank 1 on \S+, while opening the --save folder: .*5000ms", log)
    assert re.search(r"\[rank 1\] meanwhile rank 0 on \S+: building the engine", log)
