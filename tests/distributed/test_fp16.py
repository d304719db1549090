"""fp16: every half is unscaled by its own scale; an overflow anywhere discards the update everywhere, once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.precision import (
    Trace,
    finite_or_equal,
    fp16_allowed,
    fp16_section,
    low_precision_oracle,
    train_with_faults,
)
from tests.distributed.reference import error
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.training import (
    Net,
    Round,
    Run,
    assemble,
    client_optimizer,
    engine_for,
    layout,
    one_update,
    parameter_groups,
    record_rounds,
    shards,
)
from tests.oracle import LossScale, Oracle, SmallestScaleError

HALF = torch.float16
# Found: 3e-7, as in fp32. But where the fp32 master and the oracle's float64 weight lie on different sides of a
# rounding boundary of fp16 (spacing 2^-10), compute sees weights that differ by that much in one element.
TOLERANCE = 2e-4


def check_trace(traces: list[Trace], oracle: Oracle) -> list[Round]:
    """Rounds, scales and counts of a training against the oracle, update by update."""
    rounds = assemble([(trace.rounds, trace.where) for trace in traces])
    remaining, skipped = list(rounds), 0
    for t in range(len(traces[0].scales)):
        masters, state = dict(oracle.theta), {k: dict(v) for k, v in oracle.state.items()}
        want = oracle.updates(1)[0]
        for trace in traces:
            halves = len(trace.scales[t]) // 2 if want.estimate is not None else 0
            expected = [want.loss_scales[0]] * halves + [want.loss_scales[1]] * (len(trace.scales[t]) - halves)
            assert trace.scales[t] == expected, f"loss scales in update {t}"
        if want.estimate is not None:
            estimate = remaining.pop(0)
            assert error(estimate.shown, want.estimate) < 2.0**-9, f"theta~ of update {t}"
            assert error(estimate.masters, masters) < TOLERANCE
            assert not estimate.applied or error(estimate.shown, estimate.masters) > 0.0
        commit = remaining.pop(0)
        assert commit.applied == want.applied
        assert finite_or_equal(commit.grad_norm, want.commit_norm, TOLERANCE), (t, commit.grad_norm, want.commit_norm)
        assert error(commit.masters, want.theta) < TOLERANCE, f"theta after update {t}"
        for moment, got in commit.state.items():
            reference = {name: s[moment] for name, s in (want.state or state).items()}
            assert not reference or error(got, reference) < 20 * TOLERANCE, moment
        skipped += not want.applied
    assert all(trace.skipped[-1] == skipped for trace in traces)
    return rounds


def frozen_between(before: Round, after: Round) -> bool:
    """Whether masters, moments and step counts are bit-identical after two rounds."""
    same = all(np.array_equal(before.masters[n], after.masters[n]) for n in before.masters)
    moments = all(np.array_equal(before.state[k][n], after.state[k][n]) for k in before.state for n in before.state[k])
    return same and moments and before.steps == after.steps


@pytest.mark.parametrize("optimizer", ["sgd", "ds_adamw"])
def test_fp16_agrees_with_oracle(ranks, optimizer: str) -> None:
    run = Run("acco", optimizer, updates=8, clip=0.5, extra=fp16_section(10))
    oracle = low_precision_oracle(run, 2, HALF, loss_scale=LossScale(2.0**10, window=1000))
    check_trace(ranks(2).run(train_with_faults, run, (), HALF), oracle)


@pytest.mark.parametrize("half", [0, 1], ids=["first_half", "second_half"])
@pytest.mark.parametrize("optimizer", ["sgd", "ds_adamw"])
def test_B16_overflow_on_one_rank_discards_the_update_on_all(ranks, half: int, optimizer: str) -> None:
    run = Run("acco", optimizer, updates=6, clip=0.5, extra=fp16_section(16))
    fault = (2, 1, 2 * half + 1, math.inf)
    oracle = low_precision_oracle(run, 2, HALF, [fault], loss_scale=LossScale(2.0**16, window=1000))
    traces = ranks(2).run(train_with_faults, run, [fault], HALF)
    by_update = {(r.kind, r.update): r for r in check_trace(traces, oracle)}
    assert [by_update["commit", t].applied for t in range(6)] == [True, True, False, True, True, True]
    assert frozen_between(by_update["commit", 1], by_update["commit", 2])
    if half == 0:  # theta~ = theta; with an overflow in the second half the estimate was made before it
        before, estimate = by_update["commit", 1], by_update["estimate", 2]
        assert not estimate.applied
        assert all(np.array_equal(estimate.shown[n], before.shown[n]) for n in before.shown)
    # One rank saw it. All halve the scale once, between the halves of the next update.
    for trace in traces:
        assert trace.scales[2:4] == [[2.0**16] * 4, [2.0**16] * 2 + [2.0**15] * 2]
        assert trace.scales[4:] == [[2.0**15] * 4] * 2


@pytest.mark.parametrize("mode", ["dpu", "wp", "sync"])
def test_B16_overflow_in_other_modes(ranks, mode: str) -> None:
    run = Run(mode, "sgd", updates=6, extra=fp16_section(12))
    fault = (2, 0, 1, math.inf)
    oracle = low_precision_oracle(run, 2, HALF, [fault], loss_scale=LossScale(2.0**12, window=1000))
    rounds = check_trace(ranks(2).run(train_with_faults, run, [fault], HALF), oracle)
    assert [r.applied for r in rounds] == [True, True, False, True, True, True]


def test_scale_falls_from_too_high_and_grows_again(ranks) -> None:
    """Real overflows: at 2^24 every gradient of the loss overflows fp16; later the scale grows every second update."""
    run = Run("acco", "sgd", updates=18, extra=fp16_section(24, loss_scale_window=2))
    oracle = low_precision_oracle(run, 2, HALF, loss_scale=LossScale(2.0**24, window=2))
    traces = ranks(2).run(train_with_faults, run, (), HALF)
    check_trace(traces, oracle)
    scales = [scale for update in traces[0].scales for scale in update]
    lowest = scales.index(min(scales))
    assert min(scales) < 2.0**20 and max(scales[lowest:]) > min(scales), "fell and grew"
    assert traces[0].skipped[-1] >= 5


def test_hysteresis_waits_for_the_second_overflow(ranks) -> None:
    run = Run("acco", "sgd", updates=6, extra=fp16_section(12, hysteresis=2))
    faults = [(1, 1, 0, math.inf), (3, 0, 3, -math.inf)]
    oracle = low_precision_oracle(run, 2, HALF, faults, loss_scale=LossScale(2.0**12, window=1000, hysteresis=2))
    traces = ranks(2).run(train_with_faults, run, faults, HALF)
    check_trace(traces, oracle)
    assert traces[0].scales[3][-1] == 2.0**12 and traces[0].scales[5][-1] == 2.0**11


def test_static_scale_stays(ranks) -> None:
    run = Run("acco", "sgd", updates=5, extra=fp16_section(loss_scale=256.0))
    fault = (2, 1, 1, math.inf)
    oracle = low_precision_oracle(run, 2, HALF, [fault], loss_scale=LossScale(256.0))
    traces = ranks(2).run(train_with_faults, run, [fault], HALF)
    check_trace(traces, oracle)
    assert {scale for update in traces[0].scales for scale in update} == {256.0}


@pytest.mark.parametrize("mode", ["acco", "sync"])
def test_B16_overflow_at_the_smallest_scale_is_an_error_that_says_so(ranks, mode: str) -> None:
    run = Run(mode, "sgd", updates=6, extra=fp16_section(3, min_loss_scale=4))
    faults = [(1, 1, 1, math.inf), (3, 1, 1, math.inf)]
    traces = ranks(2).run(train_with_faults, run, faults, HALF)
    assert all("loss scale already at minimum" in trace.error for trace in traces)
    oracle = low_precision_oracle(run, 2, HALF, faults, loss_scale=LossScale(8.0, window=1000, minimum=4.0))
    with pytest.raises(SmallestScaleError):
        oracle.updates(6)
    # Both stop in the same update: the one in which the outcome of update 3 is told.
    assert [len(trace.scales) - 1 for trace in traces] == [oracle.update] * 2 == [4 if mode == "acco" else 3] * 2


@pytest.mark.parametrize(
    "types",
    [
        {},
        {"data_types": {"grad_accum_dtype": "fp16"}},
        {"communication_data_type": "fp32"},
    ],
    ids=["default", "fp16_sums", "fp32_wire"],
)
def test_fp16_dtypes_of_sums_and_exchange(ranks, types: dict[str, Any]) -> None:
    run = Run("acco", "sgd", updates=6, extra={**fp16_section(10), **types})
    accumulate = HALF if "data_types" in types else torch.float32
    wire = torch.float32 if "communication_data_type" in types else HALF
    scale = LossScale(2.0**10, window=1000)
    oracle = low_precision_oracle(run, 2, HALF, accumulate=accumulate, wire=wire, loss_scale=scale)
    check_trace(ranks(2).run(train_with_faults, run, (), HALF), oracle)


def train_and_save(run: Run, folder: str, save_after: int, resume: bool) -> Any:
    """Job: `run`, saved after `save_after` updates (0: never); `resume`: only what comes after, from the checkpoint."""
    model = Net(seed=50 if resume else run.model_seed, dtype=HALF)
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    import megatron_acco

    with fp16_allowed(), engine_for(model, run.config(), optimizer) as (engine, zero):
        rounds, scales = record_rounds(zero), []
        if resume:
            engine.load_checkpoint(folder, tag="scale")
        for update in range(save_after if resume else 0, run.updates):
            one_update(engine, update, dtype=HALF)
            scales.append(float(zero.loss_scale))
            if not resume and update + 1 == save_after:
                engine.save_checkpoint(folder, tag="scale")
        megatron_acco.drain(engine)
        scaler = {key: value for key, value in vars(zero.loss_scaler).items() if key != "dtype"}
        return rounds, layout(engine, zero), scales, scaler, engine.skipped_steps, shards(zero)[0]


def comparable(rounds: list[Round]) -> list[Round]:
    """The same rounds without norms that are not finite: NaN equals nothing."""
    return [replace(r, grad_norm=r.grad_norm if r.applied else -1.0) for r in rounds]


@pytest.mark.parametrize("save_after", [4, 10], ids=["after_growth", "after_the_last_overflow"])
def test_scaler_survives_a_checkpoint_exactly(ranks, tmp_path, save_after: int) -> None:
    """Saving changes nothing, and the resumed training is the same one, with an outcome untold at the save."""
    run = Run("acco", "ds_adamw", updates=16, extra=fp16_section(16, loss_scale_window=2))
    jobs = [(0, False), (save_after, False), (save_after, True)]
    plain, saved, resumed = (ranks(2).run(train_and_save, run, str(tmp_path), *job) for job in jobs)
    for rank in range(2):
        assert saved[rank][2:5] == plain[rank][2:5], "the training that saved"
        assert resumed[rank][2] == plain[rank][2][save_after:]
        assert resumed[rank][3:5] == plain[rank][3:5], "scaler state, skipped steps"
        for other in (saved, resumed):
            assert all(np.array_equal(a, b) for a, b in zip(plain[rank][5], other[rank][5], strict=True))
    whole, with_save, tail = (comparable(assemble([r[:2] for r in results])) for results in (plain, saved, resumed))
    assert_same_bits(whole, with_save)
    assert_same_bits([r for r in whole if r.update >= save_after], tail)
    assert len(set(plain[0][2])) == 3 and plain[0][4] > 0


def refused() -> str:
    """Job: initialize with fp16 where the device has none."""
    model = Net(dtype=torch.float32)
    config = Run("acco", "ds_adamw", extra=fp16_section()).config()
    try:
        with engine_for(model, config):
            return ""
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def test_B59_fp16_on_a_cpu_without_it_suggests_bf16(ranks) -> None:
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        pytest.skip("this device has fp16")
    for message in ranks(2).run(refused):
        assert message.startswith("ValueError") and "fp16" in message and '"bf16": {"enabled": true}' in message
