"""What users do that must not go wrong silently: optimizers with hidden state, a load that fails, unread reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import RankFailure
from tests.distributed.training import Lion, Net, Run, one_update, parameter_groups, running, start


class Counting(Lion):
    """Remembers something outside `state`, which no checkpoint holds and estimates would change."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count = self.count + 1
        super().step(closure)


def step_with_hidden_state() -> None:
    """Job: two updates with an optimizer that counts on the instance."""
    model = Net()
    engine, _ = start(model, Run("sync", "lion").config(), Counting(parameter_groups(model), lr=1e-2))
    for update in range(2):
        one_update(engine, update)


def test_optimizer_with_state_on_the_instance_is_refused(doomed) -> None:
    with pytest.raises(RankFailure, match="changes its attribute 'count' in step"):
        doomed.run(step_with_hidden_state)


class CountingInPlace(Lion):
    """Counts in a tensor, a dict, or an entry of its state that belongs to no parameter."""

    def __init__(self, params: Any, where: str, **options: Any) -> None:
        super().__init__(params, **options)
        self.where, self.number, self.numbers = where, torch.zeros(1), {"n": 0}
        self.state["global"]["n"] = 0

    def step(self, closure: Any = None) -> None:
        if self.where == "tensor":
            self.number += 1
        else:
            (self.numbers if self.where == "dict" else self.state["global"])["n"] += 1
        super().step(closure)


def step_with_state_changed_in_place(where: str) -> str:
    """Job: one update."""
    model = Net()
    engine, _ = start(model, Run("sync", "lion").config(), CountingInPlace(parameter_groups(model), where, lr=1e-2))
    try:
        one_update(engine, 0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("where", "name"),
    [("tensor", "its attribute 'number'"), ("dict", "its attribute 'numbers'"), ("state", "'global'")],
)
def test_optimizer_that_counts_in_place_is_refused(where: str, name: str) -> None:
    from tests.distributed.harness import RankPool

    pool = RankPool(1)
    try:
        assert name in pool.run(step_with_state_changed_in_place, where)[0]
    finally:
        pool.close()


def load_nothing(run: Run, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Job: theta before and after a load that finds no checkpoint."""
    import megatron_acco

    def theta() -> torch.Tensor:
        with megatron_acco.real_parameters(engine):
            return torch.cat([p.detach().flatten() for p in engine.module.parameters()])

    with running(run) as (engine, _):
        for update in range(3):
            one_update(engine, update)
        before = theta()
        path, _ = engine.load_checkpoint(folder)
        assert path is None
        return before, theta()


@pytest.mark.parametrize("mode", ["acco", "wp"])
def test_a_failed_load_leaves_theta(ranks, tmp_path, mode: str) -> None:
    for before, after in ranks(2).run(load_nothing, Run(mode, "torch_adamw"), str(tmp_path / "nothing")):
        assert torch.equal(before, after)


def unread_reports(run: Run) -> int:
    """Job: reports kept by a loop that never asks for them."""
    with running(run) as (engine, zero):
        limit = zero._reports.maxlen
        assert limit is not None
        for update in range(limit // 2 + 4):
            one_update(engine, update)
        return len(zero._reports) - limit


def test_reports_that_nobody_reads_do_not_pile_up(ranks) -> None:
    assert ranks(1).run(unread_reports, Run("acco", "torch_adamw", gas=2)) == [0]
