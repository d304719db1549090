"""The parts of the quickstart that need no training: child processes, the launcher's command line, progress."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of scripts/ by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


PARENT = """
import os, sys
from pathlib import Path
import children
children.raise_on_signals()
child = "import os, signal, subprocess, sys, time\\n"
child += sys.argv[1] + "\\n"
child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'GRANDCHILD'])\\n"
child += "print('ready', flush=True); time.sleep(600)"
try:
    children.run([sys.executable, "-c", child, "CHILD"], environment=os.environ, cwd=Path.cwd(), grace_seconds=1.0)
except children.Interrupted as error:
    print("interrupted by", error, flush=True)
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("child", ["pass", "signal.signal(signal.SIGINT, signal.SIG_IGN)"], ids=["obeys", "stubborn"])
def test_a_signal_ends_the_child_and_its_children(number: signal.Signals, child: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 2
        parent.send_signal(number)
        assert parent.wait(20) == 130
        assert f"interrupted by {number.name}" in parent.stdout.read()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    finally:
        parent.kill()


def test_the_exit_code_comes_back_and_nothing_stays_behind(scripts: Any, tmp_path: Path) -> None:
    children = scripts("children")
    background = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with (tmp_path / "out").open("w+b") as output:
        code = children.run(
            [sys.executable, "-c", f"{background}; print(p.pid, flush=True); sys.exit(7)"],
            environment=os.environ,
            cwd=tmp_path,
            output=output,
        )
    assert code == 7
    pid = int((tmp_path / "out").read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4), (72, 4)])
def test_every_rank_gets_at_least_two_micro_batches(scripts: Any, devices: int, ranks: int) -> None:
    quickstart = scripts("quickstart")
    assert quickstart._ranks_for(devices) == ranks
    assert quickstart.GLOBAL_BATCH % (quickstart.MICRO_BATCH * ranks) == 0


@pytest.mark.parametrize("method", ["acco", "zero1", "dpu", "wp"])
@pytest.mark.parametrize("updates", [1, 2, 240])
def test_methods_differ_by_their_json_and_all_arguments_are_known(
    scripts: Any, method: str, updates: int, tmp_path: Path
) -> None:
    from megatron_acco.training.arguments import parse_arguments
    from megatron_acco.training.schedule import resolve_schedule

    quickstart = scripts("quickstart")
    run = quickstart.RunFolder(tmp_path / method)
    for saved in (0, 1):
        command = quickstart.training_command(method, updates, run, tmp_path / "corpus", 2, saved)
        script = command.index(str(ROOT / "pretrain_gpt_acco.py"))
        assert command[:3] == ["deepspeed", "--num_gpus", "2"] and script < 9
        arguments = parse_arguments(command[script + 1 :])
        assert Path(arguments.run.deepspeed_config) == ROOT / "deepspeed_configs" / f"{method}.json"
        assert (arguments.checkpoint.load is not None) == bool(saved)
        resolve_schedule(arguments.optimizer, updates * quickstart.GLOBAL_BATCH, quickstart.GLOBAL_BATCH)


def test_the_shown_command_can_be_pasted(scripts: Any, tmp_path: Path) -> None:
    quickstart = scripts("quickstart")
    run = quickstart.RunFolder(tmp_path / "a folder with spaces")
    command = quickstart.training_command("acco", 240, run, tmp_path / "corpus", 2, 1)
    shown = quickstart._folded(command)
    assert shlex.split(shown.replace("\\\n", " ")) == command
    assert "--lr 0.002" in shown and "\n" in shown


def test_progress_shows_every_record_once(scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = scripts("progress")
    path = tmp_path / "metrics.jsonl"
    view = progress.Progress(path, updates=20, start=5)
    view.show_new()
    assert not capsys.readouterr().out

    common = {"tokens_per_second": 6500.0, "elapsed_ms_per_iteration": 2000.0}
    old = {"kind": "train", "iteration": 5, "lm_loss": 8.0, **common}
    new = {"kind": "train", "iteration": 10, "lm_loss": 7.5, "communication_hidden_percent": 98.6, **common}
    check = {"kind": "validation", "iteration": 10, "lm_loss": 7.4}
    path.write_text("\n".join(map(json.dumps, (old, new, check))) + "\n" + json.dumps(new)[:20])
    view.show_new()
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "update 10/20 training loss 7.500 6,500 tokens/s 99 % of communication hidden 20 s left",
        "update 10/20 validation loss 7.400",
    ]
    view.show_new()
    assert not capsys.readouterr().out
    assert progress.validation_curve(path) == [(10, 7.4)]


