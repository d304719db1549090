"""bf16 against the oracle: dtype of the sums and dtype of the exchange, each as its own option.

The oracle takes the gradients of the same bf16 model, rounds the running sum to the accumulation dtype after each
micro-batch and each rank's sum to the dtype of the exchange, and does the rest in float64. What is left between the two
is fp32 arithmetic (3e-7) and, rarely, one weight on the other side of a rounding boundary of bf16 (spacing 2^-8), whose
gradients then differ by that much in one element of many: hence 2e-3. The options differ from each other by more: a
wrong one is found, as the last test shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.precision import low_precision_oracle, train_with_faults
from tests.distributed.reference import error
from tests.distributed.training import Round, Run, assemble

TOLERANCE = 2e-3
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options(accumulate: str | None, wire: str | None, **extra: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"bf16": {"enabled": True}, **extra}
    if accumulate:
        section["data_types"] = {"grad_accum_dtype": accumulate}
    if wire:
        section["communication_data_type"] = wire
    return section


def train(ranks: Any, mode: str, accumulate: str | None, wire: str | None, gas: int = 4) -> tuple[Run, list[Round]]:
    run = Run(mode, "sgd", updates=6, gas=gas, clip=0.5, extra=options(accumulate, wire))
    traces = ranks(2).run(train_with_faults, run, (), torch.bfloat16)
    return run, assemble([(trace.rounds, trace.where) for trace in traces])


DTYPES = [(accumulate, wire) for accumulate in ("fp32", "bf16", None) for wire in ("fp32", "bf16", None)]


@pytest.mark.parametrize(
    ("mode", "accumulate", "wire"),
    [("acco", *dtypes) for dtypes in DTYPES]
    + [(mode, dtype, dtype) for mode in ("dpu", "wp", "sync") for dtype in ("fp32", "bf16", None)],
    ids=str,
)
def test_B19_B26_sums_and_exchange(ranks, mode: str, accumulate: str | None, wire: str | None) -> None:
    run, rounds = train(ranks, mode, accumulate, wire)
    oracle = low_precision_oracle(
        run, 2, torch.bfloat16, accumulate=NAMES[accumulate or "fp32"], wire=NAMES[wire or "bf16"]
    )
    for want in oracle.updates(run.updates):
        if want.estimate is not None:
            estimate = rounds.pop(0)
            assert error(estimate.shown, want.estimate) < TOLERANCE + 2.0**-8
            assert estimate.grad_norm == pytest.approx(want.estimate_norm, rel=TOLERANCE)
        commit = rounds.pop(0)
        assert commit.grad_norm == pytest.approx(want.commit_norm, rel=TOLERANCE)
        assert error(commit.masters, want.theta) < TOLERANCE
        for moment, got in commit.state.items():
            assert error(got, {n: s[moment] for n, s in want.state.items()}) < 5 * TOLERANCE


def test_B19_the_options_differ_by_what_they_say(ranks) -> None:
    """First update, same weights: rounding every sum, or the wire, moves the norm; neither is applied unasked."""
    norms = {}
    for accumulate in ("fp32", "bf16"):
        for wire in ("fp32", "bf16"):
            run, rounds = train(ranks, "sync", accumulate, wire, gas=16)
            exact = low_precision_oracle(
                run, 2, torch.bfloat16, accumulate=NAMES[accumulate], wire=NAMES[wire]
            ).updates(1)[0]
            assert rounds[0].grad_norm == pytest.approx(exact.commit_norm, rel=1e-6)
            norms[accumulate, wire] = rounds[0].grad_norm
    # A sum that is kept in bf16 loses nothing on a bf16 wire.
    assert norms.pop(("bf16", "fp32")) == norms["bf16", "bf16"]
    assert len({round(norm, 5) for norm in norms.values()}) == 3
