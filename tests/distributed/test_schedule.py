"""Learning rates move once per commit, and the toy trajectories of the published rules."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.reference import check_commits, error, oracle_for, oracle_of
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.training import (
    Net,
    Round,
    Run,
    assemble,
    batch,
    client_optimizer,
    drain,
    json_config,
    layout,
    one_update,
    parameter_groups,
    record_rounds,
    running,
    start,
    train_model,
)
from tests.oracle import Rule

WARMUP_DECAY = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 20, "warmup_num_steps": 10, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
}


def rates(mode: str | None, gas: int, skip: int | None) -> tuple[list[float], list[Round], Any, int]:
    """Job: the learning rate in force at the step of each of 16 updates, one of them not finite."""
    model, rank = Net(), torch.distributed.get_rank()
    config = json_config(mode, gas=gas, scheduler=WARMUP_DECAY)
    engine, zero = start(model, config, client_optimizer("torch_adamw", parameter_groups(model)))
    rounds = record_rounds(zero) if mode is not None else []
    seen = []
    for update in range(16):
        for micro in range(gas):
            x, y = batch(update, rank, micro)
            bad = update == skip and rank == 1 and micro == gas - 1
            engine.backward(engine(x * (math.inf if bad else 1.0), y))
            if micro == gas - 1:
                seen.append(engine.get_lr()[0])
            engine.step()
    drain(engine)
    result = seen, rounds, layout(engine, zero), engine.skipped_steps
    engine.destroy()
    return result


@pytest.mark.parametrize(("mode", "gas"), [("acco", 2), ("acco", 4), ("dpu", 1), ("wp", 4), ("sync", 1), ("sync", 4)])
def test_B27_rate_moves_once_per_commit(ranks, mode: str, gas: int) -> None:
    stock = ranks(2).run(rates, None, 4, None)[0][0]
    assert len(set(stock)) > 10
    results = ranks(2).run(rates, mode, gas, None)
    rounds = assemble([(r[1], r[2]) for r in results])
    assert [r.lr for r in rounds if r.kind == "commit"] == stock
    # The estimate looks ahead with the rate of its commit.
    assert [r.lr for r in rounds if r.kind == "estimate"] in ([], stock)


@pytest.mark.parametrize(("mode", "gas"), [("acco", 4), ("dpu", 2), ("sync", 2)])
def test_B27_rate_does_not_move_for_a_skipped_update(ranks, mode: str, gas: int) -> None:
    stock = ranks(2).run(rates, None, 4, None)[0][0]
    results = ranks(2).run(rates, mode, gas, 5)
    rounds = assemble([(r[1], r[2]) for r in results])
    commits = [r for r in rounds if r.kind == "commit"]
    assert [r.applied for r in commits] == [t != 5 for t in range(16)]
    assert [r.lr for r in commits if r.applied] == stock[:15]
    assert [r[3] for r in results] == [1, 1]


def scheduled_by_samples(samples: list[int]) -> Any:
    """A scheduler in the style of Megatron: step(increment) with a required argument."""

    class BySamples:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, increment: int) -> None:
            samples.append(increment)
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return BySamples


def megatron_style(run: Run) -> tuple[list[int], list[Round], Any]:
    """Job: a scheduler whose step needs the number of samples."""
    samples: list[int] = []
    model = Net()
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    engine, zero = start(model, run.config(), optimizer, lr_scheduler=scheduled_by_samples(samples)(optimizer))
    rounds = record_rounds(zero)
    for update in range(run.updates):
        for micro in range(run.gas):
            engine.backward(engine(*batch(update, torch.distributed.get_rank(), micro)))
            engine.step()
    drain(engine)
    where = layout(engine, zero)
    engine.destroy()
    return samples, rounds, where


def test_B27_scheduler_that_counts_samples(ranks) -> None:
    run = Run("acco", "torch_adamw", updates=6)
    results = ranks(2).run(megatron_style, run)
    rounds = assemble([r[1:] for r in results])
    assert results[0][0] == [4 * 4 * 2] * 6
    check_commits(rounds, oracle_for(run, 2, lr_factor=lambda applied: 0.9**applied))
    assert [r.lr for r in rounds if r.kind == "commit"] == pytest.approx([1e-2 * 0.9**n for n in range(6)])


def rate_moved_by_hand(run: Run, slow: bool) -> tuple[list[Round], Any]:
    """Job: the caller changes rate and decay right after step(), while the commit is in flight."""
    with running(run) as (engine, zero):
        if slow:
            zero.lane.before_round = lambda label: time.sleep(0.15)
        rounds = record_rounds(zero)
        for update in range(run.updates):
            one_update(engine, update)
            for group in zero.optimizer.param_groups:
                group["lr"] *= 0.5
        drain(engine)
        return rounds, layout(engine, zero)


@pytest.mark.parametrize(("mode", "optimizer"), [("acco", "ds_adamw"), ("acco", "lion"), ("dpu", "torch_adamw")])
def test_B27_rate_in_flight_is_the_one_at_launch(ranks, mode: str, optimizer: str) -> None:
    run = Run(mode, optimizer, updates=4)
    quick, slow = (assemble(ranks(2).run(rate_moved_by_hand, run, slow)) for slow in (False, True))
    assert_same_bits(quick, slow)
    commits = [r for r in slow if r.kind == "commit"]
    assert [r.lr for r in commits] == [1e-2 * 0.5**t for t in range(4)]
    oracle = oracle_for(run, 2, lr_factor=lambda applied: 0.5**applied)
    for commit in commits:
        assert error(commit.masters, oracle.updates(1)[0].theta) < 5e-6


class Quadratic(nn.Module):
    """f(w; x) = |w - x|^2 / 2, mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, -2.0, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w - x).pow(2).sum(-1).mean() / 2


