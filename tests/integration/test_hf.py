"""Hugging Face's Trainer and accelerate, unmodified, with register() and an acco section, under DeepSpeed's launcher.

One launch on two ranks makes all trainings (hf_runs.py); the tests compare what they left. The classes of faults: ACCO
not active; a learning rate, an average or a norm that belongs to something else; theta~ evaluated or saved.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 600.0
"""For the launch of all trainings (well under a minute on two free cores) and for the example."""

MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install -e '.[hf]'"),
]
OURS = ["megatron_acco.zero.engine.AccoEngine", "megatron_acco.zero.optimizer.AccoZeroOptimizer"]
STOCK = ["deepspeed.runtime.engine.DeepSpeedEngine", "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"]


def launch(*arguments: str) -> None:
    """Run a script on two ranks with DeepSpeed's launcher."""
    from tests.distributed.harness import free_port

    folder = Path(sys.executable).parent
    command = [str(folder / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()), *arguments]
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """What every training of hf_runs.py left."""
    folder = tmp_path_factory.mktemp("hf")
    launch("--module", "tests.integration.hf_runs", str(folder))
    result = {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}
    shutil.rmtree(folder)
    return result


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def logged(run: dict[str, Any], key: str) -> list[float]:
    return [entry[key] for entry in run["log"] if key in entry]


@pytest.mark.parametrize("name", ["trainer", "resumed", "sync", "own_scheduler", "best"])
def test_acco_is_active_in_the_trainer(runs, name: str) -> None:
    assert runs[name]["classes"] == OURS


def test_accelerate_gets_acco(runs) -> None:
    assert runs["accelerate"]["classes"] == OURS[:1]


def test_without_the_section_everything_is_deepspeeds_own(runs) -> None:
    assert runs["plain"]["classes"] == STOCK


def test_auto_values_are_those_of_the_trainer(runs) -> None:
    assert runs["trainer"]["batch"] == (16, 4, 0.5)
    assert runs["trainer"]["counts"] == (6, 0)


def test_the_trainers_loss_curve_is_that_of_our_own_loop(runs) -> None:
    run = runs["trainer"]
    assert logged(run, "loss") == pytest.approx(run["own"]["losses"], abs=1e-5)
    assert difference(run["theta"], run["own"]["theta"]) < 1e-5
    assert run["norm"] == pytest.approx(run["own"]["norm"], rel=1e-5)


def test_the_trainers_weights_are_those_of_the_equations(runs) -> None:
    # Each epoch ends with an update of 3 of 4 micro-batches, whose gradient must not be scaled up.
    assert difference(runs["trainer"]["theta"], runs["trainer"]["oracle"]) < 1e-4


def test_an_early_end_of_an_epoch_means_what_it_means_in_zero1(runs) -> None:
    """Synchronous rounds and DeepSpeed's own ZeRO-1 are the same rule, also for an update of 1 of 4 micro-batches."""
    assert logged(runs["sync"], "loss") == pytest.approx(logged(runs["plain"], "loss"), abs=1e-5)
    assert difference(runs["sync"]["theta"], runs["plain"]["theta"]) < 1e-5
    assert runs["sync"]["norm"] == pytest.approx(runs["plain"]["norm"], rel=1e-4)


def test_evaluation_is_at_theta(runs) -> None:
    assert len(runs["trainer"]["evaluated"]) == 3
    for reported, at_theta in runs["trainer"]["evaluated"]:
        assert reported == pytest.approx(at_theta, abs=1e-5)


def test_what_is_saved_is_theta(runs) -> None:
    assert runs["trainer"]["saved"] == [0.0, 0.0]
    assert runs["trainer"]["final"] == 0.0


def test_a_second_trainer_of_the_same_model_starts_at_theta(runs) -> None:
    assert runs["resumed"]["second"] == 0.0


def test_a_resumed_training_is_the_same_training(runs) -> None:
    assert logged(runs["resumed"], "loss")[-3:] == logged(runs["trainer"], "loss")[-3:]
    assert difference(runs["resumed"]["theta"], runs["trainer"]["theta"]) == 0.0


def test_the_best_checkpoint_is_loaded_and_exported(runs) -> None:
    assert runs["best"]["best"] == 0.0
    assert runs["best"]["rounded"] == 0.0


@pytest.mark.parametrize("name", ["trainer", "own_scheduler", "accelerate"])
def test_an_estimate_uses_the_rate_of_its_commit(runs, name: str) -> None:
    rates = runs[name]["rates"]
    assert [kind for kind, _ in rates] == ["estimate", "commit"] * 6
    assert [rate for _, rate in rates[::2]] == [rate for _, rate in rates[1::2]]


def test_the_engines_scheduler_gives_an_update_the_rate_that_it_has_in_zero1(runs) -> None:
    rates = [rate for kind, rate in runs["trainer"]["rates"] if kind == "commit"]
    assert rates == runs["plain"]["begin_rates"] == runs["sync"]["begin_rates"]


def test_a_scheduler_outside_the_engine_waits_for_a_skipped_update(runs) -> None:
    """The Trainer's scheduler hears of the skip one update later: with the outcome known, at the next step()."""
    run = runs["own_scheduler"]
    assert run["counts"] == (6, 1)
    assert run["skipped"] == [False, False, True, False, False, False]
    rates = [rate for kind, rate in run["rates"] if kind == "commit"]
    assert rates[:3] == [0.0, 0.005, 0.01] and rates[3] == rates[2] > rates[4] > rates[5]
    assert all(torch.isfinite(weight).all() for weight in run["theta"].values())


def test_accelerates_loop_is_our_own_loop(runs) -> None:
    run = runs["accelerate"]
    assert run["losses"] == pytest.approx(run["own"]["losses"], abs=1e-5)
    assert difference(run["theta"], run["own"]["theta"]) < 1e-5
    assert run["clip"] == 1.0


def test_in_the_middle_of_an_update_theta_is_shown_and_saving_refused(runs) -> None:
    run = runs["accelerate"]
    shown, at_theta = run["middle"]
    assert shown == pytest.approx(at_theta, abs=1e-5)
    assert run["state"] == 0.0
    assert "in the middle of an update (2 of 4 micro-batches accumulated)" in run["refused"]


def test_the_state_of_accelerate_is_loaded(runs) -> None:
    assert runs["accelerate"]["loaded"] == 0.0


def test_the_example_finetunes(tmp_path) -> None:
    out = tmp_path / "out"
    launch("examples/hf_finetune.py", "--deepspeed", "examples/hf_acco.json", "--output_dir", str(out))
    result = json.loads((out / "result.json").read_text())
    assert result["engine"] == "AccoEngine"
    assert result["eval_loss"] < 0.5 * result["eval_loss_before"]
    assert (out / "model.safetensors").is_file()
