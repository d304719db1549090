"""DeepSpeed's Muon in ACCO's rounds: matrices orthogonalized whole, wherever the shards end."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import gpt
from tests.distributed.reference import error, oracle_for
from tests.distributed.test_coarse_estimate import attach, check
from tests.distributed.training import Net, Round, Run, assemble, batch, engine_for, run_updates
from tests.oracle import Array, Group, Rule

SIZES = (5, 24, 11, 2)
MUON = {"lr": 0.01, "muon_lr": 0.02, "momentum": 0.9, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class MuonRule(Rule):
    """Muon (K. Jordan 2024) with Nesterov momentum; the quintic Newton-Schulz iteration in float64."""

    def apply(self, theta: Array, state: dict, grad: Array, lr: float) -> tuple[Array, dict]:
        moment = self.momentum * state.get("momentum_buffer", 0.0) + (1 - self.momentum) * grad
        x = (1 - self.momentum) * grad + self.momentum * moment
        rows, columns = x.shape
        x = x.T if rows > columns else x
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = (x.T if rows > columns else x) * np.sqrt(max(1.0, rows / columns))
        return theta * (1 - lr * self.weight_decay) - lr * x, {"momentum_buffer": moment}


def leave_uncompiled() -> None:
    """Compiling the kernels of DeepSpeed's own Muon takes a minute."""
    import torch._dynamo

    torch._dynamo.config.disable = True


def train_muon(run: Run, save: str = "", load: str = "", updates: tuple[int, int] | None = None) -> Any:
    """Job: a training with the Muon that DeepSpeed builds; each kind of parameter is a group of its own."""
    leave_uncompiled()
    model = Net(SIZES)
    config = run.config() | {"optimizer": {"type": "Muon", "params": MUON}}
    with engine_for(model, config, None, groups=list(model.parameters())) as (engine, zero):
        if load:
            engine.load_checkpoint(load)
        result = run_updates(engine, zero, range(*(updates or (0, run.updates))))
        if save:
            engine.save_checkpoint(save)
        return result


def whole(per_rank: list[Any]) -> list[Round]:
    """The ranks' rounds put together, without the state, which differs between the two kinds of groups."""
    return assemble([([replace(r, state=[{} for _ in r.state]) for r in rounds], where) for rounds, where in per_rank])


def muon_oracle(run: Run, ranks: int) -> Any:
    oracle = oracle_for(run, ranks, model=Net(SIZES))
    adam = Rule("adamw", MUON["lr"], MUON["weight_decay"], tuple(MUON["betas"]), MUON["eps"])
    muon = MuonRule("muon", MUON["muon_lr"], MUON["weight_decay"], momentum=MUON["momentum"])
    oracle.groups = [Group(g.names, muon if i == 0 else adam) for i, g in enumerate(oracle.groups)]
    return oracle


@pytest.mark.parametrize(
    ("ranks_", "run"),
    [
        (3, Run("acco", updates=6, clip=0.5)),
        (2, Run("acco", updates=6, clip=0.5, acco={"estimate_bits": 16, "warmup_updates": 2})),
        (4, Run("dpu", updates=6)),
        (2, Run("wp", updates=6)),
        (1, Run("acco", updates=4)),
    ],
    ids=lambda value: f"{value.mode}{value.acco.get('estimate_bits', '')}" if isinstance(value, Run) else str(value),
)
def test_rounds_agree_with_the_oracle(ranks, ranks_: int, run: Run) -> None:
    per_rank = ranks(ranks_).run(train_muon, run)
    oracle = muon_oracle(run, ranks_)
    if run.acco:
        attach(oracle, run, per_rank)
    # Where a value is quantized to the next level, fp32 is a level away from fp64.
    check(whole(per_rank), oracle, 2e-4 if run.acco else 2e-5)


@pytest.mark.parametrize("ranks_", [1, 2])
def test_sync_is_zero1(ranks, ranks_: int) -> None:
    """Without clipping, where DeepSpeed's ZeRO-1 and BF16_Optimizer do the same."""
    ours = whole(ranks(ranks_).run(train_muon, Run("sync", updates=5)))[-1].masters
    assert error(ours, ranks(ranks_).run(weights_of_zero1, 5)[0]) < 1e-5


