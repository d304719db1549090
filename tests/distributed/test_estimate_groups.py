"""Estimates among some of the ranks: each group's theta~ as the oracle has it, one theta on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import gpt
from tests.distributed import test_resharding as resharding
from tests.distributed.precision import fp16_section, low_precision_oracle, train_with_faults
from tests.distributed.reference import error, oracle_for
from tests.distributed.test_coarse_estimate import attach
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.test_muon import muon_oracle, train_muon
from tests.distributed.test_resume import resumed, straight
from tests.distributed.test_resume_tensor_parallel import run as train_gpt
from tests.distributed.training import Round, Run, assemble, batch, numpy, one_update, running, train
from tests.oracle import LossScale, Oracle


def by_group(per_rank: Sequence[Any], size: int) -> list[list[Round]]:
    """The rounds of each group of `size` consecutive ranks, which hold all shards between them."""
    return [assemble([r[:2] for r in per_rank[first : first + size]]) for first in range(0, len(per_rank), size)]


def check(per_rank: Sequence[Any], size: int, oracle: Oracle, tolerance: float, shown: float | None = None) -> None:
    """Every round of every group against the oracle; theta and the moments have the same bits on all groups."""
    groups = by_group(per_rank, size)
    for rounds in zip(*groups, strict=True):
        first = rounds[0]
        before = oracle.theta
        if first.kind == "estimate":
            want = oracle.updates(1)[0]
            for index, got in enumerate(rounds):
                assert error(got.shown, want.estimates[index]) < (shown or tolerance), (first.update, index)
                assert error(got.masters, before) < tolerance, "an estimate moved theta"
                assert got.applied == (want.estimate_norms[index] > 0.0)
                if got.applied:
                    assert got.grad_norm == pytest.approx(want.estimate_norms[index], rel=tolerance)
            continue
        if oracle.update <= first.update:  # an update of the warm-up has no estimate
            want = oracle.updates(1)[0]
        assert error(first.masters, want.theta) < tolerance, first.update
        assert first.applied == want.applied and first.micro_batches == want.micro_batches
        for other in rounds:
            assert_same_bits([first], [other])
            if want.applied:
                assert other.grad_norm == pytest.approx(want.commit_norm, rel=tolerance)


def grouped(size: int, **acco: Any) -> dict[str, Any]:
    return {"estimate_group": size, **acco}


def groups_of(ranks: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(0, ranks, size)]


RUNS = [
    (4, 2, Run("acco", "torch_adamw", clip=0.5, acco=grouped(2))),
    (4, 2, Run("acco", "lion", gas=5, acco=grouped(2, estimate_fraction=0.8, warmup_updates=3))),
    (4, 2, Run("acco", "ds_adamw", clip=0.5, acco=grouped(2, estimate_bits=8, estimate_block_size=16))),
    (3, 1, Run("acco", "sgd", clip=0.5, acco=grouped(1))),
]


@pytest.mark.parametrize(("count", "size", "run"), RUNS, ids=[f"{n}by{k}-{r.optimizer}" for n, k, r in RUNS])
def test_every_group_agrees_with_the_oracle(ranks, count: int, size: int, run: Run) -> None:
    per_rank = ranks(count).run(train, run)
    first_half = 4 if run.gas == 5 else None
    oracle = oracle_for(run, count, first_half=first_half, estimate_groups=groups_of(count, size))
    if "estimate_bits" in run.acco:
        attach(oracle, run, per_rank[:size])
    check(per_rank, size, oracle, 5e-6)
    estimates = [[r for r in rounds if r.kind == "estimate"][-1] for rounds in by_group(per_rank, size)]
    assert error(estimates[0].shown, estimates[1].shown) > 1e-4, "the groups saw the same gradients"


def test_bf16(ranks) -> None:
    """A commit's wire rounds each half inside a group, and the group's sum on the way to the others."""
    run = Run("acco", "ds_adamw", updates=6, clip=0.5, bf16=True, acco=grouped(2))
    per_rank = ranks(4).run(train, run)
    oracle = low_precision_oracle(run, 4, torch.bfloat16, estimate_groups=groups_of(4, 2))
    check(per_rank, 2, oracle, 2e-3, shown=2.0**-7)


def test_an_overflow_in_one_group_skips_its_estimate_and_everybodys_commit(ranks) -> None:
    run = Run("acco", "sgd", updates=6, clip=0.5, extra=fp16_section(6), acco=grouped(1))
    faults = [(3, 1, 0, np.inf)]
    traces = ranks(2).run(train_with_faults, run, faults, torch.float16)
    assert not any(trace.error for trace in traces), traces[0].error
    oracle = low_precision_oracle(
        run, 2, torch.float16, faults, loss_scale=LossScale(2.0**6, window=1000), wire=torch.float32
    )
    oracle.estimate_groups = groups_of(2, 1)
    per_rank = [(trace.rounds, trace.where) for trace in traces]
    check(per_rank, 1, oracle, 1e-3, shown=2.0**-8)
    seen = [[(r.kind, r.applied) for r in rounds if r.update == 3] for rounds in by_group(per_rank, 1)]
    assert seen == [[("estimate", True), ("commit", False)], [("estimate", False), ("commit", False)]]


RESUMED = [
    Run("acco", "torch_adamw", updates=8, clip=0.5, acco=grouped(2)),
    Run("acco", "ds_adamw", updates=8, bf16=True, acco=grouped(2, estimate_bits=4, estimate_stochastic_rounding=True)),
]


@pytest.mark.parametrize("run", RESUMED, ids=["fp32", "bf16-4bits"])
def test_a_resume_is_bit_identical_on_every_group(ranks, tmp_path, run: Run) -> None:
    whole = ranks(4).run(straight, run, 4, str(tmp_path))
    files = sorted(path.name for path in (tmp_path / "half").iterdir())
    assert [name for name in files if "optim_states" in name] == [
        f"{'bf16_' if run.bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]
    loaded = ranks(4).run(resumed, run, 4, str(tmp_path))
    for full, part in zip(by_group(whole, 2), by_group(loaded, 2), strict=True):
        assert_same_bits([r for r in full if r.update >= 4], part)
    for a, b in zip(whole, loaded, strict=True):
        assert all(np.array_equal(a[3][name], b[3][name]) for name in a[3])


def test_the_universal_form_and_zero1_take_the_shards_of_one_group(ranks, tmp_path) -> None:
    cases = {"net": resharding.Case(resharding.net, resharding.two_groups, extra={"acco": grouped(2)})}
    states = resharding.pick(ranks(4).run(resharding.save, cases, str(tmp_path)), "net")
    resharding.to_universal(f"{tmp_path}/net/saved", f"{tmp_path}/universal/net/saved")
    universal = ranks(4).run(resharding.resume, cases, f"{tmp_path}/universal", **resharding.UNIVERSAL)
    plain = ranks(2).run(resharding.resume, resharding.under(None, cases), str(tmp_path))
    for results in (universal[:2], universal[2:], plain):
        loaded = [pair[0] for pair in resharding.pick(results, "net")]
        resharding.assert_resumed(states[:2], loaded, estimate=False)


def load_refused(run: Run, folder: str) -> str:
    """Job: why a checkpoint does not load."""
    with running(run) as (engine, _):
        try:
            engine.load_checkpoint(folder, tag="half")
        except ValueError as refusal:
            return str(refusal)
    return ""


def test_a_missing_estimate_is_refused_on_all_ranks(ranks, tmp_path) -> None:
    """Also if a file of that name is left from a run whose estimates were of all ranks: that one is not looked at."""
    run = Run("acco", updates=5, acco=grouped(1))
    ranks(2).run(straight, run, 4, str(tmp_path))
    lost = tmp_path / "half" / "acco_group_1_rank_0_mp_rank_00_estimate.pt"
    stale = lost.rename(tmp_path / lost.name)
    for message in ranks(2).run(load_refused, run, str(tmp_path)):
        assert f"no file {lost} (on rank 1)" in message
    ranks(1).run(straight, dataclasses.replace(run, acco={}), 4, str(tmp_path))
    stale.rename(lost).write_bytes(b"")
    assert ranks(2).run(load_refused, run, str(tmp_path)) == ["", ""]


OTHERS = {"all ranks": (4, {}), "two ranks": (2, {}), "groups of one": (2, grouped(1)), "two of two": (4, grouped(2))}


@pytest.mark.parametrize("saved_by", ["two of two", "all ranks"])
@pytest.mark.parametrize("loaded_by", OTHERS)
def test_checkpoints_go_from_any_groups_to_any(ranks, tmp_path, saved_by: str, loaded_by: str) -> None:
    """The first commit after the load has the gradients of the saved theta (and of an estimate); theta is the saved."""

    def case(name: str) -> tuple[int, int, Run]:
        count, acco = OTHERS[name]
        return count, acco.get("estimate_group", count), Run("acco", "torch_adamw", updates=6, clip=0.5, acco=acco)

    count, size, run = case(saved_by)
    saved = by_group(ranks(count).run(straight, run, 4, str(tmp_path)), size)[0]
    theta = next(r for r in saved if (r.kind, r.update) == ("commit", 3))
    count, size, run = case(loaded_by)
    loaded = by_group(ranks(count).run(resumed, run, 4, str(tmp_path)), size)
    for rounds in loaded:
        estimate = rounds[0]  # does not move theta
        assert estimate.kind == "estimate" and estimate.steps == theta.steps
        assert all(np.array_equal(estimate.masters[n], theta.masters[n]) for n in theta.masters)
        for moment, values in theta.state.items():
            assert all(np.array_equal(estimate.state[moment][n], values[n]) for n in values), moment


def test_muon_orthogonalizes_inside_a_group(ranks) -> None:
    run = Run("acco", updates=6, clip=0.5, acco=grouped(2))
    per_rank = ranks(4).run(train_muon, run)
    oracle = muon_oracle(run, 4)
    oracle.estimate_groups = groups_of(4, 2)
    without_state = [([dataclasses.replace(r, state=[{}, {}]) for r in rounds], where) for rounds, where in per_rank]
    check(without_state, 2, oracle, 2e-5)


def figures(run: Run) -> list[Any]:
    """Job: (kind, micro-batches, by_rank) of every round of a training, as this rank has them."""
    with running(run) as (engine, zero):
        for update in range(run.updates):
            one_update(engine, update)
        engine.drain()
        return [(r.kind.value, r.micro_batches, r.by_rank) for r in zero.take_reports()]


def test_all_ranks_hear_of_all_estimates(ranks) -> None:
    """With the commit: advice and splits rest on the same figures everywhere."""
    run = Run("acco", updates=14, gas=5, acco=grouped(2, estimate_fraction="auto"))
    first, *others = ranks(4).run(figures, run)
    assert [kind for kind, _, _ in first] == ["estimate", "commit"] * 14
    for estimate, commit in zip(first[::2], first[1::2], strict=True):
        halves = [(a.micro_batches, b.micro_batches) for a, b in zip(estimate[2], commit[2], strict=True)]
        assert len(halves) == 4 and len(set(halves)) == 1 and sum(halves[0]) == 5
        assert estimate[1] == 2 * halves[0][0] and commit[1] == 20
    for other in others:
        assert other == first


def test_adaptive_accumulation(ranks) -> None:
    run = Run("acco", updates=8, acco=grouped(2, accumulation="adaptive", max_micro_batches_per_half=6))
    for rounds in ranks(4).run(adaptive, run):
        for (_, _, first), (_, total, second) in zip(rounds[::2], rounds[1::2], strict=True):
            counts = [part.micro_batches for part in (*first, *second)]
            assert len(counts) == 8 and total == sum(counts) and all(2 <= count <= 6 for count in counts)


def adaptive(run: Run) -> list[Any]:
    """Job: as `figures`, however many micro-batches an update has."""
    with running(run) as (engine, zero):
        micro = 0
        while engine.global_steps < run.updates:
            engine.backward(engine(*batch(engine.global_steps, torch.distributed.get_rank(), micro)))
            engine.step()
            micro += 1
        engine.drain()
        return [(r.kind.value, r.micro_batches, r.by_rank) for r in zero.take_reports()]


def readings(run: Run) -> dict[str, Any]:
    """Job: what a user reads in the second half of the third update."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    with running(run) as (engine, _):
        for update in range(2):
            one_update(engine, update)
        parameter = next(p for p in engine.module.parameters() if p.dim() > 1)
        total = torch.zeros_like(parameter)
        hook = parameter.register_hook(lambda grad: total.add_(grad) is None or None)
        for micro in range(3):
            engine.backward(engine(*batch(2, torch.distributed.get_rank(), micro)))
            engine.step()
        hook.remove()
        torch.distributed.all_reduce(total)
        with engine.real_parameters():
            real = numpy(parameter)
        want = numpy(total * run.gas / (3 * torch.distributed.get_world_size()))
        return {
            "real": real,
            "master": numpy(safe_get_full_fp32_param(parameter)),
            "gradient": (numpy(safe_get_full_grad(parameter)), want),
        }


