"""Adaptive accumulation and the fall-back to synchronous rounds, on ranks of unequal speed: the rule stays the rule.

Whatever the clock decides, the counts are recorded, and with them the oracle must give the same trajectory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import gpt
from tests.distributed.reference import error, oracle_for
from tests.distributed.test_coarse_estimate import attach
from tests.distributed.training import (
    LR,
    Net,
    Round,
    Run,
    assemble,
    batch,
    client_optimizer,
    drain,
    engine_for,
    layout,
    parameter_groups,
    record_rounds,
)
from tests.oracle import Oracle, Params

pytestmark = pytest.mark.alone

TOLERANCE = 5e-6
ADAPTIVE = {"accumulation": "adaptive"}


@dataclass
class Outcome:
    """What a rank saw: rounds and layout as `train`, the micro-batches of all ranks per round, waits, samples."""

    rounds: list[Round]
    where: list[Any]
    counts: list[tuple[int, ...]]
    waits: list[float]
    samples: list[int]
    lines: list[str] = field(default_factory=list)


def slow_exchange(zero: Any, seconds: list[float], quantized: bool = True) -> None:
    """Make every reduce-scatter of the lane, or those that are not `quantized`, take `seconds[0]` longer."""
    for exchange in (zero._rounds._exchange, zero._rounds._coarse if quantized else None):
        if exchange is not None:
            exchange.reduce_scatter = _slow(exchange.reduce_scatter, seconds)


def _slow(original: Callable[..., int], seconds: list[float]) -> Callable[..., int]:
    def slow(*args: Any, **kwargs: Any) -> int:
        time.sleep(seconds[0])
        return original(*args, **kwargs)

    return slow


def train_at_own_speed(
    run: Run, speeds: tuple[float, ...], exchange: tuple[float, ...], scheduler: Any = None, quantized: bool = True
) -> Outcome:
    """Job: `run` on ranks whose micro-batches take `speeds` seconds; the exchange of update t takes exchange[t]."""
    import megatron_acco

    rank, model = torch.distributed.get_rank(), Net(seed=run.model_seed)
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    lines: list[str] = []
    with engine_for(model, run.config(), optimizer, lr_scheduler=scheduler) as (engine, zero):
        delay = [exchange[0]]
        slow_exchange(zero, delay, quantized)
        model.register_forward_hook(lambda *unused: time.sleep(speeds[rank]))
        rounds, samples = record_rounds(zero), []
        for update in range(run.updates):
            delay[0] = exchange[min(update, len(exchange) - 1)]
            for micro in itertools.count():
                engine.backward(engine(*batch(update, rank, micro)))
                engine.step()
                if engine.global_steps > update:
                    break
            samples.append(engine.global_samples)
        drain(engine)
        samples.append(engine.global_samples)
        reports = megatron_acco.round_reports(engine)
        counts = [tuple(part.micro_batches for part in report.by_rank) for report in reports]
        return Outcome(rounds, layout(engine, zero), counts, [r.wait_seconds for r in reports], samples, lines)


def per_update(rounds: list[Round], counts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The counts of the rounds of each update."""
    result: dict[int, list[tuple[int, ...]]] = {}
    for one, by_rank in zip(rounds, counts, strict=True):
        result.setdefault(one.update, []).append(by_rank)
    return [result[update] for update in sorted(result)]


def check_against_oracle(outcomes: list[Outcome], run: Run, **options: Any) -> list[list[tuple[int, ...]]]:
    """The recorded counts, after asserting that with them the oracle gives the rounds' weights."""
    rounds = assemble([(outcome.rounds, outcome.where) for outcome in outcomes])
    assert all(outcome.counts == outcomes[0].counts for outcome in outcomes)
    counts = per_update(rounds, outcomes[0].counts)

    def of(update: int, rank: int) -> tuple[int, int]:
        parts = [by_rank[rank] for by_rank in counts[update]]
        return (parts[0], parts[1]) if len(parts) == 2 else (0, parts[0])

    commits = {r.update: r for r in rounds if r.kind == "commit"}
    estimates = {r.update: r for r in rounds if r.kind == "estimate"}
    oracle = oracle_for(run, len(outcomes), counts=of, **options)
    if "estimate_bits" in run.acco:
        attach(oracle, run, [(outcome.rounds, outcome.where) for outcome in outcomes])
        take_real_estimates(oracle, estimates)
    for update in range(run.updates):
        oracle.mode = "acco" if update in estimates else ("sync" if run.mode == "acco" else run.mode)
        want = oracle.updates(1)[0]
        assert error(commits[update].masters, want.theta) < TOLERANCE, update
        assert commits[update].micro_batches == want.micro_batches
        if update in estimates:
            assert error(estimates[update].shown, want.estimate) < TOLERANCE, update
    return counts


