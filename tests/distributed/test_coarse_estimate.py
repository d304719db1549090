"""Quantized estimates: theta~ as an oracle with a quantizer of its own has it, theta and the optimizer state exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed import gpt
from tests.distributed.precision import (
    fp16_section,
    low_precision_oracle,
    rounded,
    train_with_faults,
)
from tests.distributed.reference import error, oracle_for
from tests.distributed.test_resume_tensor_parallel import run as train_gpt
from tests.distributed.training import Round, Run, assemble, run_updates, train, train_model
from tests.oracle import Array, LossScale, Oracle, Params

Layout = list[list[tuple[str, int, tuple[int, ...]]]]


class Quantizer:
    """The exchange of a coarse estimate, written from its definition (docs/BEYOND_THE_PAPER.md), in numpy.

    A group's tensors lie one behind the other, in equal parts by rank; each part is cut into blocks of its own.
    """

    def __init__(self, bits: int, block: int, where: Layout, lengths: Sequence[int], ranks: int) -> None:
        self.bits, self.block, self.where, self.lengths, self.ranks = bits, block, where, lengths, ranks

    def rounded(self, part: Array) -> Array:
        levels, out = np.float32(2 ** (self.bits - 1) - 1), np.zeros_like(part, dtype=np.float32)
        for start in range(0, len(part), self.block):
            x = part[start : start + self.block].astype(np.float32)
            scale = np.abs(x).max() / levels
            if scale != 0.0:
                out[start : start + self.block] = np.rint(x / scale) * scale
        return out.astype(np.float64)

    def flat(self, params: Params) -> list[Array]:
        result = []
        for group, length in zip(self.where, self.lengths, strict=True):
            result.append(np.zeros(length))
            for name, offset, shape in group:
                result[-1][offset : offset + int(np.prod(shape))] = params[name].ravel()
        return result

    def by_name(self, flats: Sequence[Array]) -> Params:
        return {
            name: flat[offset : offset + int(np.prod(shape))].reshape(shape)
            for flat, group in zip(flats, self.where, strict=True)
            for name, offset, shape in group
        }

    def sum(self, sums: Sequence[Params]) -> Params:
        """Each owner adds the sums of the others as they arrive, and its own as it is."""
        totals = [np.zeros(length) for length in self.lengths]
        with np.errstate(invalid="ignore"):
            for sender, own in enumerate(sums):
                for total, flat in zip(totals, self.flat(own), strict=True):
                    for owner, (part, out) in enumerate(
                        zip(np.split(flat, self.ranks), np.split(total, self.ranks), strict=True)
                    ):
                        out += part if owner == sender else self.rounded(part)
        return self.by_name(totals)

    def shown(self, theta: Params, estimate: Params, to: Callable[[Array], Array] = lambda x: x) -> Params:
        """theta, as compute sees it, plus the difference as it arrives."""
        flats = []
        for base, there in zip(self.flat({n: to(v) for n, v in theta.items()}), self.flat(estimate), strict=True):
            moved = [self.rounded(part) for part in np.split(there.astype(np.float32) - base, self.ranks)]
            flats.append(base + np.concatenate(moved))
        return self.by_name(flats)


def attach(
    oracle: Oracle, run: Run, per_rank: Sequence[Any], to: Callable[[Array], Array] = lambda x: x, factor: float = 1.0
) -> None:
    """Let `oracle` exchange its estimates as `run` says; layout and padding are those of the training.

    Compute sees weights rounded by `to`; `factor` is what a rank's sums lack to be sums of micro-batches' gradients.
    """
    rounds, where = per_rank[0][:2]
    lengths = [len(shard) * len(per_rank) for shard in rounds[0].masters]
    block = run.acco.get("estimate_block_size", 256)
    quantizer = Quantizer(run.acco["estimate_bits"], block, where, lengths, len(per_rank))
    if len(per_rank) > 1:
        oracle.coarse_sum = lambda sums: quantizer.sum([{n: g * factor for n, g in own.items()} for own in sums])
        oracle.coarse_shown = lambda theta, estimate: quantizer.shown(theta, estimate, to)


def check(rounds: list[Round], oracle: Oracle, tolerance: float, shown: float | None = None) -> None:
    """Every round against the oracle."""
    remaining = list(rounds)
    while remaining:
        before = oracle.theta
        want = oracle.updates(1)[0]
        if want.estimate is not None:
            estimate = remaining.pop(0)
            assert error(estimate.shown, want.estimate) < (shown or tolerance), f"theta~ of update {estimate.update}"
            assert error(estimate.masters, before) < tolerance, "an estimate moved theta"
            assert estimate.applied == (want.estimate_norm > 0.0)
            if estimate.applied:
                assert estimate.grad_norm == pytest.approx(want.estimate_norm, rel=tolerance)
        commit = remaining.pop(0)
        assert error(commit.masters, want.theta) < tolerance, f"theta after update {commit.update}"
        assert commit.applied == want.applied and commit.micro_batches == want.micro_batches
        if want.applied:
            assert commit.grad_norm == pytest.approx(want.commit_norm, rel=tolerance)
        for moment, got in commit.state.items():
            if moment != "calls" and want.state:
                assert error(got, {name: s[moment] for name, s in want.state.items()}) < 20 * tolerance, moment


def coarse(bits: int, **acco: Any) -> dict[str, Any]:
    return {"estimate_bits": bits, "estimate_block_size": 16, **acco}


RUNS = [
    (2, Run("acco", "ds_adamw", clip=0.5, acco=coarse(8))),
    (3, Run("acco", "torch_adamw", clip=0.5, acco=coarse(4))),
    (2, Run("acco", "sgd", gas=5, acco=coarse(4, estimate_fraction=0.8))),
    (4, Run("acco", "lion", gas=5, acco=coarse(8, estimate_fraction=0.8, warmup_updates=3))),
    (2, Run("acco", "cpu_adamw", acco=coarse(16))),
    (1, Run("acco", "torch_adamw", acco=coarse(4))),
]


@pytest.mark.parametrize(
    ("ranks_", "run"), RUNS, ids=[f"ranks{n}-{r.optimizer}-{r.acco['estimate_bits']}bits" for n, r in RUNS]
)
def test_rounds_agree_with_an_oracle_that_quantizes(ranks, ranks_: int, run: Run) -> None:
    per_rank = ranks(ranks_).run(train, run)
    oracle = oracle_for(run, ranks_, first_half=4 if run.gas == 5 else None)
    attach(oracle, run, per_rank)
    check(assemble(per_rank), oracle, 5e-6)


def test_the_oracle_tells_an_exact_estimate_from_a_quantized_one(ranks) -> None:
    run = Run("acco", "torch_adamw", updates=3, acco=coarse(8))
    estimates = [r for r in assemble(ranks(2).run(train, run)) if r.kind == "estimate"]
    for got, want in zip(estimates, oracle_for(run, 2).updates(3), strict=True):
        assert error(got.shown, want.estimate) > 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_bf16(ranks, bits: int) -> None:
    """The commit's wire rounds an update's whole sum once; compute sees bf16 weights, the masters are exact."""
    dtype = torch.bfloat16
    run = Run("acco", "ds_adamw", updates=6, clip=0.5, bf16=True, acco=coarse(bits))
    per_rank = ranks(2).run(train, run)
    oracle = low_precision_oracle(run, 2, dtype)
    attach(oracle, run, per_rank, rounded(dtype), run.gas)
    check(assemble(per_rank), oracle, 1e-3, shown=2.0**-7)


FAULTS = {"no_overflow": None, "first_half": 1, "second_half": 2}


@pytest.mark.parametrize("fault", FAULTS)
def test_fp16_scale_moves_between_the_halves_of_one_sum(ranks, fault: str) -> None:
    """The scale grows every second update, and halves after an overflow, with the first half's gradients in the sum."""
    run = Run("acco", "sgd", updates=9, clip=0.5, extra=fp16_section(6, loss_scale_window=2), acco=coarse(8))
    micro = FAULTS[fault]
    faults = [] if micro is None else [(4, 1, micro, np.inf)]
    traces = ranks(2).run(train_with_faults, run, faults, torch.float16)
    assert not any(trace.error for trace in traces), traces[0].error
    changes = [len(set(scales)) for scales in traces[0].scales]
    assert max(changes) == 2, "no scale changed between halves"
    per_rank = [(trace.rounds, trace.where) for trace in traces]
    oracle = low_precision_oracle(
        run, 2, torch.float16, faults, loss_scale=LossScale(2.0**6, window=2), wire=torch.float16
    )
    attach(oracle, run, per_rank, rounded(torch.float16), run.gas)
    rounds = assemble(per_rank)
    check(rounds, oracle, 1e-3, shown=2.0**-8)
    commits = [r for r in rounds if r.kind == "commit"]
    assert [r.applied for r in commits] == [micro is None or r.update != 4 for r in commits]
    if micro == 1:  # theta~ is theta: nothing was exchanged
        estimate = next(r for r in rounds if (r.kind, r.update) == ("estimate", 4))
        assert not estimate.applied
        assert all(np.array_equal(estimate.shown[n], commits[3].shown[n]) for n in estimate.shown)


