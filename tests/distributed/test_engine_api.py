"""The DeepSpeed engine API under ACCO (docs/engine-api.md): every call works with a stated meaning or is refused."""

from __future__ import annotations

import math
import time
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
    drain,
    engine_for,
    json_config,
    layout,
    named,
    numpy,
    one_update,
    record_rounds,
    running,
    shards,
)
from tests.oracle import norm

RUN = Run("acco", "ds_adamw", updates=4, clip=0.5)
TOLERANCE = 5e-6


def rank() -> int:
    return int(torch.distributed.get_rank())


# ---- names, norms, rates ---------------------------------------------------------------------------------------------


def read_and_write() -> Any:
    """Job: deepspeed.utils.safe_* at every point of two updates, beside a slow lane."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    seen: dict[str, Any] = {"norm": [], "grad": {}, "param": {}, "state": {}}
    with running(RUN) as (engine, zero):
        zero.lane.before_round = lambda label: time.sleep(0.05)
        rounds = record_rounds(zero)
        params = dict(engine.module.named_parameters())
        for call in (lambda p: safe_get_full_optimizer_state(p, "exp_avg"), safe_get_full_grad):
            with pytest.raises((ValueError, RuntimeError), match=r"no update has been committed|no gradient"):
                call(params["layers.0.weight"])
        for update in range(3):
            for micro in range(RUN.gas):
                engine.backward(engine(*batch(update, rank(), micro)))
                if update == 2:
                    grads = {name: numpy(safe_get_full_grad(p)) for name, p in params.items()}
                    seen["grad"][micro] = grads
                engine.step()
                seen["param"][update, micro] = {n: numpy(safe_get_full_fp32_param(p)) for n, p in params.items()}
                if (update, micro) > (0, RUN.gas - 1):
                    state = {n: numpy(safe_get_full_optimizer_state(p, "exp_avg")) for n, p in params.items()}
                    seen["state"][update, micro] = state
                    with pytest.raises(ValueError, match='no tensor "velocity"; it has exp_avg, exp_avg_sq'):
                        safe_get_full_optimizer_state(params["layers.0.weight"], "velocity")
            seen["norm"].append(engine.get_global_grad_norm())
        return rounds, layout(engine, zero), seen


def test_safe_get_waits_for_the_lane_and_is_of_the_last_committed_update(ranks) -> None:
    results = ranks(2).run(read_and_write)
    check_commits(assemble([r[:2] for r in results]), oracle_for(RUN, 2))
    for _, _, seen in results:
        oracle = oracle_for(RUN, 2)
        updates = oracle.updates(3)
        for (update, micro), got in seen["param"].items():
            # The calls drained: after the last step of an update its commit is in.
            last = update if micro == RUN.gas - 1 else update - 1
            want = oracle_for(RUN, 2).theta if last < 0 else updates[last].theta
            assert error(got, want) < TOLERANCE, (update, micro)
        for (update, micro), got in seen["state"].items():
            state = updates[update if micro == RUN.gas - 1 else update - 1].state
            assert error(got, {n: s["exp_avg"] for n, s in state.items()}) < TOLERANCE
        assert seen["norm"] == [pytest.approx(u.commit_norm, rel=TOLERANCE) for u in updates]
        for micro in range(RUN.gas):
            want = average_so_far(updates, micro)
            assert error(seen["grad"][micro], want) < TOLERANCE, f"gradient after micro-batch {micro}"
        assert norm(average_so_far(updates, RUN.gas - 1)) == pytest.approx(updates[2].commit_norm)


def average_so_far(updates: list[Any], micro: int) -> dict[str, np.ndarray]:
    """Average over both ranks of micro-batches 0 .. micro of update 2: at theta~_2, from the half on at theta_2."""
    gradient = oracle_for(RUN, 2).gradient
    total: dict[str, np.ndarray] = {}
    for k in range(micro + 1):
        weights = updates[1].estimate if k < RUN.gas // 2 else updates[1].theta
        for other in range(2):
            for name, g in gradient(weights, 2, other, k).items():
                total[name] = total.get(name, 0.0) + g
    return {name: g / (2 * (micro + 1)) for name, g in total.items()}


def overwrite(moment: str) -> Any:
    """Job: a weight and a moment are set while a round is in flight; then one update of gradient zero."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    with running(Run("acco", "ds_adamw", updates=4)) as (engine, zero):
        zero.lane.before_round = lambda label: time.sleep(0.05)
        one_update(engine, 0)
        if moment == "mid_update":
            for micro in range(2):
                engine.backward(engine(*batch(1, rank(), micro)))
                engine.step()
        weight = engine.module.layers[0].weight
        value = torch.full(weight.shape, 0.25)
        safe_set_full_fp32_param(weight, value)
        safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
        with pytest.raises(RuntimeError, match="register_hook"):
            safe_set_full_grad(weight, value)
        shown = numpy(weight)
        with engine.real_parameters():
            real = numpy(weight)
        master = numpy(safe_get_full_fp32_param(weight))
        moments = shards(zero)[1]
        if moment == "mid_update":
            for micro in range(2, 4):
                engine.backward(engine(*batch(1, rank(), micro)))
                engine.step()
        drain(engine)
        return (shown, real, master), moments, layout(engine, zero)


