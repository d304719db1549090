"""Checkpoints: resume bit for bit, in new processes, in every mode; loads without optimizer state; conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import RankPool
from tests.distributed.precision import FAULTY, Fault, faulty, fp16_allowed, fp16_section
from tests.distributed.reference import error
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.test_parameters import one_group
from tests.distributed.training import (
    BETAS,
    EPS,
    Net,
    Round,
    Run,
    assemble,
    batch,
    client_optimizer,
    engine_for,
    json_config,
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
)


@pytest.fixture(scope="module")
def new_processes() -> Iterator[RankPool]:
    """Two ranks that have never trained anything."""
    pool = RankPool(2)
    yield pool
    pool.close()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that moves at every update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1.0 + 0.1 * n))


def with_schedule(run: Run) -> tuple[Any, Any, torch.nn.Module]:
    """Engine, optimizer and model of `run`, with a scheduler."""
    model = Net(seed=run.model_seed, dtype=run.dtype)
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    engine, zero = start(model, run.config(), optimizer, lr_scheduler=schedule)
    return engine, zero, model


def go_on(engine: Any, zero: Any, updates: range, run: Run, save_at: int, folder: str) -> tuple[Any, ...]:
    """Rounds, layout, final learning rates and shown weights of `updates`, with a save before update `save_at`."""
    import megatron_acco

    rounds = record_rounds(zero)
    for update in updates:
        if update == save_at:
            engine.save_checkpoint(folder, tag="half", client_state={"note": update})
        one_update(engine, update, dtype=run.dtype)
    megatron_acco.drain(engine)
    shown = {name: numpy(p) for name, p in engine.module.named_parameters()}
    return rounds, layout(engine, zero), engine.get_lr(), shown


def straight(run: Run, save_at: int, folder: str) -> tuple[Any, ...]:
    """Job: the whole training."""
    engine, zero, _ = with_schedule(run)
    result = go_on(engine, zero, range(run.updates), run, save_at, folder)
    engine.destroy()
    return result


def resumed(run: Run, first: int, folder: str) -> tuple[Any, ...]:
    """Job: load into an engine of another initialisation and go on from update `first`."""
    engine, zero, _ = with_schedule(dataclasses.replace(run, model_seed=99))
    path, client_state = engine.load_checkpoint(folder, tag="half")
    assert path is not None and client_state["note"] == first
    assert engine.global_steps == first
    result = go_on(engine, zero, range(first, run.updates), run, -1, folder)
    engine.destroy()
    return result


BF16_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}
RESUMED_RUNS = [
    Run("acco", "ds_adamw", clip=0.5),
    Run("acco", "torch_adam"),
    Run("acco", "cpu_adamw", gas=5, clip=0.5),
    Run("acco", "sgd", clip=0.5),
    Run("acco", "lion"),
    Run("acco", "ds_adamw", bf16=True),
    Run("acco", "ds_adamw", bf16=True, extra=BF16_SUMS),
    Run("acco", "ds_adamw", clip=0.5, acco={"estimate_bits": 4, "estimate_stochastic_rounding": True}),
    Run("acco", "torch_adamw", bf16=True, acco={"estimate_bits": 8, "estimate_fraction": 0.75}),
    Run("acco", "torch_adamw", acco={"warmup_updates": 9}),
    Run("acco", "torch_adamw", acco={"warmup_updates": 10}),
    Run("acco", "torch_adamw", acco={"warmup_updates": 13}),
    Run("dpu", "ds_adamw", clip=0.5),
    Run("dpu", "sgd"),
    Run("wp", "torch_adamw", clip=0.5),
    Run("wp", "lion"),
    Run("wp", "ds_adamw", bf16=True),
    Run("dpu", "torch_adamw", bf16=True, extra=BF16_SUMS, acco={"warmup_updates": 9}),
    Run("sync", "ds_adamw"),
    Run("sync", "torch_adamw", bf16=True),
]


@pytest.mark.parametrize(
    "run",
    [dataclasses.replace(run, updates=20) for run in RESUMED_RUNS],
    ids=lambda r: (
        f"{r.mode}-{r.optimizer}-gas{r.gas}-{'bf16' if r.bf16 else 'fp32'}"
        f"{'-sums' if r.extra else ''}{r.acco.get('warmup_updates', '')}"
        f"{'-bits' + str(r.acco['estimate_bits']) if 'estimate_bits' in r.acco else ''}"
    ),
)
def test_B29_resume_in_new_processes_is_bit_identical(ranks, new_processes, tmp_path, run: Run) -> None:
    without_save = ranks(2).run(straight, run, -1, str(tmp_path))
    with_save = ranks(2).run(straight, run, 10, str(tmp_path))
    after_load = new_processes.run(resumed, run, 10, str(tmp_path))
    whole, saved, loaded = (assemble([r[:2] for r in results]) for results in (without_save, with_save, after_load))
    assert_same_bits(whole, saved)
    tail = [r for r in whole if r.update >= 10]
    assert_same_bits(tail, loaded)
    assert [r.lr for r in tail] == [r.lr for r in loaded] and len({r.lr for r in tail}) == 10
    for a, b in zip(without_save, after_load, strict=True):
        assert a[2] == b[2], "learning rates"
        assert all(np.array_equal(a[3][name], b[3][name]) for name in a[3]), "weights shown to compute"


@dataclasses.dataclass
class ScaledTraining:
    """What a training in fp16 shows on a rank: `Trace`'s figures, per update, and the weights at its end."""

    rounds: list[Round]
    where: list[Any]
    scales: list[list[float]]
    skipped: list[int]
    rates: list[float]
    shown: dict[str, np.ndarray]


