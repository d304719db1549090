"""The arithmetic and the tables of benchmarks/compare; no processes."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import turns
from benchmarks.compare import __main__ as compare
from benchmarks.compare import figures, options, pictures, rank
from benchmarks.compare.methods import DEFAULT, METHODS
from megatron_acco.cli.plan import Case, predict
from megatron_acco.cost_model import METHODS as FORMULAS
from megatron_acco.cost_model import Costs

COSTS = Costs(0.5, 1.0, 1.2, 0.6, blocking=True)
K, TOKENS = 4, 2048


def turn(seconds: float, micro_batches: int, updates: int = 2, **more: Any) -> dict[str, Any]:
    """`rank.Turn` as JSON has it."""
    return vars(rank.Turn(seconds, micro_batches, updates, **more)) | {}


def result(cpu: list[float] | None = None, compute: tuple[float, float] = (0.5, 0.5)) -> figures.Result:
    """Two ranks and two turns: ZeRO-1 takes 4 s and then 5 s for an update, ACCO half; one method has failed."""
    slow = [[turn(2 * s, 16, sent=30_000_000) for _ in range(2)] for s in (4.0, 5.0)]
    fast = [[turn(s, 16, compute_seconds=4.0, waits=[0.1] * 4, rounds=[0.5] * 4, halves=4, lane_cpu=0.2)
             for _ in range(2)] for s in (4.0, 5.0)]  # fmt: skip
    alone = [[turn(4.0, round(4.0 / seconds), updates=0) for seconds in compute]] * 2
    return figures.evaluate(
        {
            "arguments": {
                "methods": ["compute", "zero1", "ddp", "acco"], "gas": K, "cpu": cpu or [1.0], "bf16": False,
                "micro_batch_size": 4, "seq_length": 512, "hosts": 2, "turns": 2, "block": 2,
            },
            "versions": {"torch": "2"},
            "measured": {"costs": vars(COSTS), "rate": 1e8, "parameters": 10**6, "compute_by_rank": [9.0, 9.0],
                         "cores": 2},
            "failed": {"ddp": "ValueError: no"},
            "off": {},
            "peaks": [{"zero1": 10_000_000, "acco": None}, {"zero1": 12_000_000, "acco": 5_000_000}],
            "turns": {"compute": alone, "zero1": slow, "ddp": [], "acco": fast},
        }
    )  # fmt: skip


def test_figures_of_a_run() -> None:
    found = result()["figures"]
    assert found["zero1"]["tokens_per_second"] == [16 * TOKENS / 8.0, 16 * TOKENS / 10.0]
    assert found["acco"]["ratio_to_zero1"] == [2.0, 2.0] and found["acco"]["ratio_to_compute"] == [1.0, 0.8]
    assert found["acco"]["exposed_share"] == pytest.approx(0.1)
    assert found["zero1"]["seconds_per_update"] == 4.5 and found["zero1"]["micro_batches_per_update"] == 8.0
    assert found["zero1"]["bytes_per_update"] == 15e6 and found["zero1"]["peak_bytes"] == 12_000_000
    assert found["acco"]["lane_cpu_share"] == pytest.approx(0.05) and found["acco"]["wait_seconds"] == 0.1


def test_a_method_that_failed_stays_in_the_tables(tmp_path: Path) -> None:
    run = result()
    lines = figures.report(run)
    assert any(line.split() == ["ddp", "FAILED:", "ValueError:", "no"] for line in lines)
    assert "acco is 2.000 (2.000 to 2.000) times as fast as zero1, the best exact rival" in lines
    summary = figures.summary("r", [0.5, 1.0], [run, None], ["zero1", "ddp", "acco"])
    ratios = summary[next(i for i, line in enumerate(summary) if "ZeRO-1" in line) :]
    assert [line.split() for line in ratios[1:4]] == [
        ["zero1", "1.000", "FAILED"],
        ["ddp", "FAILED", "FAILED"],
        ["acco", "2.000", "FAILED"],
    ]
    pictures.draw(run, tmp_path / "run.png")
    pictures.draw_sweep("r", [0.1, 1.0], [run, None], ["zero1", "ddp", "acco"], tmp_path / "sweep.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("run.png", "sweep.png"))


def test_predictions_are_those_of_the_plan() -> None:
    run = result()
    plan = {row.method: row for row in predict(Case(1e6, 2, K, COSTS, TOKENS, 4, 4, 256))}
    names = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "ddp": "DDP, sharded Adam", "fsdp2": "FSDP2", "dpu": "dpu",
             "acco": "acco, fixed", "adaptive": "acco, adaptive", "acco-8-bit": "acco, 8-bit estimate"}  # fmt: skip
    for name, row in names.items():
        assert figures.predicted(name, run) == pytest.approx(2 * plan[row].steps / plan[row].seconds), name
    assert figures.predicted("compute", run) is None, "it is what the others are predicted from"
    assert all(method.rule in FORMULAS for method in METHODS.values())


def test_predictions_for_hosts_of_unequal_speed_wait_for_the_slower() -> None:
    run = result(cpu=[1.0, 0.5], compute=(0.5, 1.0))
    assert figures.predicted("sync", run) == pytest.approx(2 * K / (K * 1.0 + 1.0))
    assert figures.predicted("zero2", run) == pytest.approx(2 * K / (K * (1.0 + 1.2) + 0.6))
    assert figures.predicted("adaptive", run) == pytest.approx(1 / 0.5 + 1 / 1.0, rel=0.02)
    for name in ("acco-8-bit", "acco-node"):
        assert figures.predicted(name, run) == pytest.approx(2 * K / (K * 1.0))
    assert figures.predicted("auto", run) is None


def test_what_makes_exact_methods_differ_is_seen() -> None:
    first, moved = torch.zeros(100), torch.linspace(1.0, 2.0, 100)
    reference = rank.State(moved, 3.0)
    assert rank.State(moved.clone(), 3.0).off(reference, first) == 0.0
    assert rank.State(1.01 * moved, 3.0).off(reference, first) == pytest.approx(0.01, rel=1e-3)
    assert rank.State(moved, 6.0).off(reference, first) == 1.0, "Adam does not see the factor"
    assert rank.State(moved * float("nan"), 3.0).off(reference, first) == float("inf")


def test_failures_of_all_ranks_are_kept_and_failures_of_some_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("no\nsecond line")

    alone = rank.Failures(tmp_path, 0, 1)
    assert alone.attempt("ddp", lambda: 3) == 3 and not alone.reasons
    assert alone.attempt("ddp", fail) is None and alone.reasons == {"ddp": "ValueError: no"}
    monkeypatch.setattr(rank, "ANSWER_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="fsdp2 failed on rank 1 and not on all"):
        rank.Failures(tmp_path, 1, 2).attempt("fsdp2", fail)


def test_names_and_values_given_twice_count_once() -> None:
    args = options.parse_arguments("--methods zero1 compute zero1 --sweep gas 2 4 2".split())
    assert args.methods == ["zero1", "compute"] and args.sweep == ("gas", [2.0, 4.0])


def test_a_folder_that_cannot_be_written_is_known_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["compare", "--out", str(tmp_path / "file")])
    monkeypatch.setattr(compare, "run", lambda args: pytest.fail("it ran"))
    assert compare.main() == 2 and f"--out {tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_what_a_sweep_has_measured_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(args: argparse.Namespace) -> figures.Result:
        if args.gas > 2:
            raise KeyboardInterrupt
        return result()

    words = "--methods zero1 acco --sweep gas 2 4 --out".split()
    monkeypatch.setattr("sys.argv", ["compare", *words, str(tmp_path)])
    monkeypatch.setattr(compare, "run", once)
    drawn: list[Path] = []
    monkeypatch.setattr(pictures, "draw_sweep", lambda *unused: drawn.append(unused[-1]))
    monkeypatch.setattr("signal.signal", lambda *unused: None)
    assert compare.main() == 130
    saved = json.loads((tmp_path / "sweep-gas.json").read_text())
    assert saved["values"] == [2.0] and len(saved["runs"]) == 1 and drawn == [tmp_path / "sweep-gas.png"]


def test_the_bare_model_runs_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which `compute` is made: no engine has converted it."""
    shape = argparse.Namespace(hidden_size=200, num_layers=1, seq_length=8, micro_batch_size=1, bf16=True)
    built = {}
    monkeypatch.setattr(
        turns, "build_model", lambda options, *unused: built.update(vars(options)) or torch.nn.Linear(2, 2)
    )
    assert {p.dtype for p in turns.new_model(shape).parameters()} == {torch.bfloat16}
    assert built["hidden_size"] % built["num_attention_heads"] == 0


