"""Tables, resuming and options of benchmarks/convergence.py; no processes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import Curve, Run

RUN = Run("zero1", 1, 4, 1e-3, 8, 2, 0, 0, 1.0, 2, 16, 32, 1, False)
CURVE: Curve = [(4, 6.0), (6, 5.0), (8, 4.0)]


def line(run: Run, curve: Curve = CURVE) -> str:
    return json.dumps(asdict(run) | {"curve": curve})


def test_a_result_that_was_cut_off_is_made_again_in_its_place(tmp_path: Path) -> None:
    path, other = tmp_path / "results.jsonl", replace(RUN, seed=2)
    convergence.append(path, line(RUN))
    whole = path.read_text()
    path.write_text(whole + line(other)[:-20])
    assert convergence.read(path) == {RUN: CURVE}
    convergence.append(path, line(other))
    assert convergence.read(path) == {RUN: CURVE, other: CURVE}
    assert path.read_text() == whole + line(other) + "\n"


@pytest.mark.parametrize("bad", ["{", "[]", "{}", line(RUN, []), ""])
def test_another_damaged_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{line(RUN)}\n{bad}\n{line(RUN)}\n")
    with pytest.raises(ValueError, match="line 2 is not a finished run"):
        convergence.read(path)


def test_a_seed_that_diverged_is_the_worst_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [replace(RUN, method=method, seed=seed) for seed in (1, 2) for method in ("zero1", "acco")]
    curve: Curve = [(4, 6.0), (8, math.nan)]
    convergence.report(runs, {run: curve if run == runs[1] else CURVE for run in runs})
    rows = [words.split() for words in capsys.readouterr().out.splitlines() if words.startswith(("zero1", "acco"))]
    assert rows == [
        ["zero1", "4.0000", "4.0000", "4.0000", "+0.000%", "+0.000%", "+0.000%", "1.000"],
        ["acco", "nan", "4.0000", "nan", "+nan%", "+0.000%", "+nan%", "-", "1", "of", "2", "diverged"],
    ]


def test_runs_validated_at_other_updates_are_compared_where_all_were() -> None:
    runs = [RUN, replace(RUN, seed=2)]
    known = {runs[0]: CURVE, runs[1]: [(2, 9.0), (4, 8.0), (8, 5.0)]}
    assert convergence.mean_curve("zero1", runs, known) == [(4, 7.0), (8, 4.5)]


def test_updates_to_a_loss_are_those_of_the_first_time() -> None:
    assert convergence.updates_to_loss(CURVE, CURVE) == 1.0
    assert convergence.updates_to_loss([(4, 7.0), (8, 4.5)], CURVE) == (4 + 4 * 2.0 / 2.5) / 6
    assert convergence.updates_to_loss([(3, 4.0), (6, 5.5), (8, 5.0)], CURVE) == 0.5, "there at once, away again"
    assert convergence.updates_to_loss([(4, 7.0), (8, 5.1)], CURVE) is None
    assert convergence.updates_to_loss(CURVE, CURVE[-1:]) is None, "one validation"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--validations 0", "--validations must be 1 or more"),
        ("--gas 4 1", "--gas 1: an update of acco has two halves"),
        ("--gas 0", "--gas must be 1 or more"),
        ("--micro-batches 3 --gas 2 4", "--micro-batches must be enough for an update of every --gas"),
        ("--lr 1e-3 nan", "--lr must be above 0"),
        ("--clip -1", "--clip must be 0 or more"),
        ("--out /dev/null", "--out /dev/null: File exists"),
    ],
)
def test_bad_options_are_named(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        convergence.parse_arguments(["--out", str(tmp_path), *words.split()])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_names_and_seeds_given_twice_count_once(tmp_path: Path) -> None:
    words = "--methods zero1 dpu zero1 --gas 1 1 --seeds 1 2 1 --lr 1e-3 0.001"
    args = convergence.parse_arguments(["--out", str(tmp_path), *words.split()])
    assert (args.methods, args.gas, args.seeds, args.lr) == (["zero1", "dpu"], [1], [1, 2], [1e-3])