def weights_of_zero1(updates: int) -> dict[str, Any]:
    """Job: the weights after updates of DeepSpeed's own ZeRO-1."""
    leave_uncompiled()
    model = Net(SIZES)
    config = Run(None).config() | {"optimizer": {"type": "Muon", "params": MUON}}
    with engine_for(model, config, None, groups=list(model.parameters())) as (engine, _):
        for update in range(updates):
            for micro in range(4):
                engine.backward(engine(*batch(update, torch.distributed.get_rank(), micro)))
                engine.step()
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def test_a_resumed_run_is_the_same_run(ranks, tmp_path) -> None:
    """The third update's estimate comes from the momentum of the checkpoint; on another number of ranks, too."""
    run, folder = Run("acco", updates=6, clip=0.5), str(tmp_path)
    straight = whole(ranks(3).run(train_muon, run))
    ranks(3).run(train_muon, run, folder, updates=(0, 3))
    resumed = whole(ranks(3).run(train_muon, run, load=folder, updates=(3, 6)))
    for got, want in zip(resumed, straight[-len(resumed) :], strict=True):
        assert all(np.array_equal(got.masters[n], want.masters[n]) for n in want.masters)
        assert all(np.array_equal(got.shown[n], want.shown[n]) for n in want.shown)
    # On two ranks the third rank's data are missing: the oracle goes on from what three ranks have left.
    oracle = muon_oracle(run, 3)
    oracle.updates(3)
    oracle.ranks = 2
    other = whole(ranks(2).run(train_muon, run, load=folder, updates=(3, 6)))
    check(other, oracle, 2e-5)


def numbers_drawn_beside_rounds() -> tuple[list[float], list[float]]:
    """Job: what the main thread draws while the lane is at work, as dropout does; what it would draw by itself."""
    import torch._dynamo

    def draw() -> float:
        time.sleep(0.002)
        return float(torch.rand(()))

    torch._dynamo.reset()  # what other jobs have left of its caches
    model, drawn = Net(SIZES), []
    config = Run("acco").config() | {"optimizer": {"type": "Muon", "params": MUON}}
    with (
        torch._dynamo.config.patch(disable=False),
        engine_for(model, config, None, groups=list(model.parameters())) as (engine, zero),
    ):
        torch.manual_seed(5)
        for micro in range(4):
            engine.backward(engine(*batch(0, torch.distributed.get_rank(), micro)))
            engine.step()
            drawn += [draw()]
            while not zero.lane.idle:
                drawn.append(draw())
    torch.manual_seed(5)
    return drawn, [float(torch.rand(())) for _ in drawn]


def test_the_lane_leaves_random_generators_alone(ranks) -> None:
    """`torch.compile` does not: it would put them back to where they were when it began."""
    for drawn, alone in ranks(2).run(numbers_drawn_beside_rounds):
        assert drawn == alone