class Linear(nn.Module):
    """A loss that is linear in the weights: gradients are the inputs, wherever they are taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(37, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def whole_numbers(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    """Gradients whose sums and averages are exact in fp32."""
    generator = torch.Generator().manual_seed(100 * update + 10 * rank + micro)
    return (torch.randint(-50, 50, (37, 3), generator=generator).to(dtype),)


def linear_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_theta_depends_on_the_bits_by_where_gradients_are_taken_and_by_nothing_else(ranks, bits: int) -> None:
    """With gradients that do not depend on it, theta and the moments are those of exact estimates, bit for bit."""
    runs = []
    for acco in ({}, coarse(bits, estimate_stochastic_rounding=True)):
        config = Run("acco", acco=acco).config()
        runs.append(assemble(ranks(2).run(train_model, Linear, config, 6, linear_adamw, whole_numbers)))
    moved = 0.0
    for exact, rough in zip(*runs, strict=True):
        assert exact.kind == rough.kind
        assert np.array_equal(exact.masters["weight"], rough.masters["weight"])
        assert all(np.array_equal(exact.state[k]["weight"], rough.state[k]["weight"]) for k in exact.state)
        moved = max(moved, error(rough.shown, exact.shown))
    assert moved > 1e-5, "the estimates were not quantized"


def shown_weights(run: Run) -> list[list[np.ndarray]]:
    """Job: the weights that this rank's compute is shown after each half."""
    from tests.distributed.training import batch, numpy, running

    seen = []
    with running(run) as (engine, zero):
        for update, micro in itertools.product(range(run.updates), range(run.gas)):
            engine.backward(engine(*batch(update, torch.distributed.get_rank(), micro, run.dtype)))
            engine.step()
            engine.drain()
            if micro in (run.gas // 2, 0):
                seen.append([numpy(flat) for flat in zero.bit16_groups_flat])
    return seen


@pytest.mark.parametrize("bf16", [False, True])
def test_all_ranks_show_the_same_bits(ranks, bf16: bool) -> None:
    run = Run("acco", "ds_adamw", updates=5, bf16=bf16, acco=coarse(4, estimate_stochastic_rounding=True))
    first, *others = ranks(3).run(shown_weights, run)
    for other in others:
        assert all(np.array_equal(a, b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))
    assert not np.array_equal(first[2][0], first[3][0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_copies_on_tensor_parallel_ranks_stay_copies(ranks, tmp_path, sequence_parallel: bool) -> None:
    """Blocks mix split and replicated parameters; compute is shown, and theta keeps, the same bits of the latter."""
    # Blocks of 40: those of 16 would end where the parameters do.
    case = gpt.Case(tp=2, sequence_parallel=sequence_parallel, acco=coarse(4, estimate_block_size=40))
    outcomes = ranks(4).run(train_gpt, case, range(6), str(tmp_path / "coarse"), save_at=5)
    for outcome in outcomes:
        for name in outcome.real:
            like = outcomes[0] if outcome.split[name] is None else outcomes[outcome.tp_rank]
            assert torch.equal(outcome.after[name], like.after[name]), f"theta~ of {name}"
            assert torch.equal(outcome.real[name], like.real[name]), f"theta of {name}"
    exact = ranks(4).run(train_gpt, replace(case, acco={}), range(6), str(tmp_path / "exact"), save_at=5)
    moved = [float((outcomes[0].real[n] - exact[0].real[n]).abs().max()) for n in exact[0].real]
    assert 0.0 < max(moved) < 0.05


def gradient_in_the_second_half(run: Run) -> list[Any]:
    """Job: safe_get_full_grad after each micro-batch of the second update, and what it should be."""
    from deepspeed.utils import safe_get_full_grad

    from tests.distributed.training import batch, one_update, running

    answers = []
    with running(run) as (engine, _):
        one_update(engine, 0)
        parameter = next(p for p in engine.module.parameters() if p.dim() > 1)
        total = torch.zeros_like(parameter)
        for micro in range(run.gas - 1):
            hook = parameter.register_hook(lambda grad: total.add_(grad) is None or None)
            engine.backward(engine(*batch(1, torch.distributed.get_rank(), micro)))
            hook.remove()
            engine.step()
            want = total.clone()
            torch.distributed.all_reduce(want)
            answers.append((safe_get_full_grad(parameter), want * run.gas / (2 * (micro + 1))))
    return answers


def test_the_gradient_so_far_is_the_average_of_both_halves(ranks) -> None:
    for answers in ranks(2).run(gradient_in_the_second_half, Run("acco", acco=coarse(8))):
        assert len(answers) == 3
        for got, want in answers:
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)


def save_with_split(run: Run, folder: str, lost_on: int | None) -> None:
    """Job: a checkpoint after two updates whose chosen split is 3 + 1; a rank's file may lack it."""
    from tests.distributed.training import one_update, running

    with running(run) as (engine, zero):
        zero.adviser.restart(zero.acco.mode, 0.75)
        for update in range(2):
            one_update(engine, update)
        if torch.distributed.get_rank() == lost_on:
            zero.adviser.restart(zero.acco.mode)
        engine.save_checkpoint(folder)


def counts_after_resume(run: Run, folder: str) -> list[tuple[str, int]]:
    """Job: kind and micro-batches, over all ranks, of the rounds of one update after a resume."""
    from tests.distributed.training import running

    with running(run) as (engine, zero):
        engine.load_checkpoint(folder)
        return [(r.kind, r.micro_batches) for r in run_updates(engine, zero, [2])[0]]


def test_a_chosen_split_goes_on_after_a_resume_if_all_ranks_have_it(ranks, tmp_path) -> None:
    auto, fixed = (Run("acco", acco=coarse(8, estimate_fraction=fraction)) for fraction in ("auto", 0.25))
    ranks(2).run(save_with_split, auto, str(tmp_path / "all"), None)
    ranks(2).run(save_with_split, auto, str(tmp_path / "one"), 1)
    other_block = replace(auto, acco=coarse(4, estimate_fraction="auto", estimate_block_size=40))
    for count, run, folder, first in (
        (2, auto, "all", 3),
        (3, other_block, "all", 3),
        (2, fixed, "all", 1),
        (2, auto, "one", 2),
    ):
        want = [("estimate", first * count), ("commit", 4 * count)]
        assert ranks(count).run(counts_after_resume, run, str(tmp_path / folder)) == [want] * count
