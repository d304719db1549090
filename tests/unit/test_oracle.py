"""The oracle itself: its optimizer formulas against torch.optim, its modes against hand-made trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracle import Group, Oracle, Params, Rule, apply_rule, clipped, even_counts, norm


def _torch_optimizer(rule: Rule, p: torch.Tensor) -> torch.optim.Optimizer:
    if rule.kind == "sgd":
        return torch.optim.SGD([p], lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)
    kind = torch.optim.AdamW if rule.kind == "adamw" else torch.optim.Adam
    return kind([p], lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_rules_match_torch(kind: str) -> None:
    rule = Rule(kind, lr=0.03, weight_decay=0.2)
    theta, state = np.linspace(-1.0, 1.0, 7), {}
    p = torch.tensor(theta, requires_grad=True)
    optimizer = _torch_optimizer(rule, p)
    for step in range(5):
        grad = np.cos(theta + step)
        p.grad = torch.tensor(grad)
        optimizer.step()
        theta, state = apply_rule(rule, theta, state, grad, rule.lr)
        np.testing.assert_allclose(p.detach().numpy(), theta, rtol=1e-12)
    assert state["step"] == 5


def test_rule_is_pure() -> None:
    theta, grad = np.ones(3), np.full(3, 2.0)
    _, state = apply_rule(Rule("adamw", lr=0.1), theta, {}, grad, 0.1)
    before = {key: np.copy(value) for key, value in state.items()}
    apply_rule(Rule("adamw", lr=0.1), theta, state, grad, 0.1)
    assert all((state[key] == before[key]).all() for key in before)
    assert (theta == 1.0).all() and (grad == 2.0).all()


def test_clip_is_deepspeeds_rule() -> None:
    grad = {"a": np.array([3.0]), "b": np.array([4.0])}
    assert norm(grad) == 5.0
    assert norm(clipped(grad, 1.0)) == pytest.approx(5.0 / (5.0 + 1e-6))
    assert clipped(grad, 0.0) is grad
    assert norm(clipped(grad, 10.0)) == 5.0


def _quadratic(weights: Params, update: int, rank: int, micro: int) -> Params:
    """Gradient of w^2 / 2: the weight itself, so that a trajectory shows where gradients were taken."""
    return {"w": weights["w"].copy()}


def _toy(mode: str, **kwargs: object) -> Oracle:
    group = Group(("w",), Rule("sgd", lr=0.5, momentum=0.0))
    options = {"gradient": _quadratic, "ranks": 2, "counts": even_counts(1, 2), **kwargs}
    return Oracle(theta={"w": np.array([1.0])}, groups=[group], mode=mode, **options)


def test_sync_trajectory() -> None:
    assert [u.theta["w"][0] for u in _toy("sync").updates(3)] == [0.5, 0.25, 0.125]


def test_dpu_trajectory() -> None:
    # theta_{t+1} = theta_t - theta_{t-1} / 2, theta_{-1} = theta_0
    assert [u.theta["w"][0] for u in _toy("dpu").updates(4)] == [0.5, 0.0, -0.25, -0.25]


def test_wp_trajectory() -> None:
    # gradients at 1, 1, then at the predictions of updates 0, 1: theta_{t+1} - g_t / 2
    oracle = _toy("wp")
    first, second, third = oracle.updates(3)
    assert (first.theta["w"][0], first.shown["w"][0]) == (0.5, 0.0)
    assert (second.theta["w"][0], second.shown["w"][0]) == (0.0, -0.5)
    assert third.theta["w"][0] == 0.0  # the gradient was taken at 0.0


def test_acco_trajectory() -> None:
    # theta 1, estimate 1: g~ = g = 1 -> theta 0.5, estimate 0.5; then both halves at 0.5
    oracle = _toy("acco")
    assert [u.theta["w"][0] for u in oracle.updates(2)] == [0.5, 0.25]
    # With gradients that depend on the half the estimate and the commit differ.
    uneven = _toy("acco", gradient=lambda w, t, i, k: {"w": w["w"] * (1 + k)})
    first = uneven.updates(1)[0]
    assert (first.estimate["w"][0], first.theta["w"][0]) == (0.5, 0.25)
    second = uneven.updates(1)[0]
    assert second.estimate["w"][0] == 0.25 - 0.5 * 0.5
    assert second.theta["w"][0] == 0.25 - 0.5 * (0.5 + 2 * 0.25) / 2


def test_warmup_is_sync() -> None:
    warm, sync = _toy("dpu", warmup_updates=2).updates(3), _toy("sync").updates(3)
    assert [u.theta["w"][0] for u in warm] == [u.theta["w"][0] for u in sync]


@pytest.mark.parametrize("half", [0, 1])
def test_nan_in_either_half_skips_the_update(half: int) -> None:
    def poisoned(weights: Params, update: int, rank: int, micro: int) -> Params:
        bad = update == 1 and rank == 1 and micro == half
        return {"w": weights["w"] * (np.nan if bad else 1.0)}

    records = _toy("acco", gradient=poisoned).updates(3)
    assert [r.applied for r in records] == [True, False, True]
    assert records[1].theta["w"] == records[0].theta["w"]
    assert records[1].state["w"]["step"] == records[0].state["w"]["step"]
    if half == 0:
        assert records[1].estimate["w"] == records[1].theta["w"]


def test_unequal_counts_weigh_micro_batches() -> None:
    grads = _toy(
        "acco", counts=lambda t, rank: (2, 1) if rank == 0 else (1, 0), gradient=lambda w, t, i, k: {"w": w["w"] + i}
    )
    assert grads.updates(1)[0].theta["w"][0] == 1.0 - 0.5 * (3 * 1.0 + 2.0) / 4
    empty = _toy("acco", counts=lambda t, rank: (0, 0)).updates(1)[0]
    assert not empty.applied and empty.theta["w"][0] == 1.0