def take_real_estimates(oracle: Oracle, estimates: dict[int, Round]) -> None:
    """Go on from the estimates of the training, once nearly all of their values are those of the oracle.

    fp32 and fp64 sums that lie on two sides of the middle between two levels are quantized to different levels, which
    some of the counts that the clock chooses bring about.
    """
    quantized = oracle.coarse_shown

    def shown(theta: Params, estimate: Params) -> Params:
        real, want = estimates[oracle.update].shown, quantized(theta, estimate)
        off = np.concatenate([np.abs(real[n] - want[n]).ravel() / np.abs(want[n]).max() for n in want if want[n].size])
        assert np.mean(off < TOLERANCE) > 0.9, f"theta~ of update {oracle.update}"
        moved = max(np.abs(want[n] - theta[n]).max() for n in want if want[n].size)
        for name in want:
            assert np.allclose(real[name], want[name], rtol=0.0, atol=0.2 * moved), name
        return real

    oracle.coarse_shown = shown


@pytest.mark.parametrize("mode", ["acco", "dpu", "wp", "coarse"])
def test_unequal_counts_agree_with_the_oracle(ranks: Callable, mode: str) -> None:
    """Covers B12 for counts that the product itself chooses."""
    run = Run(mode, updates=6, gas=2, clip=0.5, acco=ADAPTIVE)
    if mode == "coarse":
        # Without clipping, one value at another level leaves the others where they are.
        run = Run("acco", updates=6, gas=2, acco={**ADAPTIVE, "estimate_bits": 8})
    outcomes = ranks(2).run(train_at_own_speed, run, (0.004, 0.016), (0.06,))
    counts = check_against_oracle(outcomes, run)
    # The fast rank does more, but in the first half of the first update, beside which nothing is under way.
    later = [by_rank for rounds in counts[1:] for by_rank in rounds]
    assert all(fast > slow >= 1 for fast, slow in later)
    assert sum(fast for fast, _ in later) > 2 * sum(slow for _, slow in later)
    total = sum(sum(by_rank) for rounds in counts for by_rank in rounds)
    assert outcomes[0].samples[-1] == 4 * total
    assert [outcome.samples for outcome in outcomes] == [outcomes[0].samples] * 2


def test_the_split_follows_the_measured_exchanges(ranks: Callable) -> None:
    """c = 20 ms, 90 ms for a commit's exchange and next to nothing for an estimate's: 5 + 1 instead of 3 + 3."""
    acco = {"estimate_bits": 8, "estimate_fraction": "auto"}
    run = Run("acco", updates=11, gas=6, acco=acco)
    outcomes = ranks(2).run(train_at_own_speed, run, (0.02, 0.02), (0.09,), quantized=False)
    counts = check_against_oracle(outcomes, run)
    firsts = [rounds[0] for rounds in counts]
    assert firsts[0] == (3, 3) and firsts[-1] == (5, 5)
    assert {sum(half) for rounds in counts for half in zip(*rounds, strict=True)} == {6}


