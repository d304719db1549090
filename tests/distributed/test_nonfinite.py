"""Gradients that are not finite: skipped on all ranks, counted, logged, the schedule held, an end after N in a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.distributed.precision import Fault, Trace, fp16_section, train_with_faults
from tests.distributed.training import Run, assemble

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECTIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": fp16_section(8)}
# The outcome of a commit is known at the next half boundary (acco), full boundary (dpu, wp) or at once (sync).
DELAY = {"acco": 1, "dpu": 1, "wp": 1, "sync": 0}


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that halves the rate at every step of it."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def traces(ranks: Any, mode: str, precision: str, faults: list[Fault], **acco: Any) -> list[Trace]:
    run = Run(mode, "sgd", updates=6, acco=acco, extra=SECTIONS[precision])
    return ranks(2).run(train_with_faults, run, faults, DTYPES[precision], lr_scheduler=falling)


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize(
    ("mode", "half"), [("acco", 0), ("acco", 1), ("dpu", 1), ("wp", 1), ("sync", 1)], ids=lambda v: str(v)
)
def test_B18_skips_are_counted_and_the_schedule_is_held(ranks, mode: str, half: int, precision: str) -> None:
    results = traces(ranks, mode, precision, [(2, 1, 2 * half, math.nan)])
    commits = [r for r in assemble([(t.rounds, t.where) for t in results]) if r.kind == "commit"]
    assert [r.applied for r in commits] == [True, True, False, True, True, True]
    assert [r.lr for r in commits] == [0.01 * 0.5**k for k in (0, 1, 2, 2, 3, 4)], "no step of the schedule for a skip"
    delay = DELAY[mode]
    for trace in results:
        assert trace.error == ""
        known = [0, 0, *[0] * delay, *[1] * (4 - delay)]
        assert trace.skipped == [*known, 1], "engine.skipped_steps after each update"
        # was_step_applied() after the step() that ends an update: of the last commit whose outcome is known.
        assert trace.applied[3::4] == [update != 2 + delay for update in range(6)]
        assert not any(trace.applied[0::4] + trace.applied[1::4] + trace.applied[2::4])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_B18_every_value_that_is_not_finite_counts(ranks, value: float) -> None:
    results = traces(ranks, "acco", "fp32", [(1, 0, 0, value), (3, 1, 3, value)])
    assert all(trace.skipped[-1] == 2 for trace in results)


@pytest.mark.parametrize("mode", ["acco", "sync"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_abort_after_skips_in_a_row_ends_all_ranks_with_the_message(ranks, mode: str, precision: str) -> None:
    # One skip, a good update, then three in a row: only the three end the run.
    faults = [(t, 1, 1, math.nan) for t in (0, 2, 3, 4)]
    for trace in traces(ranks, mode, precision, faults, abort_after_skipped_updates=3):
        assert trace.error.startswith("FloatingPointError: 3 updates in a row were skipped")
        assert "acco.abort_after_skipped_updates is 3" in trace.error
        assert len(trace.scales) - 1 == 4 + DELAY[mode], "at the first moment at which the third is known"


def test_no_abort_without_the_option(ranks) -> None:
    faults = [(t, 1, 1, math.nan) for t in range(6)]
    for trace in traces(ranks, "acco", "bf16", faults):
        assert trace.error == "" and trace.skipped[-1] == 6
