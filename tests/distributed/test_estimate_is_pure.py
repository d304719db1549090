"""The estimate leaves no trace: not in the optimizer state, the step counts, the groups, nor the masters.

And it is the very step that the commit would make: for a gradient that is the same everywhere, theta~_{t+1} shown by
the estimate equals theta_{t+1} shown by the commit, whatever the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.training import (
    BETAS,
    EPS,
    LR,
    OPTIMIZERS,
    Net,
    Run,
    engine_for,
    json_config,
    one_update,
    parameter_groups,
    run_updates,
    running,
)


def _everything(zero: Any) -> dict[str, Any]:
    """All that an optimizer step may change: state dict (copied), group options, masters, number of states."""
    return {
        "optimizer": copy.deepcopy(zero.optimizer.state_dict()),
        "states": len(zero.optimizer.state),
        "masters": [p.detach().clone() for p in zero.single_partition_of_fp32_groups],
    }


def _assert_identical(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            _assert_identical(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _assert_identical(x, y, f"{path}[{i}]")
    elif torch.is_tensor(a):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), path
    else:
        assert a == b, path


def watch_estimates(run: Run) -> list[int]:
    """Job: compare everything before and after each estimate, in the lane; the updates compared."""
    import megatron_acco

    seen: list[int] = []
    failures: list[AssertionError] = []
    before: dict[str, Any] = {}
    with running(run) as (engine, zero):

        def remember(label: str) -> None:
            before.update(_everything(zero))

        def compare(spec: Any, update: int, shown: Any, report: Any) -> None:
            if spec.kind.value != "estimate":
                return
            seen.append(update)
            try:
                _assert_identical(before, _everything(zero))
                if update == 0:
                    assert all(not state for state in zero.optimizer.state.values()), "state after the first estimate"
            except AssertionError as failure:
                failures.append(failure)

        zero.lane.before_round, zero.round_observer = remember, compare
        for update in range(run.updates):
            one_update(engine, update)
        megatron_acco.drain(engine)
    if failures:
        raise failures[0]
    return seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_estimate_leaves_optimizer_state_bit_identical(ranks, optimizer: str) -> None:
    run = Run("acco", optimizer, updates=4, clip=0.5)
    assert ranks(2).run(watch_estimates, run) == [[0, 1, 2, 3]] * 2


class Linear(nn.Module):
    """A loss that is linear in the weights: the same gradient everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.vector = nn.Parameter(torch.randn(9))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        slope = torch.linspace(-1.0, 2.0, 35).view(5, 7)
        return (self.matrix * slope).sum() + (self.vector * torch.linspace(0.5, -0.25, 9)).sum()


def _fused_adam(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(groups, **options)


_ADAM = {"lr": LR[0], "betas": BETAS, "eps": EPS}
# Not Adagrad: DeepSpeed's ZeRO rebuilds it with one group, and fails at the first step of a second group.
ANY_OPTIMIZER: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, **_ADAM),
    "adamw_amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True, **_ADAM),
    "adamw_maximize": lambda groups: torch.optim.AdamW(groups, maximize=True, **_ADAM),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, foreach=True, **_ADAM),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, fused=True, **_ADAM),
    "adamw_tensor_lr": lambda groups: torch.optim.AdamW(groups, **{**_ADAM, "lr": torch.tensor(LR[0])}),
    "adam": lambda groups: torch.optim.Adam(groups, **_ADAM),
    "adam_amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True, **_ADAM),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=LR[0]),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=LR[0]),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=LR[0], momentum=0.9, centered=True),
    "sgd_nesterov": lambda groups: torch.optim.SGD(groups, lr=LR[0], momentum=0.9, nesterov=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=LR[0]),
    "deepspeed_no_bias_correction": lambda groups: _fused_adam(groups, bias_correction=False, **_ADAM),
    "deepspeed_l2": lambda groups: _fused_adam(groups, adam_w_mode=False, **_ADAM),
}


def constant_gradient(name: str) -> tuple[float, float]:
    """Job: the largest difference between estimate and commit, and the distance travelled."""
    model = Linear()
    optimizer = ANY_OPTIMIZER[name](parameter_groups(model))
    with engine_for(model, json_config("acco", gas=2), optimizer) as (engine, zero):
        rounds, _ = run_updates(engine, zero, range(4))
    worst = moved = 0.0
    for estimate, commit in zip(rounds[::2], rounds[1::2], strict=True):
        assert (estimate.kind, commit.kind) == ("estimate", "commit")
        for a, b, first in zip(estimate.shown, commit.shown, rounds[0].masters, strict=True):
            worst = max(worst, float(np.abs(a - b).max()))
            moved = max(moved, float(np.abs(first - b).max()))
    return worst, moved


@pytest.mark.parametrize("optimizer", ANY_OPTIMIZER)
def test_estimate_is_the_step_of_the_commit(ranks, optimizer: str) -> None:
    for worst, moved in ranks(2).run(constant_gradient, optimizer):
        # Weights are of order 1: a few units in the last place, which the order of operations may cost.
        assert worst <= 5e-7
        assert moved > 1e-4


def test_model_has_padding() -> None:
    """The shared model must exercise padding: its groups divide by no number of ranks above 1."""
    sizes = [sum(p.numel() for p in group["params"]) for group in parameter_groups(Net())]
    assert sizes == [49, 9]