def scaled(
    run: Run, updates: range, faults: list[Fault], folder: str, save_at: int = -1, load: bool = False
) -> ScaledTraining:
    """Job: some updates in fp16, with values injected into gradients, a save before one of them or a load first."""
    import megatron_acco

    rank, inject = torch.distributed.get_rank(), [0.0]
    model = Net(seed=99 if load else 1, dtype=torch.float16)
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    with fp16_allowed(), engine_for(model, run.config(), optimizer, lr_scheduler=schedule) as (engine, zero):
        if load:
            path, _ = engine.load_checkpoint(folder, tag="half")
            assert path is not None and engine.global_steps == updates.start
        result = ScaledTraining(record_rounds(zero), layout(engine, zero), [], [], [], {})
        dict(engine.module.named_parameters())[FAULTY[0]].register_hook(lambda grad: faulty(grad, inject[0]))
        for update in updates:
            if update == save_at:
                engine.save_checkpoint(folder, tag="half")
            result.scales.append([])
            for micro in range(run.gas):
                inject[0] = sum(value for *where, value in faults if where == [update, rank, micro])
                result.scales[-1].append(float(zero.loss_scale))
                engine.backward(engine(*batch(update, rank, micro, torch.float16)))
                engine.step()
            megatron_acco.drain(engine)
            result.skipped.append(engine.skipped_steps)
            result.rates.append(engine.get_lr()[0])
        result.shown = {name: numpy(p) for name, p in model.named_parameters()}
        return result


@pytest.mark.parametrize("half", [0, 3], ids=["first_half", "second_half"])
@pytest.mark.parametrize("mode", ["acco", "dpu", "wp", "sync"])
def test_B29_resume_in_fp16_right_after_a_skipped_update(ranks, tmp_path, mode: str, half: int) -> None:
    run = Run(mode, "torch_adamw", clip=0.5, extra=fp16_section(loss_scale_window=3))
    faults = [(5, 1, half, float("inf")), (9, 0, half, float("inf"))]
    whole = ranks(2).run(scaled, run, range(12), faults, str(tmp_path))
    saved = ranks(2).run(scaled, run, range(12), faults, str(tmp_path), save_at=6)
    loaded = ranks(2).run(scaled, run, range(6, 12), faults, str(tmp_path), load=True)
    rounds = [assemble([(r.rounds, r.where) for r in results]) for results in (whole, saved, loaded)]
    assert_same_bits(rounds[0], rounds[1])
    assert_same_bits([r for r in rounds[0] if r.update >= 6], rounds[2])
    assert whole[0].skipped[4:7] == [0, 1, 1] and whole[0].skipped[-1] == 2
    assert len({scale for update in whole[0].scales[6:] for scale in update}) > 1, "the scale falls and grows"
    for before, after in zip(whole, loaded, strict=True):
        assert before.scales[6:] == after.scales and before.skipped[6:] == after.skipped
        assert before.rates[6:] == after.rates
        assert all(np.array_equal(before.shown[name], after.shown[name]) for name in before.shown)


@pytest.mark.parametrize("ranks_", [1, 3, 4])
def test_B29_resume_in_the_same_processes_with_other_numbers_of_ranks(ranks, tmp_path, ranks_: int) -> None:
    run = Run("acco", "ds_adamw", updates=6, clip=0.5)
    whole = assemble([r[:2] for r in ranks(ranks_).run(straight, run, 3, str(tmp_path))])
    loaded = assemble([r[:2] for r in ranks(ranks_).run(resumed, run, 3, str(tmp_path))])
    assert_same_bits([r for r in whole if r.update >= 3], loaded)


def save_in_the_middle(run: Run, folder: str) -> list[str]:
    """Job: try to save after each micro-batch of an update; the error messages."""
    messages = []
    with running(run) as (engine, _):
        one_update(engine, 0)
        for micro in range(run.gas):
            engine.backward(engine(*batch(1, torch.distributed.get_rank(), micro)))
            engine.step()
            try:
                engine.save_checkpoint(folder, tag=f"micro{micro}")
            except RuntimeError as refused:
                messages.append(str(refused))
    return messages


