"""Other people's training loops and models under ACCO: the same bits, the same rule, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import token_data
from tests.distributed.reference import check_commits, error, oracle_for, oracle_of, rules
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.training import (
    Round,
    Run,
    assemble,
    batch,
    drain,
    engine_for,
    json_config,
    layout,
    one_update,
    record_rounds,
    running,
    train,
)

RUN = Run("acco", "ds_adamw", updates=4, clip=0.5)
TOLERANCE = 5e-6


def rank() -> int:
    return int(torch.distributed.get_rank())


# ---- ways to write the loop: each must give the bits of the usual one ------------------------------------------------


def step_once_per_update(engine: Any, update: int) -> None:
    for micro in range(RUN.gas):
        engine.set_gradient_accumulation_boundary(micro == RUN.gas - 1)
        engine.backward(engine(*batch(update, rank(), micro)))
    engine.step()


def with_no_sync(engine: Any, update: int) -> None:
    with engine.no_sync():
        for micro in range(RUN.gas - 1):
            engine.backward(engine(*batch(update, rank(), micro)))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*batch(update, rank(), RUN.gas - 1)))
    engine.step()


def with_coalesced_reduction(engine: Any, update: int) -> None:
    with engine.coalesce_grad_reduction():
        for micro in range(RUN.gas):
            engine.backward(engine(*batch(update, rank(), micro)))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def manual_backward(engine: Any, update: int) -> None:
    for micro in range(RUN.gas):
        engine.scale(engine(*batch(update, rank(), micro))).backward()
        engine.step()


def plain_backward(engine: Any, update: int) -> None:
    for micro in range(RUN.gas):
        engine(*batch(update, rank(), micro)).backward()
        engine.step()


def loss_divided_by_the_caller(engine: Any, update: int) -> None:
    """As Hugging Face's trainer does."""
    for micro in range(RUN.gas):
        engine.backward(engine(*batch(update, rank(), micro)) / RUN.gas, scale_wrt_gas=False)
        engine.step()


def retained_graph(engine: Any, update: int) -> None:
    for micro in range(RUN.gas):
        engine.backward(engine(*batch(update, rank(), micro)), retain_graph=True)
        engine.step()


def created_graph(engine: Any, update: int) -> None:
    for micro in range(RUN.gas):
        engine.scale(engine(*batch(update, rank(), micro))).backward(create_graph=True)
        engine.step()


def autograd_grad_beside(engine: Any, update: int) -> None:
    """torch.autograd.grad through the engine's output: no micro-batch."""
    for micro in range(RUN.gas):
        x, y = batch(update, rank(), micro)
        (gradient,) = torch.autograd.grad(engine(x.requires_grad_(), y), x, create_graph=True)
        assert gradient.abs().sum() > 0
        engine.backward(engine(*batch(update, rank(), micro)))
        engine.step()


def evaluating_everywhere(engine: Any, update: int) -> None:
    """Evaluation and state dicts between forward and backward, between micro-batches and between updates."""
    for micro in range(RUN.gas):
        loss = engine(*batch(update, rank(), micro))
        engine.eval()
        with torch.no_grad():
            engine(*batch(99, rank(), micro))
        engine.train()
        engine.module.state_dict()
        engine.backward(loss)
        engine.module.zero_grad(set_to_none=micro % 2 == 0)
        engine.zero_grad()
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        assert all(p.grad is None for p in engine.module.parameters())
        engine.step()


LOOPS = [
    step_once_per_update,
    with_no_sync,
    with_coalesced_reduction,
    manual_backward,
    plain_backward,
    loss_divided_by_the_caller,
    retained_graph,
    autograd_grad_beside,
    evaluating_everywhere,
    created_graph,
]


def train_by(loop: Callable[[Any, int], None], delay: float = 0.0) -> tuple[list[Round], list[Any]]:
    """Job: the training RUN, written another way."""
    with running(RUN) as (engine, zero):
        zero.lane.before_round = lambda label: time.sleep(delay)
        rounds = record_rounds(zero)
        for update in range(RUN.updates):
            loop(engine, update)
        drain(engine)
        return rounds, layout(engine, zero)


@pytest.fixture(scope="module")
def usual(ranks) -> list[Round]:
    return assemble(ranks(2).run(train, RUN))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_other_ways_to_write_the_loop_change_no_bit(ranks, usual: list[Round], loop: Callable[..., None]) -> None:
    rounds = assemble(ranks(2).run(train_by, loop))
    assert [r.micro_batches for r in rounds] == [r.micro_batches for r in usual]
    assert_same_bits(usual, rounds)


def train_with_a_short_last_update(divided_by_the_caller: bool) -> tuple[list[Round], list[Any]]:
    """Job: the training RUN, whose data end one micro-batch before its last update is full."""
    with running(RUN) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(RUN.updates):
            steps = RUN.gas - (update == RUN.updates - 1)
            for micro in range(steps):
                engine.set_gradient_accumulation_boundary(micro == steps - 1)
                loss = engine(*batch(update, rank(), micro))
                if divided_by_the_caller:
                    engine.backward(loss / steps, scale_wrt_gas=False)
                else:
                    engine.backward(loss)
                engine.step()
        drain(engine)
        return rounds, layout(engine, zero)


