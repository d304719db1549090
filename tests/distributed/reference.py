"""The oracle (tests/oracle.py) of a training of tests/distributed/training.py, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from tests.distributed.training import BETAS, EPS, LR, MOMENTUM, RULES, WEIGHT_DECAY, Net, Round, Run, batch
from tests.oracle import Group, Oracle, Params, Rule, even_counts


def rules(optimizer: str) -> list[Rule]:
    """The oracle's rules of the two groups of `parameter_groups`."""
    return [Rule(RULES[optimizer], LR[i], WEIGHT_DECAY[i], BETAS, EPS, MOMENTUM) for i in range(2)]


def float64_gradient(model: nn.Module, data: Callable[..., Any] = batch) -> Callable[..., Params]:
    """The oracle's gradient callback: autograd in float64 on the same numbers."""
    model = model.double()
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}

    def gradient(weights: Params, update: int, rank: int, micro: int) -> Params:
        leaves = {
            name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
            for name, value in weights.items()
            if name not in frozen
        }
        loss = functional_call(model, {**leaves, **frozen}, data(update, rank, micro, torch.float64))
        grads = torch.autograd.grad(loss.double(), list(leaves.values()), allow_unused=True)
        return {
            name: (torch.zeros_like(leaf) if g is None else g).numpy()
            for (name, leaf), g in zip(leaves.items(), grads, strict=True)
        }

    return gradient


def oracle_of(
    model: nn.Module,
    groups: Sequence[tuple[Sequence[str], Rule]],
    data: Callable[..., Any] = batch,
    *,
    gas: int = 4,
    first_half: int | None = None,
    **options: Any,
) -> Oracle:
    """An oracle for `model` (fp32) whose `groups` are (parameter names, rule); equal halves unless told."""
    theta = {name: p.detach().numpy().astype(np.float64) for name, p in model.named_parameters()}
    options.setdefault("counts", even_counts(gas // 2 if first_half is None else first_half, gas))
    return Oracle(
        theta=theta,
        groups=[Group(tuple(names), rule) for names, rule in groups],
        gradient=float64_gradient(model, data),
        **options,
    )


def oracle_for(
    run: Run,
    ranks: int,
    first_half: int | None = None,
    data: Callable[..., Any] = batch,
    model: nn.Module | None = None,
    **options: Any,
) -> Oracle:
    """The oracle of a `Run` on `ranks` ranks."""
    model = model or Net(seed=run.model_seed)
    names = [[n for n, p in model.named_parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    return oracle_of(
        model,
        list(zip(names, rules(run.optimizer), strict=True)),
        data,
        gas=run.gas,
        first_half=first_half,
        mode=run.mode or "sync",
        ranks=ranks,
        clip=run.clip,
        warmup_updates=run.acco.get("warmup_updates", 0),
        **options,
    )


def error(got: Params, want: Params) -> float:
    """Largest over the tensors of max|a - b| / max|b|."""
    assert got.keys() == want.keys()
    worst = 0.0
    for name, b in want.items():
        if b.size:
            scale = float(np.abs(b).max())
            worst = max(worst, float(np.abs(got[name] - b).max()) / (scale if scale > 0.0 else 1.0))
    return worst


def check_commits(rounds: list[Round], oracle: Oracle, tolerance: float = 5e-6) -> None:
    """Rounds of mode acco against the oracle: estimates, commits and moments of all trained parameters, norms."""
    names = [name for group in oracle.groups for name in group.names if oracle.theta[name].size]
    for estimate, commit in zip(rounds[::2], rounds[1::2], strict=True):
        assert (estimate.kind, commit.kind, estimate.update, commit.update) == (
            "estimate",
            "commit",
            *2 * [oracle.update],
        )
        want = oracle.updates(1)[0]
        assert error(estimate.shown, {n: want.estimate[n] for n in names}) < tolerance, estimate.update
        assert error(commit.masters, {n: want.theta[n] for n in names}) < tolerance, commit.update
        assert commit.applied == want.applied
        for moment, got in commit.state.items():
            assert error(got, {n: want.state[n][moment] for n in names}) < tolerance, (commit.update, moment)
        if want.applied:
            assert abs(commit.grad_norm - want.commit_norm) <= tolerance * want.commit_norm
