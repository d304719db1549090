"""quickstart.sh: arguments, and a whole small run: interrupted, continued, started once more.

The run uses the real launcher with two ranks. It is short in updates only; corpus, tokenizer and model are those that
a user gets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 300.0


def environment() -> dict[str, str]:
    """With the interpreter of this test run in front, where its `deepspeed` command is too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": sys.executable}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "adamw"], "invalid choice: 'adamw' (choose from"),
        (["--updates", "0"], "must be a whole number from 1 to 1000000, got '0'"),
        (["--updates", "2.5"], "got '2.5'"),
        (["--updates"], "expected one argument"),
        (["--update", "3"], "unrecognized arguments: --update 3"),
        (["now"], "unrecognized arguments: now"),
        (["--out", "README.md/run"], "README.md is a file"),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bad_arguments_are_refused_before_anything_is_done(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    result = subprocess.run(
        ["bash", str(ROOT / "quickstart.sh"), *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


class Quickstart:
    """A started quickstart whose output goes to a file."""

    def __init__(self, out: Path, log: Path, *arguments: str) -> None:
        self.out = out
        self.log = log
        command = [sys.executable, str(ROOT / "scripts" / "quickstart.py"), *arguments, "--out", str(out)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; fails when the process ends or the time is up before that."""
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)

    def finish(self) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(TIME_LIMIT)

    def left_processes(self) -> list[list[str]]:
        """Command lines of processes that work in the run's folder."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if process.pid != os.getpid() and any(str(self.out) in word for word in words):
                found.append(words)
        return found

    def left_shared_memory(self) -> list[Path]:
        """Buffers of DeepSpeed's CPU communication op that belong to the run's launcher."""
        port = re.search(r"--master_port (\d+)", self.text())
        return [] if port is None else list(Path("/dev/shm").glob(f"deepspeed_*_{port.group(1)}_*"))

    def kill(self) -> None:
        """End it and all it started, for a test that failed."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            for process in [*children, self.process]:
                process.kill()
            self.process.wait()


def saved_updates(out: Path) -> int:
    """Number of updates in the newest checkpoint."""
    return int((out / "acco" / "checkpoints" / "latest").read_text().removeprefix("global_step"))


@pytest.mark.slow
def test_a_run_is_interrupted_continued_and_started_once_more(tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs: list[Quickstart] = []

    def start(*arguments: str) -> Quickstart:
        runs.append(Quickstart(out, tmp_path / f"output-{len(runs)}", *arguments))
        return runs[-1]

    try:
        # Ctrl-C while it makes the corpus.
        first = start("--updates", "400")
        first.wait_for(lambda: "sources:" in first.text())
        first.process.send_signal(signal.SIGINT)
        assert first.finish() == 130, first.text()
        assert "nothing was saved yet" in first.text()
        assert not first.left_processes()
        assert not (out / "corpus").exists() and not list(out.glob(".corpus.tmp-*"))

        # Ctrl-C in the middle of training.
        second = start("--updates", "400")
        second.wait_for(lambda: "training loss" in second.text())
        second.process.send_signal(signal.SIGINT)
        assert second.finish() == 130, second.text()
        assert not second.left_processes() and not second.left_shared_memory()
        saved = saved_updates(out)
        assert f"{saved} updates are saved" in second.text() and 1 <= saved < 400

        # The same folder again, to an end that is near.
        updates = saved + 3
        third = start("--updates", str(updates))
        assert third.finish() == 0, third.text() + (out / "acco" / "train.log").read_text()[-4000:]
        assert not third.left_processes() and not third.left_shared_memory()
        assert "reusing the corpus" in third.text() and f"from update {saved}" in third.text()
        check_results(out / "acco", updates)
        for name in (f"global_step{updates}", "metrics.jsonl", "loss.png", "sample.txt"):
            assert name in third.text()

        # Nothing is left to do: the results are shown again.
        started = time.monotonic()
        last = start("--updates", str(updates))
        assert last.finish() == 0, last.text()
        assert f"done before, {updates} updates" in last.text() and time.monotonic() - started < 120
        assert (out / "acco" / "sample.txt").read_text().splitlines()[0] in last.text()
    finally:
        for run in runs:
            run.kill()


def check_results(run: Path, updates: int) -> None:
    """Checkpoint, metrics, plot and sample of a finished run."""
    assert (run / "checkpoints" / "latest").read_text() == f"global_step{updates}"
    assert [path.name for path in run.glob("checkpoints/global_step*")] == [f"global_step{updates}"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [record["iteration"] for record in records if record["kind"] == "train"]
    assert logged == sorted(set(logged)), "a continued run repeats no record"
    losses = [record["lm_loss"] for record in records if record["kind"] == "validation"]
    assert records[-1]["iteration"] == updates and losses[-1] < 8.0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (run / "sample.txt").read_text().startswith("def")