def test_a_sweep_changes_one_thing() -> None:
    args = options.parse_arguments("--gas 2 --hosts 3 --sweep slow 1 4".split())
    assert args.methods == list(DEFAULT)
    plain = copy.copy(vars(args)) | {"sweep": None}
    assert [vars(options.at(args, value)) for value in args.sweep[1]] == [
        plain | {"cpu": [1.0, 1.0, 1.0]},
        plain | {"cpu": [1.0, 1.0, 0.25]},
    ]
    for name, option in (("r", "r"), ("gas", "gas"), ("hosts", "hosts"), ("hidden-size", "hidden_size")):
        args = options.parse_arguments(["--sweep", name, "128"])
        assert getattr(options.at(args, 128.0), option) == 128


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sweep speed 1 2", "--sweep takes a parameter (r, gas, hosts, slow, hidden-size)"),
        ("--sweep r", "and its values, got r"),
        ("--sweep r 0.5 x", "could not convert string to float: 'x'"),
        ("--sweep slow 0.5", "values must be 1 or more"),
        ("--sweep r 1 --rate 100mbit", "leave out --rate"),
        ("--sweep hosts 2 3.5", "values must be whole numbers"),
        ("--sweep hosts 2 201", "--sweep hosts 201: --hosts must be 200 or less"),
        ("--sweep hosts 2 3 --cpu 1 0.5", "--sweep hosts 3: --cpu takes one number for all hosts, or one for each"),
        ("--sweep slow 2 40", "--sweep slow 40: --cpu must be 0.05 or more"),
        ("--sweep slow 2 --cpu 0.5", "--sweep slow chooses the CPUs; leave out --cpu"),
        ("--cpu inf", "--cpu must be 0.05 or more"),
        ("--r inf", "--r must be 0.001 to 1000"),
        ("--limit nan", "--limit must be above 0"),
        ("--rate 100", "a rate is a number with kbit"),
        ("--r 0", "--r must be 0.001 to 1000"),
        ("--hosts 1", "--hosts must be 2 or more"),
        ("--gas 0", "--gas must be 1 or more"),
        ("--bf16", "ddp and fsdp2 would train without fp32 masters"),
    ],
)
def test_bad_options_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse_arguments(words.split())
    assert caught.value.code == 2 and message in capsys.readouterr().err