def points(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    """Different in every micro-batch, mean near 1."""
    generator = torch.Generator().manual_seed(31 * update + 7 * rank + micro)
    return ((1.0 + 0.1 * torch.randn(4, 3, generator=generator)).to(dtype),)


def toy_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def closed_form(mode: str, updates: int, warmup: int = 0) -> list[np.ndarray]:
    """The published recursions, written out for this quadratic and plain SGD; no oracle, no autograd."""
    lr, gas, ranks = 0.3, 4, 2

    def mean(t: int, micros: range) -> np.ndarray:
        return np.mean([points(t, r, k)[0].double().mean(0).numpy() for r in range(ranks) for k in micros], axis=0)

    theta = before = estimate = np.array([3.0, -2.0, 0.5])
    path = []
    for t in range(updates):
        whole = range(gas)
        if mode == "sync" or t < warmup:
            new = theta - lr * (theta - mean(t, whole))
            estimate = before = new
        elif mode == "dpu":
            new = theta - lr * (before - mean(t, whole))
            before = theta
        else:
            first, second = range(gas // 2), range(gas // 2, gas)
            half = estimate - mean(t, first)
            new = theta - lr * (half + (theta - mean(t, second))) / 2
            estimate = theta - lr * half
        theta = new
        path.append(theta)
    return path


@pytest.mark.parametrize(("mode", "warmup"), [("acco", 0), ("dpu", 0), ("sync", 0), ("acco", 5), ("dpu", 5)])
def test_B62_quadratic_follows_the_published_rule(ranks, mode: str, warmup: int) -> None:
    config = json_config(mode, acco={"warmup_updates": warmup})
    rounds = assemble(ranks(2).run(train_model, Quadratic, config, 50, toy_sgd, points))
    commits = [r.masters["w"] for r in rounds if r.kind == "commit"]
    want = closed_form(mode, 50, warmup)
    for t, (got, expected) in enumerate(zip(commits, want, strict=True)):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=f"update {t}")
    oracle = oracle_of(
        Quadratic(),
        [(["w"], Rule("sgd", 0.3, momentum=0.0))],
        points,
        mode=mode,
        ranks=2,
        warmup_updates=warmup,
    )
    for record, expected in zip(oracle.updates(50), want, strict=True):
        np.testing.assert_allclose(record.theta["w"], expected, rtol=1e-12)
