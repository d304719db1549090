"""Mode sync, in the product's buffers, makes the updates of DeepSpeed's own ZeRO-1 on the same data."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.reference import error
from tests.distributed.training import Run, assemble, train

RUNS = [
    (1, Run("sync", "ds_adamw", clip=0.5)),
    (2, Run("sync", "torch_adamw", clip=0.5)),
    (2, Run("sync", "cpu_adamw", gas=1)),
    (3, Run("sync", "ds_adamw")),
    (3, Run("sync", "sgd", clip=0.5)),
    (4, Run("sync", "ds_adam", clip=0.5)),
    (2, Run("acco", "ds_adamw", clip=0.5, acco={"warmup_updates": 12})),
]


@pytest.mark.parametrize(("ranks_", "run"), RUNS, ids=[f"{n}-{r.mode}-{r.optimizer}-gas{r.gas}" for n, r in RUNS])
def test_sync_equals_deepspeed_zero1(ranks, ranks_: int, run: Run) -> None:
    ours = assemble(ranks(ranks_).run(train, run))
    stock = assemble(ranks(ranks_).run(train, dataclasses.replace(run, mode=None, acco={})))
    assert len(ours) == len(stock) == run.updates
    for a, b in zip(ours, stock, strict=True):
        assert error(a.masters, b.masters) < 1e-6, a.update
        assert error(a.shown, b.shown) < 1e-6, a.update
        assert a.state.keys() == b.state.keys()
        assert a.steps == b.steps
        for moment, value in a.state.items():
            assert error(value, b.state[moment]) < 2e-6, (a.update, moment)
        if run.clip:
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
