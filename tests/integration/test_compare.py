"""benchmarks/compare on two hosts: all methods train alike, and everything is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import why_not
from benchmarks.compare.methods import METHODS

ROOT = Path(__file__).parents[2]
EXCHANGE = 2 * 4 / 2  # bytes of a weight that a rank of two sends: half of the gradients and half of the weights, fp32


@pytest.mark.skipif(why_not(ssh=False) is not None, reason=str(why_not(ssh=False)))
def test_exact_methods_train_alike_and_send_what_they_should(tmp_path: Path) -> None:
    """After two updates of two micro-batches; bytes are counted on the interface."""
    words = "--rate 400mbit --gas 2 --hidden-size 64 --num-layers 1 --seq-length 32 --turns 1 --block 2".split()
    methods = "compute zero1 zero2 ddp fsdp2 sync acco adaptive".split()
    command = [sys.executable, "-m", "benchmarks.compare", *words, "--methods", *methods, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "compare.json").read_text())
    assert set(result["off"]) == {name for name in methods if METHODS[name].exact}
    assert result["off"].pop("zero1") == 0.0
    assert all(off < 1e-4 for off in result["off"].values()), result["off"]

    figures, parameters = result["figures"], result["measured"]["parameters"]
    assert list(figures) == methods
    for name, row in figures.items():
        assert min(row["tokens_per_second"]) > 0 and row["peak_bytes"] > 4 * parameters and name in done.stdout
    sent = {name: figures[name]["bytes_per_update"] / (parameters * EXCHANGE) for name in methods[1:]}
    # Once the exchange; an all-reduce (also FSDP2's reduce-scatter, on gloo) in the place of a reduce-scatter; that at
    # each of two micro-batches; an estimate and a commit.
    expected = {"sync": 1.0, "zero1": 1.5, "ddp": 1.5, "fsdp2": 1.5, "zero2": 2.5, "acco": 2.0, "adaptive": 2.0}
    assert sent == pytest.approx(expected, rel=0.15)
    assert figures["acco"]["micro_batches_per_update"] == 4.0  # 2 on each of 2 ranks
    assert figures["adaptive"]["halves_share"] == 1.0
    assert (tmp_path / "compare.txt").read_text() in done.stdout
    assert (tmp_path / "compare.png").stat().st_size > 1000