def test_a_short_update_divided_by_the_caller_is_the_average_of_what_it_has(ranks) -> None:
    usual, divided = (assemble(ranks(2).run(train_with_a_short_last_update, by_caller)) for by_caller in (False, True))
    for ours, theirs in zip(divided, usual, strict=True):
        assert ours.micro_batches == theirs.micro_batches
        assert error(ours.masters, theirs.masters) < TOLERANCE
        # Only the estimate is made before it is known that the update is short.
        if ours.kind == "commit":
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=TOLERANCE)
    assert divided[-1].micro_batches == 2 * (RUN.gas - 1)


def stale_graph(retain: bool) -> str:
    """Job: a backward after the half boundary, of a forward before it."""
    with running(RUN) as (engine, _):
        one_update(engine, 0)
        losses = [engine(*batch(1, rank(), micro)) for micro in range(3)]
        try:
            engine.backward(losses[0], retain_graph=retain)
            engine.step()
            engine.backward(losses[1])
            engine.step()
            engine.backward(losses[0 if retain else 2])
        except RuntimeError as error:
            return str(error)
        finally:
            drain(engine)
        return ""


@pytest.mark.parametrize("retain", [False, True])
def test_backward_of_weights_that_are_gone_is_an_error(ranks, retain: bool) -> None:
    """At the half boundary the weights change; a graph built before it would silently mix both."""
    assert all("modified by an inplace operation" in message for message in ranks(2).run(stale_graph, retain))


# ---- models that fire hooks several times, or other parameters on each rank ------------------------------------------


class Recomputing(nn.Module):
    """A shared layer that runs three times, recomputed in backward."""

    def __init__(self, recompute: str, choose: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.recompute, self.choose = recompute, choose

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        layer = self.layers[int(labels.sum()) % 2 if self.choose else 0]
        for _ in range(3):
            if self.recompute == "off":
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda z: torch.tanh(layer(z)), x, use_reentrant=self.recompute == "reentrant")
        logits = x @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_recomputing(recompute: str, choose: bool, manual: bool) -> tuple[list[Round], list[Any]]:
    """Job: 4 updates of `Recomputing`, by engine.backward or by loss.backward()."""
    model = Recomputing(recompute, choose)
    with engine_for(model, json_config("acco", optimizer="ds_adamw")) as (engine, zero):
        rounds = record_rounds(zero)
        for update in range(4):
            for micro in range(4):
                loss = engine(*token_data(update, rank(), micro))
                if manual:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
        drain(engine)
        return rounds, layout(engine, zero)


@pytest.mark.parametrize("manual", [False, True], ids=["engine_backward", "loss_backward"])
@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
def test_B05_hooks_that_fire_several_times_per_backward(ranks, recompute: str, manual: bool) -> None:
    rounds = assemble(ranks(2).run(train_recomputing, recompute, False, manual))
    assert {r.micro_batches for r in rounds} == {4, 8}
    # Reentrant recomputation adds the uses of a layer to the sum one by one, hence in another order.
    for a, b in zip(assemble(ranks(2).run(train_recomputing, "off", False, False)), rounds, strict=True):
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert error(b.masters, a.masters) < 1e-5 and error(b.shown, a.shown) < 1e-5


@pytest.mark.parametrize("recompute", ["off", "reentrant"])
def test_B03_ranks_that_use_different_parameters_in_a_micro_batch(ranks, recompute: str) -> None:
    model = Recomputing("off", choose=True)
    names = [[n for n, p in model.named_parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    oracle = oracle_of(
        model, list(zip(names, rules("ds_adamw"), strict=True)), token_data, mode="acco", ranks=2, clip=0.0
    )
    used = [{int(token_data(t, r, k)[1].sum()) % 2 for t in range(4) for r in range(2)} for k in range(4)]
    assert {0, 1} in used, "the ranks differ somewhere"
    check_commits(assemble(ranks(2).run(train_recomputing, recompute, True, False)), oracle)


def train_in_eval_mode(mode: str) -> tuple[list[Round], list[Any]]:
    """Job: the module is in eval mode all the time, as in finetuning without dropout."""
    with running(Run(mode, "ds_adamw", updates=4)) as (engine, zero):
        rounds = record_rounds(zero)
        engine.eval()
        for update in range(4):
            one_update(engine, update)
        drain(engine)
        return rounds, layout(engine, zero)


def test_training_in_eval_mode_is_the_synchronous_rule(ranks) -> None:
    """Every forward is at theta_t, hence every gradient."""
    commits = [r for r in assemble(ranks(2).run(train_in_eval_mode, "acco")) if r.kind == "commit"]
    oracle = oracle_for(Run("sync", "ds_adamw"), 2)
    for commit, want in zip(commits, oracle.updates(4), strict=True):
        assert error(commit.masters, want.theta) < TOLERANCE
