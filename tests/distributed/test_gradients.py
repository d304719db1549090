"""What a commit applies: average, clip, norm, finiteness, precision of the sum, nothing twice and nothing lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.reference import check_commits, error, oracle_for
from tests.distributed.training import (
    Net,
    Round,
    Run,
    assemble,
    batch,
    client_optimizer,
    engine_for,
    json_config,
    layout,
    numpy,
    parameter_groups,
    record_rounds,
    run_updates,
    running,
    train_model,
)

SLOPE_NORM = 10.0


class Slope(nn.Module):
    """A loss linear in the weights: gradient `factor` * slope, of norm 10 for factor 1, two groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.vector = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))
        slope = torch.linspace(-1.0, 2.0, 44)
        self.register_buffer("slope", slope * (SLOPE_NORM / slope.norm()))

    def forward(self, factor: float) -> torch.Tensor:
        weights = torch.cat([self.matrix.flatten(), self.vector])
        return (weights * self.slope).sum() * factor


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with learning rate 1 over two groups: the weight change is the gradient."""
    params = list(model.parameters())
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=1.0)


def frozen_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def unit_slope(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[float]:
    return (1.0,)


def uneven_slope(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[float]:
    """Half 1 sees 0.2 and 0.6, half 2 sees 1.4 and 1.8 (mean 1), on every rank."""
    return ((0.2, 0.6, 1.4, 1.8)[micro],)


def samples_by_gas(gas: int) -> Callable[..., Any]:
    """The same 16 samples per rank and update, cut into `gas` micro-batches."""

    def data(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        parts = [batch(update, rank, part) for part in range(4)]
        size = 16 // gas
        return tuple(torch.cat(t)[micro * size : (micro + 1) * size].to(dtype) for t in zip(*parts, strict=True))

    return data


def norm_and_step_by_gas(mode: str, gas: int) -> Any:
    """Job: reported norm at lr 0, then the weight change of one update at SGD lr 1."""
    results = []
    for make_optimizer in (frozen_sgd, lambda model: torch.optim.SGD(model.parameters(), lr=1.0)):
        model = Net()
        config = json_config(mode, gas=gas, train_micro_batch_size_per_gpu=16 // gas)
        with engine_for(model, config, make_optimizer(model)) as (engine, zero):
            rounds, where = run_updates(engine, zero, range(1), samples_by_gas(gas))
            results.append((rounds, where, float(engine.get_global_grad_norm())))
    return results


def test_B10_gradient_accumulation_scaling(ranks) -> None:
    norms, moves = {}, {}
    for mode, gas in [("sync", 1), ("acco", 2), ("acco", 4), ("acco", 8), ("sync", 4), ("dpu", 4)]:
        results = ranks(2).run(norm_and_step_by_gas, mode, gas)
        still, moved = (assemble([r[i][:2] for r in results])[-1] for i in range(2))
        norms[mode, gas] = still.grad_norm
        moves[mode, gas] = moved.masters
        start = {name: numpy(p) for name, p in Net().named_parameters()}
        assert error(still.masters, start) == 0.0
        assert results[0][0][2] == pytest.approx(still.grad_norm, rel=1e-6), "engine and report state one norm"
        assert still.micro_batches == 2 * gas
    assert all(norm == pytest.approx(norms["sync", 1], rel=1e-6) for norm in norms.values()), norms
    assert all(error(move, moves["sync", 1]) < 1e-6 for move in moves.values())


def unequal_counts(done: tuple[int, ...], updates: int) -> tuple[list[Round], Any]:
    """Job: rank i does `done[i]` of the 4 micro-batches of an update, then closes it."""
    import megatron_acco

    rank, model = torch.distributed.get_rank(), Net()
    config = json_config("acco", gas=4, clip=0.5)
    with engine_for(model, config, client_optimizer("torch_adamw", parameter_groups(model))) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(updates):
            for micro in range(done[rank]):
                engine.set_gradient_accumulation_boundary(is_boundary=micro == done[rank] - 1)
                engine.backward(engine(*ragged_batch(update, rank, micro)))
                engine.step()
            if done[rank] == 0:
                engine.set_gradient_accumulation_boundary(is_boundary=True)
                engine.step()
        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


def ragged_batch(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Micro-batches of 1 to 4 samples: each counts once, however large it is."""
    x, y = batch(update, rank, micro, dtype)
    size = 1 + (rank + micro) % 4
    return x[:size], y[:size]


@pytest.mark.parametrize("done", [(4, 1), (3, 4), (4, 3, 1), (4, 0)], ids=str)
def test_B12_ranks_contribute_different_numbers_of_micro_batches(ranks, done: tuple[int, ...]) -> None:
    n = len(done)
    rounds = assemble(ranks(n).run(unequal_counts, done, 6))
    halves = [(min(2, count), max(0, count - 2)) for count in done]
    oracle = oracle_for(Run("acco", clip=0.5), n, counts=lambda t, rank: halves[rank], data=ragged_batch)
    check_commits(rounds, oracle)
    assert {r.micro_batches for r in rounds if r.kind == "commit"} == {sum(done)}
    assert {r.micro_batches for r in rounds if r.kind == "estimate"} == {sum(first for first, _ in halves)}