def test_what_a_user_reads_is_of_all_ranks(ranks) -> None:
    first, *others = ranks(4).run(readings, Run("acco", acco=grouped(2)))
    assert np.array_equal(first["real"], first["master"])
    for other in [first, *others]:
        assert np.array_equal(other["real"], first["real"]) and np.array_equal(other["master"], first["real"])
        assert np.allclose(*other["gradient"], rtol=1e-5, atol=1e-7)


def test_tensor_parallel_ranks_keep_their_copies(ranks, tmp_path) -> None:
    case = gpt.Case(tp=2, sequence_parallel=True, acco=grouped(1))
    outcomes = ranks(4).run(train_gpt, case, range(6), str(tmp_path / "groups"), save_at=5)
    for outcome in outcomes:
        for name in outcome.real:
            like = outcomes[0] if outcome.split[name] is None else outcomes[outcome.tp_rank]
            assert torch.equal(outcome.real[name], like.real[name]), f"theta of {name}"


def refusal(run: Run, drift: bool = False) -> str:
    """Job: why a training ends; `drift`: a bit of one rank's shard changes after the second update."""
    try:
        with running(run) as (engine, zero):
            for update in range(4):
                one_update(engine, update)
                if drift and update == 1 and torch.distributed.get_rank() == 3:
                    engine.drain()
                    zero.single_partition_of_fp32_groups[0].view(torch.int32)[0] += 1
            engine.drain()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_a_shard_that_differs_between_groups_ends_the_training_on_all_ranks(ranks) -> None:
    for message in ranks(4).run(refusal, Run("acco", acco=grouped(2)), drift=True):
        assert "before update 2 the data-parallel ranks 1, 3 hold different weights in the same shard" in message


