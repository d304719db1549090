"""`megatron-acco plan`: the arithmetic of the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_acco.cli.main import main
from megatron_acco.cli.plan import Case, predict, smallest_winning_accumulation
from megatron_acco.cost_model import Costs, Link, model_state_bytes

WORDS = (
    "plan --parameters 1.3e9 --ranks 16 --micro-batches 8 --compute-ms 250 --tokens 8192 --bandwidth-gbit 25"
).split()


def test_exchange_is_bytes_over_bandwidth_and_messages() -> None:
    """1.3 G parameters in bf16 on 16 ranks: 2 x 2.6 GB x 15/16 at 25 Gbit/s, and 30 messages."""
    link = Link(25e9 / 8, 1e-3)
    assert link.exchange(1.3e9, 16, 2, 2) == pytest.approx(2 * 2.6e9 * 15 / 16 / 3.125e9 + 30e-3)
    assert link.exchange(1.3e9, 1, 2, 2) == 0.0


def test_model_state_is_that_of_the_design() -> None:
    """bf16 sums: 2 + 2 + 2 + (12 + 4) / N; ZeRO-1 has one gradient buffer and keeps no half."""
    assert model_state_bytes(1e9, 16, 2, 2, overlapped=True) == pytest.approx(1e9 * (6 + 1))
    assert model_state_bytes(1e9, 16, 2, 2, overlapped=False) == pytest.approx(1e9 * (4 + 0.75))
    assert model_state_bytes(1e9, 16, 2, 2, overlapped=False, partitioned=True) == pytest.approx(1e9 * (2 + 14 / 16))


def test_every_method_follows_its_formula() -> None:
    costs = Costs(compute=0.25, exchange=1.5)
    case = Case(1.3e9, 16, 8, costs, 8192, 2, 4, 64)
    seconds = {row.method: row.seconds for row in predict(case)}
    assert seconds == {
        "ZeRO-1": pytest.approx(2 + 1.5 + 0.75),  # all-reduce and all-gather
        "ZeRO-1, overlapped": pytest.approx(2 + (1.5 - 0.25 * 2 / 3) + 0.75),
        "ZeRO-2": pytest.approx(8 * (0.25 + 1.5) + 0.75),  # an all-reduce after every micro-batch
        "DDP, sharded Adam": pytest.approx(2 + (1.5 - 0.25 * 2 / 3) + 0.75),
        # the reduce-scatter behind two thirds of a micro-batch, the all-gather behind one third
        "FSDP2": pytest.approx(2 + (0.75 - 0.25 * 2 / 3) + (0.75 - 0.25 / 3)),
        "sync": pytest.approx(3.5),
        "dpu": pytest.approx(2.0),
        "acco, fixed": pytest.approx(3.0),
        # bf16: an estimate of half the bytes, and the exchange of 1.5 s behind 6 of 8 micro-batches
        "acco, 8-bit estimate": pytest.approx(1.5 + 1.5 * (1 + 4 / 256) / 2),
        "acco, adaptive": pytest.approx(3.0),
    }
    waiting = replace(case, costs=replace(costs, blocking=True))
    gloo = {row.method: row.seconds for row in predict(waiting)}
    assert gloo["FSDP2"] == gloo["ZeRO-1"] == gloo["ZeRO-1, overlapped"] == seconds["ZeRO-1"]
    assert gloo["DDP, sharded Adam"] == seconds["DDP, sharded Adam"], "DDP leaves the waiting to gloo's threads"
    adaptive = predict(case)[-1]
    assert adaptive.steps == 12 and adaptive.exposed == pytest.approx(0.0)
    assert adaptive.tokens_per_second(case) == pytest.approx(16 * 8192 / 0.25)


def test_where_fixed_acco_begins_to_win() -> None:
    costs = Costs(compute=0.25, exchange=1.5)
    wins = smallest_winning_accumulation(costs)
    assert wins is not None

    def margin(k: int) -> float:
        return min(costs.sync(k), costs.overlapped_zero1(k)) - costs.acco(k, k // 2)

    assert margin(wins) > 0 and margin(wins - 1) <= 0.01
    assert smallest_winning_accumulation(Costs(compute=1.0, exchange=0.0)) is None


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--plot", str(tmp_path / "plan.png")]) == 0
    output = capsys.readouterr().out
    assert "r = 0.78" in output and "acco, adaptive" in output and "micro-batches per update on" in output
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--bandwidth-gbit", "0"], "--bandwidth-gbit must be above 0"),
        (["--micro-batches", "0"], "--micro-batches must be 1 or more"),
        (["--compute-ms", "-1"], "--compute-ms must be above 0"),
        (["--parameters", "inf"], "--parameters must be above 0 and finite"),
        (["--bandwidth-gbit", "1e-310"], "inf s of exchange"),
        (["--latency-us", "-5"], "--latency-us must be 0 or more"),
        (["--latency-us", "nan"], "--latency-us must be 0 or more"),
        (["--tokens", "-5"], "--tokens must be 0 or more"),
        (["--max-micro-batches-per-half", "0"], "--max-micro-batches-per-half must be 1 or more"),
        (["--tflops", "100"], "--compute-ms and --tflops contradict each other"),
        (["--plot", "."], "--plot . is a folder"),
        (["--plot", "nowhere/plan.png"], "its folder does not exist"),
        (["--measure"], "--measure measures the link; leave out --bandwidth-gbit"),
    ],
)
def test_bad_numbers_are_named(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *change]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_measuring_alone_says_how_to_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main("plan --parameters 1e6 --micro-batches 8 --compute-ms 250 --measure".split()) == 2
    assert "start it with the deepspeed launcher" in capsys.readouterr().err