def test_B12_no_micro_batch_anywhere_is_no_step(ranks) -> None:
    rounds = assemble(ranks(2).run(unequal_counts, (0, 0), 2))
    start = {name: numpy(p) for name, p in Net().named_parameters()}
    for round_ in rounds:
        assert not round_.applied and round_.micro_batches == 0
        assert error(round_.masters, start) == 0.0 and error(round_.shown, start) == 0.0


def own_accumulation_steps(gas_by_rank: tuple[int, ...]) -> Any:
    """Job: the JSON of each rank says another number of micro-batches."""
    model = Net()
    config = json_config("acco", gas=gas_by_rank[torch.distributed.get_rank()], clip=0.5)
    try:
        with engine_for(model, config, client_optimizer("torch_adamw", parameter_groups(model))) as (engine, zero):
            return run_updates(engine, zero, range(3), ragged_batch)
    except ValueError as refused:
        return str(refused)


def test_B12_accumulation_steps_that_differ_between_ranks_are_never_averaged_wrongly(ranks) -> None:
    answers = ranks(2).run(own_accumulation_steps, (6, 2))
    if all(isinstance(answer, str) for answer in answers):
        assert all("gradient_accumulation_steps" in answer for answer in answers)
        return
    halves = [(3, 3), (1, 1)]
    check_commits(
        assemble(answers),
        oracle_for(Run("acco", clip=0.5), 2, counts=lambda t, rank: halves[rank], data=ragged_batch),
    )


@pytest.mark.parametrize(("clip", "length"), [(1.0, 1.0), (None, 1.0), (0.0, 10.0), (1e9, 10.0), (4.0, 4.0)])
@pytest.mark.parametrize("ranks_", [1, 2])
def test_B13_clipping_factor(ranks, ranks_: int, clip: float | None, length: float) -> None:
    config = json_config("acco", clip=clip or 0.0)
    if clip is None:
        del config["gradient_clipping"]
    rounds = assemble(ranks(ranks_).run(train_model, Slope, config, 2, plain_sgd, uneven_slope))
    start = {name: numpy(p) for name, p in Slope().named_parameters()}

    def moved(a: dict, b: dict) -> float:
        return math.sqrt(sum(float(((a[n] - b[n]).astype(np.float64) ** 2).sum()) for n in a))

    estimate, commit, estimate2, commit2 = rounds
    # The full gradient is clipped once, by its own norm; the estimate's half (mean factor 0.4, norm 4) by its own.
    assert moved(commit.masters, start) == pytest.approx(length, rel=1e-5)
    assert moved(commit2.masters, commit.masters) == pytest.approx(length, rel=1e-5)
    assert moved(estimate.shown, start) == pytest.approx(min(4.0, length), rel=1e-5)
    assert moved(estimate2.shown, commit.masters) == pytest.approx(min(4.0, length), rel=1e-5)
    for round_, norm in ((estimate, 4.0), (commit, 10.0), (estimate2, 4.0), (commit2, 10.0)):
        assert round_.grad_norm == pytest.approx(norm, rel=1e-5), "norms are stated before clipping"


def poisoned(mode: str, half: int, bf16: bool, optimizer: str) -> Any:
    """Job: 6 updates; in update 2, on the last rank, one gradient element of one micro-batch is NaN."""
    rank, bad = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    run = Run(mode, optimizer, bf16=bf16)
    poison = {"now": False}

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if poison["now"]:
            grad = grad.clone()
            grad[1, 2] = math.nan
        return grad

    with running(run) as (engine, zero):
        rounds = record_rounds(zero)
        engine.module.layers[0].weight.register_hook(hook)
        losses, skipped = [], []
        for update in range(6):
            for micro in range(run.gas):
                poison["now"] = rank == bad and update == 2 and micro == 2 * half
                loss = engine(*batch(update, rank, micro, run.dtype))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
            skipped.append(engine.skipped_steps)
        import megatron_acco

        megatron_acco.drain(engine)
        return rounds, layout(engine, zero), losses, engine.skipped_steps, engine.global_steps


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("half", [0, 1], ids=["estimate_half", "commit_half"])
@pytest.mark.parametrize("optimizer", ["ds_adamw", "sgd"])
def test_B18_nan_poisons_nothing(ranks, half: int, bf16: bool, optimizer: str) -> None:
    results = ranks(2).run(poisoned, "acco", half, bf16, optimizer)
    rounds = assemble([r[:2] for r in results])
    by_update = {(r.kind, r.update): r for r in rounds}
    before, bad, after = (by_update["commit", t] for t in (1, 2, 3))
    assert [by_update["commit", t].applied for t in range(6)] == [True, True, False, True, True, True]
    assert bad.steps == before.steps
    for name, value in before.masters.items():
        assert np.array_equal(bad.masters[name], value)
    for moment, state in before.state.items():
        assert all(np.array_equal(bad.state[moment][name], value) for name, value in state.items())
    if half == 0:
        assert not by_update["estimate", 2].applied
        for name, value in before.shown.items():
            assert np.array_equal(by_update["estimate", 2].shown[name], value), "theta~ = theta"
    assert after.steps != before.steps or optimizer == "sgd"
    for _, _, losses, skipped, _ in results:
        assert np.isfinite(losses).all(), "weights stay finite"
        assert skipped == 1
    if not bf16:
        _check_against_poisoned_oracle(rounds, half, optimizer)