@pytest.mark.parametrize("moment", ["between_updates", "mid_update"])
def test_safe_set_reaches_masters_state_and_every_copy_of_the_weights(ranks, moment: str) -> None:
    results = ranks(2).run(overwrite, moment)
    for copies, _, _ in results:
        assert all((copy == 0.25).all() for copy in copies)
    assert not named([[s["exp_avg"] for s in r[1]] for r in results], results[0][2])["layers.0.weight"].any()


class Constant(nn.Module):
    """One weight with gradient 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def set_rates(how: str) -> Any:
    """Job: rate 1, 2, 3 ... for update 0, 1, 2 ..., set before each; the weight falls by the rate."""
    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    moved, read = [], []
    with engine_for(model, json_config("acco", gas=2), optimizer) as (engine, zero):
        zero.lane.before_round = lambda label: time.sleep(0.03)
        rounds = record_rounds(zero)
        for update in range(4):
            if how == "param_groups":
                engine.optimizer.param_groups[0]["lr"] = update + 1.0
            elif how == "client_optimizer":
                optimizer.param_groups[0]["lr"] = update + 1.0
            else:
                engine.optimizer.set_lr(update + 1.0)
            for _ in range(2):
                engine.backward(engine())
                engine.step()
            read.append((engine.get_lr(), engine.optimizer.get_lr()))
        drain(engine)
        previous = 1.0
        for round_ in rounds:
            if round_.kind == "commit":
                now = float(round_.masters[0][0])
                moved.append(previous - now)
                previous = now
        return moved, read, [r.lr for r in rounds]


@pytest.mark.parametrize("how", ["param_groups", "client_optimizer", "set_lr"])
def test_rate_set_between_updates_is_that_of_the_next(ranks, how: str) -> None:
    for moved, read, used in ranks(2).run(set_rates, how):
        assert moved == [1.0, 2.0, 3.0, 4.0]
        assert read == [([rate], rate) for rate in moved]
        assert used == [rate for rate in moved for _ in range(2)], "estimate and commit"


# ---- ends, refusals, other batch sizes, two engines ------------------------------------------------------------------


def ends_and_refusals() -> dict[str, str]:
    """Job: what is refused, with its message; destroy twice, with a round in flight."""
    from deepspeed.utils import safe_get_full_fp32_param

    refused = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            refused[name] = ""
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"

    with running(RUN) as (engine, _):
        attempt("offload_states", engine.offload_states)
        engine.backward(engine(*batch(0, rank(), 0)))
        engine.step()
        attempt("set_train_batch_size", lambda: engine.set_train_batch_size(32))
        with engine.no_sync():
            attempt("step in no_sync", engine.step)
        for micro in range(1, 4):
            engine.backward(engine(*batch(0, rank(), micro)))
            engine.step()
        attempt("too small", lambda: engine.set_train_batch_size(8))
        engine.destroy()
        engine.destroy()
        assert safe_get_full_fp32_param(engine.module.layers[0].weight) is None
    config = RUN.config() | {"managed_gradient_accumulation": False}
    attempt("managed", lambda: engine_for(Net(), config).__enter__())
    return refused


def test_refusals_say_why(ranks) -> None:
    for refused in ranks(2).run(ends_and_refusals):
        assert "not supported under ACCO" in refused["offload_states"]
        assert "middle of an update" in refused["set_train_batch_size"]
        assert "no_sync" in refused["step in no_sync"]
        assert refused["too small"].startswith("ValueError") and "at least 2" in refused["too small"]
        assert "managed_gradient_accumulation" in refused["managed"]


def reading_at_other_weights() -> dict[str, Any]:
    """Job: forwards in the other mode where they could change the weights behind somebody's back."""
    seen: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            seen[name] = ""
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"

    with running(Run("acco", "ds_adamw")) as (engine, zero):
        for update in range(2):
            one_update(engine, update)
        with engine.real_parameters(), torch.no_grad():
            theta = {name: p.clone() for name, p in engine.module.named_parameters()}
            engine(*batch(9, rank(), 0))  # in train mode
            seen["held"] = all(torch.equal(p, theta[name]) for name, p in engine.module.named_parameters())
        with engine.real_parameters():
            loss = engine(*batch(9, rank(), 0))
            attempt("backward at theta", lambda: engine.backward(loss))
        zero.abandon()
        loss = engine(*batch(2, rank(), 0))
        engine.eval()
        engine(*batch(9, rank(), 0))  # with gradients
        engine.train()
        attempt("mixed", lambda: engine.backward(loss))
    attempt(
        "float64", lambda: engine_for(Net(dtype=torch.float64), json_config("acco", optimizer="ds_adamw")).__enter__()
    )
    return seen