def test_groups_must_be_of_one_size(ranks) -> None:
    for message in ranks(4).run(refusal, Run("acco", acco=grouped(3))):
        assert "cuts the 4 data-parallel ranks into groups of 3, 1, which must be equal" in message


def test_one_group_is_all_ranks(ranks) -> None:
    """`node` on a single host, or a group as large as the job, is what `all` is."""
    runs = [Run("acco", updates=4, acco=acco) for acco in ({}, {"estimate_group": "node"}, grouped(2))]
    whole, node, two = (assemble(ranks(2).run(train, dataclasses.replace(run))) for run in runs)
    assert_same_bits(whole, node)
    assert_same_bits(whole, two)


def groups_left_twice(run: Run) -> int:
    """Job: process groups that an engine has left to the next one more than once."""
    from megatron_acco.zero import collectives

    with running(run) as (engine, _):
        one_update(engine, 0)
        engine.destroy()
    left = [group for groups in collectives._free_groups.values() for group in groups]
    return len(left) - len(set(left))


def test_an_engine_leaves_its_groups_once(ranks) -> None:
    """Else two threads share one, or ranks take different ones and wait for each other."""
    assert ranks(4).run(groups_left_twice, Run("acco", acco=grouped(2))) == [0] * 4


def trained_with(accos: list[dict[str, Any]]) -> str:
    """Job: why ranks with different settings do not train."""
    return refusal(Run("acco", acco=accos[torch.distributed.get_rank()]))


def test_ranks_that_disagree_on_the_groups_are_refused(ranks) -> None:
    for message in ranks(2).run(trained_with, [{}, grouped(1)]):
        assert "\"acco.estimate_group\" must be the same on all ranks; by rank it is ['all', 1]" in message
