"""pretrain_gpt_acco.py on two hosts, of which one is lost: its rank is killed, or its link is cut (CASES B43)."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, Job, stop, why_not
from tests.integration.test_pretrain import (
    ROOT,
    TIME_LIMIT,
    command,
    data,  # noqa: F401 (a fixture)
    directly,
    environment,
    write_json,
)

pytestmark = pytest.mark.alone

CUT_SECONDS = 2.0  # shown as well: 5 seconds and a limit of 12 (docs/RELIABILITY.md)
LIMIT_SECONDS = 6.0
GRACE_SECONDS = 30.0
REASON = why_not(ssh=False)


def losses(job: Job) -> list[str]:
    """Loss of every update so far, as printed."""
    return re.findall(r"^ iteration +\d+/.* lm loss: (\S+)", job.output(0), re.MULTILINE)


def train_until(job: Job, updates: int) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while len(losses(job)) < updates:
        assert all(process.poll() is None for process in job.processes), job.output(0) + job.output(1)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_the_end(cluster: Cluster, job: Job, seconds: float) -> None:
    """Every process ends by itself within `seconds`; none is left on a host, nor its port held."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in job.processes):
        assert time.monotonic() < deadline, job.output(0) + job.output(1)
        time.sleep(0.05)
    assert all(process.returncode != 0 for process in job.processes)
    for host in range(2):
        assert cluster.run(host, ["pgrep", "-fc", "pretrain_gpt_acco.py"]).stdout == "0\n"
        assert cluster.run(host, ["ss", "-Htln"], check=True).stdout == ""


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no cluster in a box: {REASON}")
def test_a_rank_killed_on_another_host_and_a_cut_link_end_the_job_and_a_short_cut_changes_nothing(
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    limit = ["--distributed-timeout-minutes", str(LIMIT_SECONDS / 60.0)]
    words = directly(
        command(data, write_json(tmp_path, "acco"), "--train-iters", "5000", "--eval-interval", "5000", *limit)
    )
    with Cluster(hosts=2, rate="100mbit", ssh=False) as cluster:
        undisturbed = cluster.launch(words, environment(), ROOT, capture=True)
        train_until(undisturbed, 30)
        stop(undisturbed.processes[1], signal.SIGKILL)
        wait_for_the_end(cluster, undisturbed, GRACE_SECONDS)
        assert "[rank 0] rank 1 on host1 gives no sign of life; last it was computing" in undisturbed.output(0)

        job = cluster.launch(words, environment(), ROOT, capture=True)
        train_until(job, 3)
        cluster.cut(1)
        time.sleep(0.5)
        at_cut = losses(job)
        time.sleep(CUT_SECONDS - 0.5)
        assert losses(job) == at_cut and len(at_cut) < 20, "a cut link lets nothing through"
        cluster.restore(1)
        train_until(job, 30)
        assert losses(job)[:30] == losses(undisturbed)[:30]

        cluster.cut(1)
        wait_for_the_end(cluster, job, LIMIT_SECONDS + GRACE_SECONDS)
        # The lane's own limit and that of a collective in it are the same: either may be the first to pass.
        passed = (
            rf"Timed out waiting {LIMIT_SECONDS * 1000:.0f}ms|did not finish within {timedelta(seconds=LIMIT_SECONDS)}"
        )
        assert all(re.search(passed, job.output(rank)) for rank in range(2))
        assert "[rank 0] rank 1 on host1 gives no sign of life; last it was computing micro-batch" in job.output(0)
        gone = r"\[rank 1\] rank 0.*, which keeps the signs of life, .*; rank 1 was computing micro-batch"
        assert re.search(gone, job.output(1))
