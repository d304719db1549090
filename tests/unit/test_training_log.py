"""metrics.jsonl over restarts, the log line, the clock, the vote on stopping, and the folder lock.

Covers CASES B45 (two jobs on one folder) and the resumed log.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron_acco.training import metrics
from megatron_acco.training.checkpoint import lock_folder, random_state, set_random_state, store
from megatron_acco.training.control import Saving, Stop, StopVote, Verdict
from megatron_acco.training.metrics import IterationRecord, MetricsFile, Stopwatch


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resumed_metrics_drop_what_will_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path, None)
    for iteration in range(1, 6):
        first.append("train", {"iteration": iteration})
    first.close()
    with open(path, "a") as file:
        file.write('{"kind": "train", "itera')  # cut off by a crash
    second = MetricsFile(path, 3)
    second.append("train", {"iteration": 4})
    second.close()
    assert [record["iteration"] for record in lines(path)] == [1, 2, 3, 4]


def test_a_fresh_run_keeps_the_metrics_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for iteration in (1, 2, 3):
        file = MetricsFile(path, None)
        file.append("train", {"iteration": iteration})
        file.close()
    assert [lines(tmp_path / f"metrics.jsonl{end}")[0]["iteration"] for end in ("", ".1", ".2")] == [3, 1, 2]


def test_a_disk_that_takes_no_more_delays_records_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = MetricsFile(tmp_path / "m", None)
    file.append("train", {"iteration": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "m").stat().st_size + 7, limits[1]))
    try:
        for iteration in (2, 3):
            file.append("train", {"iteration": iteration})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.count("m cannot be written, its records wait in memory: [Errno 27]") == 1
    file.append("train", {"iteration": 4})
    file.close()
    assert [record["iteration"] for record in lines(tmp_path / "m")] == [1, 2, 3, 4]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m", None)
    file.append("train", {"lm_loss": float("nan"), "grad_norm": float("inf"), "iteration": 1})
    file.close()
    assert lines(tmp_path / "m") == [{"kind": "train", "lm_loss": None, "grad_norm": None, "iteration": 1}]


def test_the_line_leaves_out_the_lane_where_no_round_ran() -> None:
    record = IterationRecord(3, 24, 768, 1.0, 250.0, 1e-3, 8, lm_loss=4.5, grad_norm=1.25, tokens_per_second=1024.0)
    line = record.line(20)
    assert "lm loss: 4.500000E+00 | grad norm: 1.250" in line and "hidden" not in line
    record.communication_ms_per_round, record.communication_hidden_percent = 12.0, 98.75
    assert "exposed wait per round (ms): n/a | communication hidden (%): 98.8" in record.line(20)


def test_the_clock_leaves_pauses_out_and_goes_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = Stopwatch(100.0)
    for action, seconds in ((clock.resume, 2.0), (clock.pause, 30.0), (clock.resume, 5.0)):
        action()
        now[0] += seconds
    assert clock.lap() == 7.0 and clock.seconds() == 107.0
    now[0] += 1.0
    assert clock.lap() == 1.0 and clock.seconds() == 108.0


@pytest.fixture
def control() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_acted_on_one_update_later_and_handlers_are_put_back(
    control: dist.ProcessGroup, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    vote = StopVote(control, None)
    with vote.listening():
        assert vote.exchange().stop is Stop.NO
        for _ in range(1 if number is signal.SIGINT else 2):  # the launcher may send it twice
            os.kill(os.getpid(), number)
        assert vote.exchange().stop is Stop.NO
        assert vote.exchange().stop is Stop.SIGNAL
        assert vote.finish().stop is Stop.SIGNAL and vote.finish() == Verdict()
    assert signal.getsignal(number) is before


def test_a_verdict_says_which_checkpoint_its_votes_were_about(control: dist.ProcessGroup) -> None:
    vote = StopVote(control, None)
    vote.exchange()
    assert vote.exchange(Saving.WRITING, 5) == Verdict()
    assert vote.exchange(Saving.WRITTEN, 5) == Verdict(Stop.NO, Saving.WRITING, 5)
    assert vote.exchange(Saving.FAILED, 6) == Verdict(Stop.NO, Saving.WRITTEN, 5)
    assert vote.finish() == Verdict(Stop.NO, Saving.FAILED, 6)


def test_a_launcher_that_died_before_training_began_is_missed(control: dist.ProcessGroup) -> None:
    alive = [process.pid for process in psutil.Process().parents()[:2]]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for launcher, stop in (((), Stop.NO), (alive, Stop.NO), ([gone.pid, *alive[1:]], Stop.SIGNAL)):
        vote = StopVote(control, None, launcher)
        vote.exchange()
        assert vote.finish().stop is stop


def test_a_shell_is_no_launcher() -> None:
    code = "import sys; sys.argv = ['']; import runpy; print(runpy.run_path('pretrain_gpt_acco.py')['find_launcher']())"
    script = f'"{sys.executable}" -c "{code}"; true'
    root = Path(__file__).parents[2]
    assert subprocess.run(["sh", "-c", script], cwd=root, capture_output=True, text=True).stdout == "[]\n"


def test_a_second_interrupt_stops_at_once(control: dist.ProcessGroup) -> None:
    vote = StopVote(control, None)
    with vote.listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


def test_time_that_is_up_stops(control: dist.ProcessGroup) -> None:
    vote = StopVote(control, 1e-6)
    time.sleep(0.01)
    assert tuple(v.stop for v in (vote.exchange(), vote.exchange(), vote.finish())) == (
        Stop.NO,
        Stop.DURATION,
        Stop.DURATION,
    )


def test_the_time_counts_from_the_start_of_the_program(control: dist.ProcessGroup) -> None:
    running = (time.time() - psutil.Process().create_time()) / 60.0
    for minutes, stop in ((0.5 * running, Stop.DURATION), (running + 10.0, Stop.NO)):
        vote = StopVote(control, minutes)
        vote.exchange()
        assert vote.finish().stop is stop


def test_two_jobs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="another job is writing to"):
        lock_folder(tmp_path / "run")
    lock.close()
    lock_folder(tmp_path / "run").close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to"):
        lock_folder(tmp_path / "file" / "run")


def test_latest_is_replaced_in_one_step(tmp_path: Path) -> None:
    for tag in ("global_step1", "global_step2"):
        store.move_latest(tmp_path, store.stage_latest(tmp_path, tag, "job"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "global_step2")]


def test_random_generators_go_on_where_they_were() -> None:
    import random

    import numpy
    import torch

    state = random_state()
    drawn = [(random.random(), numpy.random.rand(), torch.rand(()).item()) for _ in range(2)]
    set_random_state(state)
    assert [(random.random(), numpy.random.rand(), torch.rand(()).item()) for _ in range(2)] == drawn