@pytest.mark.parametrize("mode", ["acco", "dpu"])
def test_B29_save_in_the_middle_of_an_update_is_refused(ranks, tmp_path, mode: str) -> None:
    for messages in ranks(2).run(save_in_the_middle, Run(mode), str(tmp_path)):
        assert len(messages) == 3 and all("middle of an update" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["micro3"]


def save_and_load_twice(run: Run, folder: str) -> tuple[Any, ...]:
    """Job: a load in the middle of a running training (mid-update, round in flight) forgets that training."""
    with running(run) as (engine, zero):
        for update in range(3):
            one_update(engine, update)
        engine.save_checkpoint(folder, tag="three")
        first, where = run_updates(engine, zero, range(3, 6))
        engine.backward(engine(*batch(50, 0, 0)))
        engine.step()
        engine.load_checkpoint(folder, tag="three")
        second, _ = run_updates(engine, zero, range(3, 6))
        return first, second, where


def test_B29_load_into_a_running_training(ranks, tmp_path) -> None:
    results = ranks(2).run(save_and_load_twice, Run("acco", "ds_adamw", clip=0.5), str(tmp_path))
    first, second = (assemble([(r[i], r[2]) for r in results]) for i in range(2))
    assert_same_bits(first, second)


def without_optimizer_state(run: Run, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Job: train, save; load only the weights into another model; 2 updates at learning rate 1e-6."""
    import megatron_acco

    with running(run) as (engine, zero):
        for update in range(4):
            one_update(engine, update, dtype=run.dtype)
        engine.save_checkpoint(folder, tag="four")
        with megatron_acco.real_parameters(engine):
            saved = {name: numpy(p) for name, p in engine.module.named_parameters()}
    other = Net(seed=99, dtype=run.dtype)
    adamw = torch.optim.AdamW(other.parameters(), lr=1e-6, betas=BETAS, eps=EPS)
    engine, zero = start(other, run.config(), adamw)
    engine.load_checkpoint(folder, tag="four", **options)
    moments = [float(v.abs().sum()) for state in zero.optimizer.state.values() for v in state.values()]
    masters, _, _ = shards(zero)
    where = layout(engine, zero)
    shown = {name: numpy(p) for name, p in other.named_parameters()}
    rounds, _ = run_updates(engine, zero, range(2), dtype=run.dtype)
    engine.destroy()
    return {"saved": saved, "moments": moments, "masters": masters, "where": where, "shown": shown, "rounds": rounds}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{"load_optimizer_states": False}, {"load_module_only": True}],
    ids=["no_optimizer_states", "module_only"],
)
def test_B31_load_weights_without_optimizer_state(ranks, tmp_path, bf16: bool, options: dict[str, Any]) -> None:
    run = Run("acco", "torch_adamw", bf16=bf16)
    results = ranks(2).run(without_optimizer_state, run, str(tmp_path), options)
    saved, where = results[0]["saved"], results[0]["where"]
    masters = named([r["masters"] for r in results], where)
    # bf16: the module file holds weights rounded to 8 bits, the masters may be whole.
    assert error(masters, saved) <= (2**-8 if bf16 else 0.0)
    for result in results:
        assert not any(result["moments"]), "moments start at zero"
        assert all(np.array_equal(result["shown"][name], saved[name]) for name in saved)
    for round_ in assemble([(r["rounds"], r["where"]) for r in results]):
        for name, value in saved.items():
            assert np.abs(round_.masters[name] - value).max() < (4e-3 if bf16 else 1e-4)
            assert np.abs(round_.shown[name] - value).max() < (8e-3 if bf16 else 1e-4)


def tied_two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}], lr=1e-2)


def train_and_save(make_model: Any, make_optimizer: Any, data: Any, folder: str, mode: str) -> Any:
    """Job: 4 updates and a save; the masters of this rank."""
    model = make_model()
    engine, zero = start(model, json_config(mode), make_optimizer(model))
    run_updates(engine, zero, range(4), data)
    engine.save_checkpoint(folder, tag="four")
    result = (shards(zero)[0], layout(engine, zero))
    engine.destroy()
    return result


@pytest.mark.parametrize("mode", ["acco", "wp"])
def test_B33_zero_to_fp32_gives_the_masters(ranks, tmp_path, mode: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    job = (models.tied_off, tied_two_groups, models.token_data, str(tmp_path), mode)
    results = ranks(2).run(train_and_save, *job)
    masters = named([r[0] for r in results], results[0][1])
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "four")
    assert set(exported) == {*masters, "head.weight"}
    for name, value in masters.items():
        assert exported[name].shape == value.shape and np.array_equal(numpy(exported[name]), value), name
    assert exported["head.weight"] is exported["embedding.weight"] or torch.equal(
        exported["head.weight"], exported["embedding.weight"]
    )
    # A shard that is missing must not give a smaller answer.
    next(iter(tmp_path.glob("four/*zero_pp_rank_1*"))).unlink()
    with pytest.raises((AssertionError, ValueError, FileNotFoundError, KeyError, RuntimeError)):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "four")


def test_B33_zero_to_fp32_of_57_elements(ranks, tmp_path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    job = (models.vectors_57, one_group, models.vector_data, str(tmp_path), "acco")
    results = ranks(2).run(train_and_save, *job)
    masters = named([r[0] for r in results], results[0][1])
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "four")
    assert exported.keys() == masters.keys()
    assert all(np.array_equal(numpy(exported[name]), value) for name, value in masters.items())