def test_weights_do_not_change_behind_a_forward(ranks) -> None:
    for seen in ranks(2).run(reading_at_other_weights):
        assert seen["held"]
        assert "backward inside real_parameters()" in seen["backward at theta"]
        assert "modified by an inplace operation" in seen["mixed"]
        assert "float32, bfloat16 or float16, the model has float64" in seen["float64"]


class Noting:
    """A scheduler that notes what step() is called with."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, number: int) -> None:
        self.seen.append(number)

    def state_dict(self) -> dict[str, Any]:
        return {}


def step_arguments(mode: str) -> list[int]:
    """Job: step(lr_kwargs={"number": update}) at every update."""
    with running(Run(mode, "ds_adamw"), lr_scheduler=(noting := Noting())) as (engine, _):
        for update in range(4):
            for micro in range(4):
                engine.backward(engine(*batch(update, rank(), micro)))
                engine.step(lr_kwargs={"number": update})
        drain(engine)
    return noting.seen


@pytest.mark.parametrize("mode", ["acco", "dpu", "sync"])
def test_arguments_of_step_reach_the_scheduler_with_their_update(ranks, mode: str) -> None:
    assert ranks(2).run(step_arguments, mode) == [[0, 1, 2, 3]] * 2


def another_batch_size() -> tuple[list[Round], list[Any]]:
    """Job: 4 micro-batches per update for 3 updates, then 2."""
    with running(Run("acco", "ds_adamw", clip=0.5)) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(6):
            if update == 3:
                engine.set_train_batch_size(2 * 4 * 2)
            one_update(engine, update)
        drain(engine)
        assert engine.global_steps == 6
        return rounds, layout(engine, zero)


def test_batch_size_changes_between_updates(ranks) -> None:
    counts = lambda update, rank: (2, 2) if update < 3 else (1, 1)  # noqa: E731
    rounds = assemble(ranks(2).run(another_batch_size))
    check_commits(rounds, oracle_for(Run("acco", "ds_adamw", clip=0.5), 2, counts=counts))


def two_engines() -> Any:
    """Job: two engines step in turn, each beside the rounds of the other; one ends first."""
    jobs = [Run("acco", "ds_adamw", updates=3), Run("dpu", "sgd", updates=3, model_seed=7)]
    with running(jobs[0]) as first:
        with running(jobs[1]) as second:
            rounds = [record_rounds(zero) for _, zero in (first, second)]
            for update in range(2):
                for engine, _ in (first, second):
                    one_update(engine, update)
            drain(second[0])
            where = layout(*second)
        one_update(first[0], 2)
        drain(first[0])
        return (rounds[0], layout(*first)), (rounds[1], where)


def test_two_engines_one_of_which_ends_first(ranks) -> None:
    results = ranks(2).run(two_engines)
    first, second = (assemble([r[i] for r in results]) for i in range(2))
    check_commits(first, oracle_for(Run("acco", "ds_adamw"), 2))
    other = oracle_for(Run("dpu", "sgd", model_seed=7), 2)
    for got, want in zip(second, other.updates(2), strict=True):
        assert error(got.masters, want.theta) < TOLERANCE
    assert len(first) == 6 and math.isfinite(first[-1].grad_norm)