def test_nobody_waits_for_the_exchange_or_for_a_slow_rank(ranks: Callable) -> None:
    run = Run("acco", updates=8, gas=2, acco=ADAPTIVE)
    outcomes = ranks(2).run(train_at_own_speed, run, (0.005, 0.02), (0.08,))
    for outcome in outcomes:
        # A poll right after the end of the exchange; the end itself is what the drain at the end waits for.
        assert sorted(outcome.waits[:-1])[len(outcome.waits) // 2] < 0.004


def test_a_half_ends_at_its_limit(ranks: Callable) -> None:
    run = Run("acco", updates=4, gas=2, acco={**ADAPTIVE, "max_micro_batches_per_half": 3})
    outcomes = ranks(2).run(train_at_own_speed, run, (0.001, 0.001), (0.1,))
    counts = check_against_oracle(outcomes, run)
    assert {n for rounds in counts[1:] for by_rank in rounds for n in by_rank} == {3}
    assert min(outcomes[0].waits[1:-1]) > 0.05


def test_the_configured_update_is_the_smallest(ranks: Callable) -> None:
    run = Run("acco", updates=4, gas=6, acco={**ADAPTIVE, "estimate_fraction": 0.7})
    counts = check_against_oracle(ranks(2).run(train_at_own_speed, run, (0.1, 0.1), (0.0,)), run)
    assert counts == [[(4, 4), (2, 2)]] * 4


def test_the_learning_rate_follows_the_square_root_of_the_batch(ranks: Callable) -> None:
    run = Run("dpu", updates=4, gas=2, acco={**ADAPTIVE, "lr_batch_scaling": True})
    outcomes = ranks(2).run(train_at_own_speed, run, (0.004, 0.012), (0.05,))
    totals = [sum(by_rank) for by_rank in outcomes[0].counts]
    assert max(totals) > 8
    rates = [math.sqrt(total / 4) for total in totals]
    assert [r.lr for r in outcomes[0].rounds] == pytest.approx([LR[0] * rate for rate in rates])
    check_against_oracle(outcomes, run, lr_factor=lambda applied: rates[applied])


def falling_with_samples(optimizer: Any) -> Any:
    """Megatron's scheduler counts samples: the rate falls linearly to zero over 2000 of them."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 0.0, 0, 2000, "linear", 0.0, 0.0, 2000, "constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False,
    )  # fmt: skip


def test_the_schedule_counts_committed_samples(ranks: Callable) -> None:
    run = Run("dpu", updates=5, gas=2, acco=ADAPTIVE)
    outcome = ranks(2).run(train_at_own_speed, run, (0.004, 0.012), (0.05,), falling_with_samples)[0]
    totals = [4 * sum(by_rank) for by_rank in outcome.counts]
    # The commit of an update is launched when the one before has settled.
    settled = [0, *itertools.accumulate(totals)][: run.updates]
    assert [r.lr for r in outcome.rounds] == pytest.approx([1e-2 * (1 - n / 2000) for n in settled])


def refuse_losses_divided_by_the_caller() -> str:
    """Job."""
    run = Run("acco", gas=2, acco=ADAPTIVE, optimizer="ds_adamw")
    with engine_for(Net(), run.config()) as (engine, _):
        try:
            engine.backward(engine(*batch(0, 0, 0)), scale_wrt_gas=False)
        except RuntimeError as raised:
            return str(raised)
    return ""


def test_losses_divided_by_the_caller_are_refused(ranks: Callable) -> None:
    assert '"accumulation": "adaptive"' in ranks(1).run(refuse_losses_divided_by_the_caller)[0]


def train_replicas_at_own_speed() -> dict[str, Any]:
    """Job: two tensor-parallel ranks per replica, each rank with a speed of its own."""
    import megatron_acco
    from megatron_acco.training.environment import Mpu

    case = gpt.Case(tp=2, acco={"accumulation": "adaptive"})
    with gpt.parallel(2):
        rank, replica = torch.distributed.get_rank(), Mpu.get_data_parallel_rank()
        model = gpt.build(case)
        engine = gpt.engine_of(case, model, 2)
        slow_exchange(engine.optimizer, [0.1])
        positions = torch.arange(gpt.LENGTH).expand(2, -1)
        for update in range(4):
            for micro in itertools.count():
                tokens, labels = gpt.batch(update, micro, replica)
                engine.backward(engine(tokens, positions, None, labels=labels).float().mean())
                engine.step()
                time.sleep(0.005 * (rank + 1))
                if engine.global_steps > update:
                    break
        drain(engine)
        reports = megatron_acco.round_reports(engine)
        with megatron_acco.real_parameters(engine):
            weights = gpt.snapshot(model)
        copies = {name: value for name, value in weights.items() if "layernorm" in name}
        engine.destroy()
        return {"counts": [[part.micro_batches for part in r.by_rank] for r in reports], "copies": copies}


def test_a_replica_decides_as_one(ranks: Callable) -> None:
    seen = ranks(4).run(train_replicas_at_own_speed)
    assert all(one["counts"] == seen[0]["counts"] for one in seen)
    assert max(itertools.chain(*seen[0]["counts"])) > 1
    for name, value in seen[0]["copies"].items():
        assert all(torch.equal(one["copies"][name], value) for one in seen)


def test_fall_back_to_synchronous_rounds_and_back(ranks: Callable) -> None:
    """All ranks change at the same update, and every update is that of its own rule."""
    run = Run("acco", updates=30, gas=4, clip=0.5, acco={"fallback": "auto"})
    # First an exchange of 1.5 times the compute of an update, then next to none.
    outcomes = ranks(2).run(train_at_own_speed, run, (0.01, 0.01), (0.06,) * 12 + (0.0,))
    counts = check_against_oracle(outcomes, run)
    rounds = [len(kinds) for kinds in counts]
    assert rounds[:4] == [2] * 4 and rounds[-1] == 2, rounds
    first = rounds.index(1)
    assert 5 <= first <= 10 and rounds[first:12] == [1] * (12 - first), rounds


def test_without_fall_back_the_rounds_stay(ranks: Callable) -> None:
    run = Run("acco", updates=12, gas=4)
    outcomes = ranks(2).run(train_at_own_speed, run, (0.002, 0.002), (0.02,))
    assert all(len(kinds) == 2 for kinds in check_against_oracle(outcomes, run))