def test_the_newest_whole_checkpoint_counts(scripts: Any, tmp_path: Path) -> None:
    run = scripts("quickstart").RunFolder(tmp_path)
    assert run.updates_saved() == 0
    (run.checkpoints / "global_step12").mkdir(parents=True)
    assert run.updates_saved() == 0
    (run.checkpoints / "latest").write_text("global_step12")
    assert run.updates_saved() == 12
    (run.checkpoints / "latest").write_text("global_step13")
    assert run.updates_saved() == 0


def test_a_run_with_another_corpus_is_not_continued(scripts: Any, tmp_path: Path) -> None:
    quickstart = scripts("quickstart")
    run = quickstart.RunFolder(tmp_path)
    quickstart._check_same_run(run, "one")
    (run.checkpoints / "global_step2").mkdir(parents=True)
    (run.checkpoints / "latest").write_text("global_step2")
    quickstart._check_same_run(run, "one")
    with pytest.raises(quickstart.QuickstartError, match="another corpus or model"):
        quickstart._check_same_run(run, "two")


def test_an_interrupted_compilation_is_named_and_forgotten_when_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed compilation leaves a marker that torch waits for without limit."""
    from megatron_acco.ops import wait_for_marker

    marker = tmp_path / "lock"
    marker.touch()
    wait_for_marker(marker, stale_seconds=0.5)
    assert not marker.exists() and str(marker) in capsys.readouterr().err


# ---- examples/multi-node ------------------------------------------------------------------------------------------

# srun takes its options up to the first other word and starts the tasks; here two, on one node.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do echo "srun $1" >>"$LOG"; shift; done
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 "$@" || code=$?
done
exit ${code:-0}
"""
TASK = """#!/bin/bash
printf '%s|' "$SLURM_PROCID" "$OMP_NUM_THREADS" "$@" >>"$LOG"; echo >>"$LOG"
[[ "$*" == *doctor* ]] && exit $DOCTOR || exit 75
"""


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_pyxis.sbatch"])
def test_batch_scripts_hand_arguments_on_and_stop_at_what_doctor_finds(script: str, tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("python", TASK)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def submit(doctor: int, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log = tmp_path / f"log{doctor}"
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": "python",
            "SLURM_CPUS_PER_TASK": "8",
            "LOG": str(log),
            "DOCTOR": str(doctor),
            **more,
        }
        words = ["bash", str(ROOT / "examples/multi-node" / script), "--num-layers", "12", "--title", "two words"]
        ran = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True)
        return ran, log.read_text().splitlines() if log.exists() else []

    image = {"IMAGE": "img", "DATA": "/data"} if "pyxis" in script else {}
    ran, log = submit(0, **image)
    assert ran.returncode == 75, "the exit code of a run that was stopped by a signal, " + ran.stderr
    tasks = [line.split("|")[:-1] for line in log if not line.startswith("srun")]
    assert [task[:2] for task in tasks] == [["0", "8"], ["1", "8"]] * 2
    doctor, training = tasks[0][2:], tasks[2][2:]
    assert doctor[:3] == ["-m", "megatron_acco.cli.main", "doctor"] and training[1] == "pretrain_gpt_acco.py"
    assert training[-4:] == ["--num-layers", "12", "--title", "two words"]
    assert (ROOT / training[training.index("--deepspeed_config") + 1]).is_file()
    assert ("srun --container-image=img" in log) == bool(image)

    ran, log = submit(1, **image)
    assert ran.returncode == 1 and len([line for line in log if not line.startswith("srun")]) == 2
    if image:
        ran, log = submit(2)
        assert ran.returncode != 0 and "name the container image" in ran.stderr and not log


def test_the_kubernetes_manifest_is_a_pytorchjob_whose_parts_fit_together() -> None:
    """Against the fields of kubeflow.org/v1: the operator refuses others, and a container of another name."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples/multi-node/pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    spec = job["spec"]
    assert spec.keys() <= {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    assert isinstance(spec["nprocPerNode"], str), "the field is a string, else the API server refuses it"
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert (
        spec["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
        and spec["pytorchReplicaSpecs"]["Master"]["replicas"] == 1
    )
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() <= {"replicas", "template", "restartPolicy"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == spec["nprocPerNode"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["command"] == ["torchrun", "pretrain_gpt_acco.py"]
        assert all(isinstance(word, str) for word in container["args"])
        config = next(word for word in container["args"] if word.startswith("--deepspeed_config="))
        assert (ROOT / config.partition("=")[2]).is_file()
