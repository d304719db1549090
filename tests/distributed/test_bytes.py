"""Data types and volume on gloo (B26): bf16 works, and no round moves more than a reduce-scatter plus an all-gather.

Bytes are counted twice: by the product's own report, and on the loopback interface of a network namespace in which
nothing but the ranks talks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.harness import RankPool
from tests.distributed.training import Run, assemble, engine_for, json_config, numpy, run_updates, train

ROOT = Path(__file__).parents[2]
SIZES = (300, 700, 301)


class Wide(nn.Module):
    """About 421,000 weights, so that payload dwarfs framing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        a, b, c = SIZES
        self.net = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).float().pow(2).mean()


def wide_data(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(97 * update + 5 * rank + micro)
    return (torch.randn(2, SIZES[0], generator=generator).to(dtype),)


def loopback_bytes() -> int:
    """Bytes sent on the loopback interface of this network namespace so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def measure(mode: str | None, bf16: bool, extra: dict[str, Any]) -> dict[str, Any]:
    """Job: bytes on the wire (all ranks) and in the reports (this rank) of 6 updates, and the padded weights."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = json_config(mode, gas=2, **({"bf16": {"enabled": True}} if bf16 else {}), **extra)
    model = Wide(dtype)
    with engine_for(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3)) as (engine, zero):
        run_updates(engine, zero, range(1), wide_data, dtype)
        torch.distributed.barrier()
        before = loopback_bytes()
        torch.distributed.barrier()
        rounds, _ = run_updates(engine, zero, range(1, 7), wide_data, dtype)
        torch.distributed.barrier()
        reported = sum(r.bytes_sent for r in rounds)
        return {
            "wire": loopback_bytes() - before,
            "reported": reported,
            "rounds": len(rounds),
            "numel": sum(flat.numel() for flat in zero.bit16_groups_flat),
            "finite": all(bool(np.isfinite(numpy(p)).all()) for p in model.parameters()),
        }


CASES: dict[str, tuple[str | None, bool, dict[str, Any], int]] = {
    # mode, bf16, JSON, bytes per weight of gradient and weight together
    "acco_fp32": ("acco", False, {}, 8),
    "acco_bf16": ("acco", True, {}, 4),
    "acco_bf16_fp32_wire": ("acco", True, {"communication_data_type": "fp32"}, 6),
    "acco_fp32_8_bits": ("acco", False, {"acco": {"estimate_bits": 8}}, 0),
    "acco_fp32_4_bits": ("acco", False, {"acco": {"estimate_bits": 4}}, 0),
    "dpu_bf16": ("dpu", True, {}, 4),
    "zero1_fp32": (None, False, {}, 8),
}


def main() -> None:
    """Run every case on 2 and 3 ranks inside a network namespace; print the results as JSON."""
    results = {}
    for ranks in (2, 3):
        pool = RankPool(ranks)
        for name, (mode, bf16, extra, _) in CASES.items():
            results[f"{name}/{ranks}"] = pool.run(measure, mode, bf16, extra)
        pool.close()
    print("RESULT " + json.dumps(results))


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """`main` in a network namespace of its own."""
    command = ["unshare", "--net", "--map-root-user", "bash", "-c"]
    probe = subprocess.run([*command, "ip link set lo up"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    script = f"ip link set lo up && exec {sys.executable} -m tests.distributed.test_bytes"
    done = subprocess.run(
        [*command, script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("ranks_", [2, 3])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] and case[3]])
def test_B26_bytes_per_round(measured: dict[str, Any], name: str, ranks_: int) -> None:
    mode, _, _, width = CASES[name]
    answers = measured[f"{name}/{ranks_}"]
    rounds = 12 if mode == "acco" else 6
    for answer in answers:
        assert answer["finite"] and answer["rounds"] == rounds
        # Reduce-scatter plus all-gather: every rank sends (n - 1) / n of the buffer, twice.
        volume = rounds * answer["numel"] * width * (ranks_ - 1) / ranks_
        assert answer["reported"] <= 1.01 * volume
        # On the wire: all ranks together, with headers, acknowledgements and the few scalars.
        assert 0.9 * ranks_ * volume < answer["wire"] < 1.05 * ranks_ * volume
        assert answer["reported"] == pytest.approx(answer["wire"] / ranks_, rel=0.06)


@pytest.mark.parametrize("ranks_", [2, 3])
@pytest.mark.parametrize(("bits", "limit"), [(8, 1.27), (4, 1.15)])
def test_bytes_of_an_update_with_a_quantized_estimate(
    measured: dict[str, Any], bits: int, limit: float, ranks_: int
) -> None:
    """Against one reduce-scatter plus all-gather in fp32, by the report and on the wire (headers and scalars, too)."""
    exact, coarse = measured[f"acco_fp32/{ranks_}"], measured[f"acco_fp32_{bits}_bits/{ranks_}"]
    for answer, reference in zip(coarse, exact, strict=True):
        one_exchange = 6 * answer["numel"] * 8 * (ranks_ - 1) / ranks_
        assert answer["finite"] and answer["reported"] <= limit * one_exchange
        assert answer["reported"] > (1 + bits / 32) * one_exchange
        assert answer["wire"] <= limit * reference["wire"] / 2


@pytest.mark.parametrize("ranks_", [2, 3])
def test_B26_acco_moves_at_most_twice_zero1(measured: dict[str, Any], ranks_: int) -> None:
    acco, stock = (measured[f"{name}/{ranks_}"][0]["wire"] for name in ("acco_fp32", "zero1_fp32"))
    assert acco <= 2.05 * stock


def test_B26_bf16_trains_and_is_reproducible(ranks) -> None:
    run = Run("acco", "ds_adamw", updates=4, bf16=True, clip=0.5)
    first, second = (assemble(ranks(2).run(train, run)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a.masters[name], b.masters[name]) for name in a.masters)
        # What was gathered is the owner's master, rounded once.
        if a.kind == "commit":
            for name, master in a.masters.items():
                rounded = torch.tensor(master).bfloat16().float().numpy()
                assert np.array_equal(a.shown[name], rounded)


if __name__ == "__main__":
    main()
