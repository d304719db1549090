"""Every round of every mode agrees with the float64 oracle: masters, moments, estimate, commit, norms, counts.

Required is max|a - b| / max|b| per tensor below 1e-5 in fp32; found is 3e-7, so 2e-6 is asserted. Element by element
1e-5 is not attainable in general: an element that is near zero by cancellation has a large error relative to itself
(found: up to 6e-5, in moments).
"""

from __future__ import annotations

import pytest

from tests.distributed.reference import error, oracle_for
from tests.distributed.training import Run, assemble, train

TOLERANCE = 2e-6

# Every optimizer in every mode; clipping, ranks, uneven halves and warm-up spread over them.
RUNS = [
    (1, Run("acco", "torch_adamw", clip=0.5)),
    (2, Run("acco", "torch_adamw", updates=16)),
    (3, Run("acco", "ds_adamw", clip=0.5)),
    (4, Run("acco", "cpu_adamw", clip=0.5)),
    (2, Run("acco", "ds_adam", clip=0.5)),
    (4, Run("acco", "torch_adam")),
    (1, Run("acco", "cpu_adam")),
    (3, Run("acco", "sgd", clip=0.5)),
    (2, Run("acco", "lion", clip=0.5)),
    (2, Run("acco", "ds_adamw", gas=5, acco={"estimate_fraction": 0.7, "warmup_updates": 3})),
    (3, Run("acco", "torch_adamw", gas=2, acco={"estimate_fraction": 0.01})),
    (1, Run("dpu", "ds_adamw", clip=0.5)),
    (2, Run("dpu", "torch_adamw", clip=0.5, acco={"warmup_updates": 2})),
    (3, Run("dpu", "torch_adam")),
    (4, Run("dpu", "sgd")),
    (2, Run("dpu", "lion")),
    (2, Run("dpu", "cpu_adamw", gas=1)),
    (1, Run("wp", "torch_adam", clip=0.5)),
    (2, Run("wp", "torch_adamw", clip=0.5)),
    (2, Run("wp", "cpu_adamw", acco={"warmup_updates": 2})),
    (3, Run("wp", "ds_adamw", gas=1)),
    (4, Run("wp", "sgd", clip=0.5)),
    (3, Run("wp", "lion")),
    (1, Run("sync", "lion", clip=0.5)),
    (2, Run("sync", "sgd", clip=0.5)),
    (3, Run("sync", "torch_adamw", clip=0.5)),
    (4, Run("sync", "ds_adamw")),
    (2, Run("sync", "torch_adam", gas=1)),
    (2, Run("sync", "cpu_adamw", clip=0.5)),
]
# The oracle against the outside baseline: DeepSpeed's own classes, no acco section.
BASELINE_RUNS = [
    (1, Run(None, "torch_adamw", clip=0.5)),
    (2, Run(None, "ds_adamw", clip=0.5)),
    (3, Run(None, "ds_adam")),
    (4, Run(None, "sgd", clip=0.5)),
    (2, Run(None, "lion")),
    (2, Run(None, "cpu_adamw", clip=0.5)),
]


def _id(value: object) -> str:
    if not isinstance(value, Run):
        return f"ranks{value}"
    extras = "".join(f"-{k}{v}" for k, v in value.acco.items())
    return f"{value.mode or 'zero1'}-{value.optimizer}-clip{value.clip}-gas{value.gas}{extras}"


def check_moments(got: dict, want: dict) -> None:
    """Moments of a round against the oracle's state (DESIGN: S_t)."""
    for moment in got:
        if moment != "calls":
            reference = {name: state[moment] for name, state in want.items()}
            assert error(got[moment], reference) < TOLERANCE, moment


def check_against_oracle(run: Run, ranks: int, rounds: list, first_half: int | None = None) -> None:
    """Walk the rounds in order and compare each with the oracle's update."""
    oracle = oracle_for(run, ranks, first_half)
    rounds = list(rounds)
    for t in range(run.updates):
        theta_before, state_before = oracle.theta, oracle.state
        want = oracle.updates(1)[0]
        if want.estimate is not None:
            estimate = rounds.pop(0)
            assert (estimate.kind, estimate.update) == ("estimate", t)
            assert error(estimate.shown, want.estimate) < TOLERANCE, f"theta~ of update {t}"
            assert error(estimate.masters, theta_before) < TOLERANCE, f"the estimate of update {t} moved theta"
            if state_before:
                check_moments(estimate.state, state_before)
            assert estimate.grad_norm == pytest.approx(want.estimate_norm, rel=TOLERANCE)
        commit = rounds.pop(0)
        assert (commit.kind, commit.update) == ("commit", t)
        assert error(commit.masters, want.theta) < TOLERANCE, f"theta after update {t}"
        assert error(commit.shown, want.shown) < TOLERANCE, f"weights shown after update {t}"
        check_moments(commit.state, want.state)
        if run.mode is not None:
            assert commit.micro_batches == want.micro_batches == ranks * run.gas
        if run.mode is not None or run.clip:
            assert commit.grad_norm == pytest.approx(want.commit_norm, rel=TOLERANCE)
    assert not rounds
    # The run must have gone somewhere, or the comparison shows nothing.
    start = oracle_for(run, ranks).theta
    assert error(start, oracle.theta) > 1e-2


@pytest.mark.parametrize(("ranks_", "run"), RUNS, ids=_id)
def test_rounds_agree_with_oracle(ranks, ranks_: int, run: Run) -> None:
    first = None
    if "estimate_fraction" in run.acco:
        first = {0.7: 3, 0.01: 1}[run.acco["estimate_fraction"]]
    check_against_oracle(run, ranks_, assemble(ranks(ranks_).run(train, run)), first)


@pytest.mark.parametrize(("ranks_", "run"), BASELINE_RUNS, ids=_id)
def test_deepspeed_zero1_agrees_with_oracle(ranks, ranks_: int, run: Run) -> None:
    check_against_oracle(run, ranks_, assemble(ranks(ranks_).run(train, run)))