def _check_against_poisoned_oracle(rounds: list[Round], half: int, optimizer: str) -> None:
    oracle = oracle_for(Run("acco", optimizer), 2)
    clean = oracle.gradient

    def gradient(weights: Any, update: int, rank: int, micro: int) -> Any:
        grads = clean(weights, update, rank, micro)
        if (update, rank, micro) == (2, 1, 2 * half):
            grads["layers.0.weight"][1, 2] = math.nan
        return grads

    oracle.gradient = gradient
    check_commits(rounds, oracle)


@pytest.mark.parametrize("mode", ["dpu", "wp", "sync"])
def test_B18_nan_poisons_nothing_in_other_modes(ranks, mode: str) -> None:
    results = ranks(2).run(poisoned, mode, 0, False, "ds_adamw")
    rounds = assemble([r[:2] for r in results])
    assert [r.applied for r in rounds] == [True, True, False, True, True, True]
    assert all(np.array_equal(rounds[2].masters[n], rounds[1].masters[n]) for n in rounds[1].masters)
    assert all(np.isfinite(r[2]).all() and r[3] == 1 for r in results)


class Scalar(nn.Module):
    """One weight (of a vector of 4) with gradient `factor`."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def one_large_many_small(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any]:
    return (torch.full((4,), 1.0 if micro == 0 else 1e-3, dtype=torch.bfloat16),)


def unit_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("mode", ["acco", "sync"])
@pytest.mark.parametrize(
    ("extra", "tolerance"),
    [
        ({}, 2**-8),  # bf16 on the wire: one rounding of the sum
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 2**-8),
        ({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}, 1e-5),
    ],
    ids=["default", "fp32_sum", "fp32_sum_fp32_wire"],
)
def test_B19_bf16_sum_keeps_small_gradients(ranks, mode: str, extra: dict[str, Any], tolerance: float) -> None:
    config = json_config(mode, gas=64, bf16={"enabled": True}, **extra)
    rounds = assemble(ranks(2).run(train_model, Scalar, config, 1, unit_sgd, one_large_many_small))
    small = float(torch.tensor(1e-3, dtype=torch.bfloat16))
    average = (1.0 + 63 * small) / 64
    np.testing.assert_allclose(1.0 - rounds[-1].masters["weight"], np.full(4, average), rtol=tolerance)


def constant_gradient(gas: int) -> Any:
    """Job: gradient 1 in 10 updates of SGD lr 1; update 4 is skipped; evaluation and zero_grad in between."""
    import megatron_acco

    model = Scalar(torch.float32)
    rank = torch.distributed.get_rank()
    with engine_for(model, json_config("acco", gas=gas), unit_sgd(model)) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(10):
            for micro in range(gas):
                bad = update == 4 and rank == 0 and micro == gas - 1
                engine.backward(engine(torch.full((4,), math.inf if bad else 1.0)))
                engine.step()
            engine.zero_grad()
            engine.module.zero_grad(set_to_none=True)
            if update % 3 == 1:
                with megatron_acco.real_parameters(engine):
                    float(engine(torch.ones(4)))
        megatron_acco.drain(engine)
        return rounds, layout(engine, zero)


@pytest.mark.parametrize("gas", [2, 5])
def test_B22_consumed_gradient_does_not_leak(ranks, gas: int) -> None:
    rounds = assemble(ranks(2).run(constant_gradient, gas))
    commits = [r for r in rounds if r.kind == "commit"]
    values = [1.0, *(float(r.masters["weight"][0]) for r in commits)]
    steps = [a - b for a, b in itertools.pairwise(values)]
    assert steps == [0.0 if t == 4 else 1.0 for t in range(10)]
    assert all(r.micro_batches == 2 * gas for r in commits)
    first = gas // 2
    assert all(r.micro_batches == 2 * first for r in rounds if r.kind == "estimate")
    # The estimate is one step of 1 below theta, too.
    for estimate, commit in zip(rounds[::2], rounds[1::2], strict=True):
        assert float(estimate.shown["weight"][0]) == float(estimate.masters["weight"][0]) - 1.0, commit.update
