"""Between ACCO and stock ZeRO-1 by one JSON section, over a checkpoint; exports of a running training; other loops."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.reference import error, oracle_for
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.training import (
    Net,
    Round,
    Run,
    assemble,
    batch,
    client_optimizer,
    layout,
    named,
    numpy,
    one_update,
    parameter_groups,
    record_rounds,
    run_updates,
    running,
    shards,
    start,
    train,
)


def switch(first: Run, second: Run, folder: str) -> tuple[list[Round], list[Round], Any]:
    """Job: 4 updates of one run, save, load into an engine of the other, 4 more."""
    with running(first) as (engine, zero):
        before, where = run_updates(engine, zero, range(4))
        engine.save_checkpoint(folder, tag="switch")
    model = Net(seed=50)
    engine, zero = start(model, second.config(), client_optimizer(second.optimizer, parameter_groups(model)))
    path, _ = engine.load_checkpoint(folder, tag="switch")
    assert path is not None and engine.global_steps == 4
    after, _ = run_updates(engine, zero, range(4, 8))
    engine.destroy()
    return before, after, where


@pytest.mark.parametrize(
    ("first", "second"), [("acco", None), (None, "acco"), ("acco", "dpu"), ("dpu", "acco"), ("wp", "sync")]
)
def test_switching_keeps_weights_and_moments(ranks, tmp_path, first: str | None, second: str | None) -> None:
    run, then = Run(first, "torch_adamw", clip=0.5), Run(second, "torch_adamw", clip=0.5)
    results = ranks(2).run(switch, run, then, str(tmp_path))
    before, after = (assemble([(r[i], r[2]) for r in results]) for i in range(2))
    oracle = oracle_for(run, 2)
    for want, got in zip(oracle.updates(4), [r for r in before if r.kind == "commit"], strict=True):
        assert error(got.masters, want.theta) < 5e-6
    # The other mode starts at theta_4 and S_4, with nothing in flight.
    follow = oracle_for(then, 2)
    follow.__dict__.update(theta=oracle.theta, state=oracle.state, applied=oracle.applied)
    follow.__post_init__()
    follow.update = 4
    for want, got in zip(follow.updates(4), [r for r in after if r.kind == "commit"], strict=True):
        assert error(got.masters, want.theta) < 5e-6, (got.update, "after the switch")
        assert error(got.shown, want.shown) < 5e-6


def export(run: Run, folder: str, slow: bool) -> tuple[Any, ...]:
    """Job: exports right after step(), with a commit in flight; they must hold theta_t."""
    import megatron_acco

    with running(run) as (engine, zero):
        if slow:
            zero.lane.before_round = lambda label: time.sleep(0.2)
        for update in range(3):
            one_update(engine, update)
        engine.save_16bit_model(folder, "weights.bin")
        for update in range(3, 4):
            one_update(engine, update)
        with megatron_acco.real_parameters(engine):
            inside = {name: numpy(v) for name, v in engine.module_state_dict().items()}
        masters = shards(zero)[0]
        return inside, masters, layout(engine, zero)


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp"])
def test_exports_hold_the_committed_weights(ranks, tmp_path, mode: str) -> None:
    run = Run(mode, "torch_adamw")
    results = ranks(2).run(export, run, str(tmp_path), True)
    oracle = oracle_for(run, 2)
    third = oracle.updates(3)[-1].theta
    written = {name: numpy(v) for name, v in torch.load(tmp_path / "weights.bin", weights_only=True).items()}
    masters = named([r[1] for r in results], results[0][2])
    assert error(results[0][0], oracle.updates(1)[-1].theta) < 5e-6
    assert all(np.array_equal(results[0][0][name], masters[name]) for name in masters)
    assert error(written, third) < 5e-6, "save_16bit_model"


def loss_backward(run: Run) -> tuple[list[Round], Any]:
    """Job: loss.backward() by the caller instead of engine.backward(loss), which DeepSpeed supports too."""
    with running(run) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(run.updates):
            for micro in range(run.gas):
                loss = engine(*batch(update, torch.distributed.get_rank(), micro))
                engine.scale(loss).backward()
                engine.step()
        import megatron_acco

        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


def test_callers_that_call_loss_backward(ranks) -> None:
    run = Run("acco", "ds_adamw", updates=4, clip=0.5)
    usual, own = (assemble(ranks(2).run(job, run)) for job in (train, loss_backward))
    assert [(r.kind, r.micro_batches) for r in usual] == [(r.kind, r.micro_batches) for r in own]
    assert_same_bits(usual, own)


def two_engines(run: Run) -> tuple[tuple[list[Round], Any], ...]:
    """Job: two trainings in one process, their updates in turn, each with its own lane."""
    with running(run) as (first, zero_first), running(run) as (second, zero_second):
        rounds = record_rounds(zero_first), record_rounds(zero_second)
        for update in range(run.updates):
            one_update(first, update)
            one_update(second, update)
        import megatron_acco

        megatron_acco.drain(first)
        megatron_acco.drain(second)
        return (rounds[0], layout(first, zero_first)), (rounds[1], layout(second, zero_second))


def test_two_engines_in_one_process(ranks) -> None:
    run = Run("acco", "torch_adamw", updates=4, clip=0.5)
    alone = assemble(ranks(2).run(train, run))
    results = ranks(2).run(two_engines, run)
    for index in range(2):
        assert_same_bits(alone, assemble([r[index] for r in results]))
