"""Speed changes no bit: two runs agree, a slow lane agrees, and neither the caller's order nor its loop matters.

Kinds of fault: overlap buffer rewritten when the network is slower than compute (B21), collectives from two threads
in different order (B24), forward with weights that were not gathered yet (B25).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.reference import error, oracle_for
from tests.distributed.training import (
    Round,
    Run,
    assemble,
    batch,
    named,
    numpy,
    one_update,
    record_rounds,
    running,
    shards,
    train,
)

RUN = Run("acco", "ds_adamw", updates=5, clip=0.5)


def assert_same_bits(a: list[Round], b: list[Round]) -> None:
    """Two trainings, round by round: shown weights, masters, moments, norms."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.kind, x.update, x.grad_norm, x.steps) == (y.kind, y.update, y.grad_norm, y.steps)
        for left, right in [(x.shown, y.shown), (x.masters, y.masters), *((x.state[k], y.state[k]) for k in y.state)]:
            assert left.keys() == right.keys()
            for name in left:
                assert np.array_equal(left[name], right[name]), (x.kind, x.update, name)


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp", "sync"])
def test_two_runs_are_bit_identical(ranks, mode: str) -> None:
    run = dataclasses.replace(RUN, mode=mode, updates=12)
    assert_same_bits(*(assemble(ranks(2).run(train, run)) for _ in range(2)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_B21_slow_lane_changes_no_bit(ranks, seed: int) -> None:
    quick = assemble(ranks(2).run(train, RUN))
    assert_same_bits(quick, assemble(ranks(2).run(train, dataclasses.replace(RUN, delay_seed=seed))))


@pytest.mark.parametrize("mode", ["dpu", "wp"])
def test_B21_slow_lane_changes_no_bit_in_other_modes(ranks, mode: str) -> None:
    run = dataclasses.replace(RUN, mode=mode)
    quick = assemble(ranks(2).run(train, run))
    assert_same_bits(quick, assemble(ranks(2).run(train, dataclasses.replace(run, delay_seed=7))))


@pytest.mark.parametrize("bucket", [10, 10**9])
def test_B21_bucket_size_changes_no_bit(ranks, bucket: int) -> None:
    zero = {"zero": {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}}
    other = dataclasses.replace(RUN, extra=zero, delay_seed=3)
    assert_same_bits(assemble(ranks(2).run(train, RUN)), assemble(ranks(2).run(train, other)))


def gradient_owners(run: Run) -> None:
    """Job: the buffer that compute adds to is never the one that the lane reads, nor is it changed by the lane."""
    with running(run) as (engine, zero):
        zero.lane.before_round = lambda label: time.sleep(0.1)
        parameter = next(p for p in engine.module.parameters() if p.numel())
        storages = []
        for update in range(run.updates):
            for micro in range(run.gas):
                engine.backward(engine(*batch(update, torch.distributed.get_rank(), micro)))
                # Between the first and the last micro-batch of a half the gradient stays with the main thread.
                if micro in (0, 2):
                    storages.append(parameter.main_grad.untyped_storage().data_ptr())
                    before = parameter.main_grad.clone()
                    time.sleep(0.12)  # meanwhile the round of the previous half has run
                    assert torch.equal(before, parameter.main_grad)
                engine.step()
        assert len(set(storages)) == 2, "two buffers, swapped at each half"
        assert all(a != b for a, b in itertools.pairwise(storages))
        flat = {
            t.untyped_storage().data_ptr() for t in (*zero.bit16_groups_flat, *zero.single_partition_of_fp32_groups)
        }
        assert not flat & set(storages)


def test_B21_no_buffer_has_two_owners(ranks) -> None:
    ranks(2).run(gradient_owners, Run("acco", "ds_adamw", updates=3))


def _digest(engine: Any) -> str:
    state = b"".join(numpy(p).tobytes() for p in engine.module.parameters())
    return hashlib.sha256(state).hexdigest()


def weights_in_use(run: Run, disturb: bool) -> tuple[list[list[str]], list[Any], list[Any], list[Round], Any]:
    """Job: a digest of the weights at each forward and after each backward; evaluation in between."""
    import megatron_acco
    from tests.distributed.training import layout

    rank = torch.distributed.get_rank()
    digests, real, masters = [], [], []
    with running(run) as (engine, zero):
        rounds = record_rounds(zero)
        if disturb:
            zero.lane.before_round = lambda label: time.sleep(0.2 if rank == 1 else 0.0)
        for update in range(run.updates):
            digests.append([])
            for micro in range(run.gas):
                digests[-1].append(_digest(engine))
                loss = engine(*batch(update, rank, micro))
                assert _digest(engine) == digests[-1][-1]
                engine.backward(loss)
                engine.step()
            if disturb:
                before = _digest(engine)
                with megatron_acco.real_parameters(engine):
                    real.append({name: numpy(p) for name, p in engine.module.named_parameters()})
                    masters.append(shards(zero)[0])
                    sum(float(p.norm()) for p in engine.module.parameters())
                    with torch.no_grad():
                        engine(*batch(99, rank, 0))
                assert _digest(engine) == before, "evaluation must put the shown weights back"
        megatron_acco.drain(engine)
        return digests, real, masters, rounds, layout(engine, zero)


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp", "sync"])
def test_B25_one_version_of_weights_inside_a_window(ranks, mode: str) -> None:
    run = Run(mode, "ds_adamw", updates=4)
    calm = ranks(2).run(weights_in_use, run, False)
    delayed = ranks(2).run(weights_in_use, run, True)
    assert calm[0][0] == calm[1][0] == delayed[0][0] == delayed[1][0]
    for update in calm[0][0]:
        halves = (update[:2], update[2:]) if mode == "acco" else (update,)
        assert all(len(set(half)) == 1 for half in halves), "weights changed inside a window"
    windows = [half for update in calm[0][0] for half in ((update[0], update[2]) if mode == "acco" else update[:1])]
    # theta_0 is used twice at the start by the modes that run ahead; after that every window has new weights.
    assert len(set(windows)) == len(windows) - (mode != "sync")
    rounds = [assemble([(r[3], r[4]) for r in result]) for result in (calm, delayed)]
    assert_same_bits(*rounds)


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp"])
def test_B25_evaluation_sees_the_committed_weights(ranks, mode: str) -> None:
    run = Run(mode, "ds_adamw", updates=4)
    results = ranks(2).run(weights_in_use, run, True)
    oracle = oracle_for(run, 2)
    for update, want in enumerate(oracle.updates(run.updates)):
        for rank in range(2):
            assert error(results[rank][1][update], want.theta) < 1e-5
        whole = named([results[rank][2][update] for rank in range(2)], results[0][4])
        assert all(np.array_equal(whole[name], value) for name, value in results[0][1][update].items())


def busy_caller(run: Run, folder: str, busy: bool) -> tuple[list[Round], Any]:
    """Job: everything that a caller may ask right after step(), with a round in flight and rank 1 late."""
    import megatron_acco
    from tests.distributed.training import layout

    rank = torch.distributed.get_rank()
    with running(run) as (engine, zero):
        rounds = record_rounds(zero)
        if busy:
            zero.lane.before_round = lambda label: time.sleep(0.3 * rank)
        for update in range(run.updates):
            for micro in range(run.gas):
                engine.backward(engine(*batch(update, rank, micro)))
                engine.step()
                if busy and micro == 1:
                    # In the middle of an update, beside the estimate.
                    total = torch.ones(1)
                    torch.distributed.all_reduce(total)
                    assert total.item() == 2.0
            if busy:
                engine.get_global_grad_norm()
                engine.get_lr()
                torch.distributed.barrier()
                loss = torch.tensor([float(rank)])
                torch.distributed.all_reduce(loss)
                assert loss.item() == 1.0
                if update == 1:
                    engine.save_checkpoint(folder, tag=f"update{update}")
                megatron_acco.round_reports(engine)
        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp"])
def test_B24_public_calls_beside_a_round_in_flight(ranks, tmp_path, mode: str) -> None:
    run = Run(mode, "ds_adamw", updates=3)
    calm = assemble(ranks(2).run(busy_caller, run, str(tmp_path), False))
    assert_same_bits(calm, assemble(ranks(2).run(busy_caller, run, str(tmp_path), True)))


def step_once_per_update(run: Run) -> tuple[list[Round], Any]:
    """Job: the loop of trainers that mark the boundary themselves and call step() only there."""
    import megatron_acco
    from tests.distributed.training import layout

    with running(run) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(run.updates):
            for micro in range(run.gas):
                last = micro == run.gas - 1
                engine.set_gradient_accumulation_boundary(is_boundary=last)
                engine.backward(engine(*batch(update, torch.distributed.get_rank(), micro)))
                if last:
                    engine.step()
            assert engine.global_steps == update + 1
        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


@pytest.mark.parametrize("mode", ["acco", "dpu", "sync"])
def test_callers_that_step_once_per_update(ranks, mode: str) -> None:
    run = dataclasses.replace(RUN, mode=mode)
    assert_same_bits(assemble(ranks(2).run(train, run)), assemble(ranks(2).run(step_once_per_update, run)))


def zero_grad_calls(run: Run) -> tuple[list[Round], Any]:
    """Job: a loop that also calls every zero_grad it can find, between updates."""
    with running(run) as (engine, zero):
        from tests.distributed.training import layout

        rounds = record_rounds(zero)
        for update in range(run.updates):
            one_update(engine, update)
            engine.zero_grad()
            engine.module.zero_grad()
            engine.module.zero_grad(set_to_none=False)
            zero.zero_grad()
            zero.zero_grad(set_to_none=False)
            zero.optimizer.zero_grad()
        import megatron_acco

        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


def test_B22_zero_grad_resets_nothing_that_counts(ranks) -> None:
    assert_same_bits(assemble(ranks(2).run(train, RUN)), assemble(ranks(2).run(zero_grad_calls, RUN)))