class Shapes(torch.nn.Module):
    """Parameters of any shapes (28 elements at most), each pulled towards the data."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        data = torch.cat([x.flatten(), y.flatten()])
        return sum(torch.log1p((w.flatten() - data[: w.numel()]).pow(2)).sum() for w in self.weights)


def muon_engine(mode: str | None, *shapes: tuple[int, ...]) -> Any:
    """(engine, optimizer) as a context: `Shapes` under Muon."""
    leave_uncompiled()
    config = Run(mode).config() | {"optimizer": {"type": "Muon", "params": MUON}}
    return engine_for(model := Shapes(*shapes), config, None, groups=list(model.parameters()))


def filters(shape: tuple[int, ...]) -> list[Any]:
    """Job: the rounds of a training of two weights, the first of this shape."""
    with muon_engine("acco", shape, (3, 2)) as (engine, zero):
        return [r.shown[0] for r in run_updates(engine, zero, range(3))[0]]


def test_convolution_filters_are_matrices(ranks) -> None:
    for conv, matrix in zip(ranks(2).run(filters, (4, 1, 3, 2)), ranks(2).run(filters, (4, 6)), strict=True):
        assert len(conv) == 6 and all(map(np.array_equal, conv, matrix))


def momentum_of_zero1(folder: str, save: bool, shapes: Any = ((2, 3), (2, 2), (2, 2), (2, 2))) -> str:
    """Job: `save` DeepSpeed's own ZeRO-1; load it under ACCO: the refusal, and whether theta alone is taken.

    On three ranks the first shard holds one whole matrix, and its momentum is that of a flat shard, too.
    """
    want = None
    if save:
        with muon_engine(None, *shapes) as (engine, _):
            for micro in range(4):
                engine.backward(engine(*batch(0, torch.distributed.get_rank(), micro)))
                engine.step()
            engine.save_checkpoint(folder)
            want = [p.detach().clone() for p in engine.module.parameters()]
    with muon_engine("acco", *shapes) as (engine, _):
        before = [p.detach().clone() for p in engine.module.parameters()]
        try:
            engine.load_checkpoint(folder)
        except ValueError as refusal:
            assert all(map(torch.equal, before, engine.module.parameters())), "the refused load changed the training"
            engine.load_checkpoint(folder, load_optimizer_states=False)
            assert want is None or all(map(torch.equal, want, engine.module.parameters()))
            return str(refusal)
    return ""


def test_momentum_of_whole_matrices_is_refused(ranks, tmp_path) -> None:
    """On all ranks, though one of them could take its part; on another number of ranks, too."""
    for message in ranks(3).run(momentum_of_zero1, str(tmp_path), save=True):
        assert "momentum has 8 elements" in message and "load_optimizer_states=False" in message
    for message in ranks(2).run(momentum_of_zero1, str(tmp_path), save=False):
        assert "momentum_buffer of whole parameters" in message and "load_optimizer_states=False" in message


def only_muon_or_its_own_adam(own_adam: bool) -> str:
    """Job: an engine over MuonWithAuxAdam built by the script, of matrices only or with Adam steps of its own."""
    leave_uncompiled()
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    model = Net(SIZES)
    for p in model.parameters():
        p.use_muon = p.dim() > 1
        p.requires_grad_(own_adam or p.use_muon)
    groups = [
        {"params": [p for p in model.parameters() if p.use_muon is kind], "use_muon": kind} for kind in (True, False)
    ]
    try:
        with engine_for(model, Run("acco").config(), MuonWithAuxAdam(groups[: 1 + own_adam])) as (engine, zero):
            rounds, _ = run_updates(engine, zero, range(2))
            return f"{sum(r.applied for r in rounds)} rounds"
    except ValueError as refusal:
        return str(refusal)


def test_of_a_script_works_without_adam_steps_of_its_own(ranks) -> None:
    assert ranks(2).run(only_muon_or_its_own_adam, False) == ["4 rounds"] * 2
    for message in ranks(2).run(only_muon_or_its_own_adam, True):
        assert "fused Adam" in message


def megatron_matrices(tp: int) -> list[str] | str:
    """Job: the parameters of a Llama-like megatron-core model that Muon gets, or why there is no engine."""
    import megatron_acco

    leave_uncompiled()
    with gpt.parallel(tp):
        model = gpt.build(gpt.Case(tp=tp, style="llama"))
        try:
            engine = gpt.engine_of(gpt.Case(tp=tp, style="llama"), model, 2, optimizer={"type": "Muon", "params": MUON})
        except ValueError as refusal:
            return str(refusal)
        matrices = [name for name, p in model.named_parameters() if p.use_muon]
        megatron_acco.drain(engine)
        engine.destroy()
        return matrices


def test_megatrons_embeddings_and_output_layer_go_to_adam(ranks) -> None:
    for names in ranks(2).run(megatron_matrices, 1):
        assert any("linear_qkv" in name for name in names)
        assert not [name for name in names if "embedding" in name or "output_layer" in name or "norm" in name]


def test_tensor_parallelism_is_refused(ranks) -> None:
    for message in ranks(2).run(megatron_matrices, 2):
        assert "tensor parallelism must be 1, it is 2" in message
