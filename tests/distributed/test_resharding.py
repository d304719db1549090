"""Checkpoints on other numbers of ranks, between ACCO and DeepSpeed's own ZeRO-1, and through the universal form.

Every comparison is by name of parameter and element by element: masters, moments, step counts, what compute is shown
(theta~), and the loss of the first micro-batch. Covers CASES B01, B08, B31, B33, B34 across ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed import models
from tests.distributed.test_parameters import one_group
from tests.distributed.test_resume import tied_two_groups
from tests.distributed.training import (
    Net,
    batch,
    client_optimizer,
    drain,
    json_config,
    layout,
    named,
    numpy,
    one_update,
    parameter_groups,
    run_updates,
    shards,
    start,
)
from tests.oracle import Params

UPDATES = 4
UNIVERSAL = {"checkpoint": {"load_universal": True}}


@dataclass(frozen=True)
class Case:
    """A training to save and resume: model by seed, optimizer, data, mode (None: DeepSpeed's own ZeRO-1), JSON."""

    model: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    data: Callable[..., Any] = batch
    mode: str | None = "acco"
    dtype: torch.dtype = torch.float32
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, **extra: Any) -> dict[str, Any]:
        bf16 = {"bf16": {"enabled": True}} if self.dtype is torch.bfloat16 else {}
        json = {**bf16, **self.extra, **extra}
        named_optimizer = "ds_adamw" if self.optimizer is by_json else None
        return json_config(self.mode, clip=0.5, optimizer=named_optimizer, **json)


def vectors_57(seed: int) -> nn.Module:
    return reseeded(models.vectors_57(), seed)


def vectors_5(seed: int) -> nn.Module:
    return reseeded(models.vectors_5(), seed)


def tied(seed: int) -> nn.Module:
    return reseeded(models.tied_off(), seed)


def net(seed: int) -> nn.Module:
    return Net(seed=seed)


def net_bf16(seed: int) -> nn.Module:
    return Net(seed=seed, dtype=torch.bfloat16)


def frozen(seed: int) -> nn.Module:
    model = models.Frozen(seed)
    model.register_buffer("calls", torch.full((3,), float(seed)))
    return model


def reseeded(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def two_groups(model: nn.Module) -> torch.optim.Optimizer | None:
    return client_optimizer("torch_adamw", parameter_groups(model))


def lion(model: nn.Module) -> torch.optim.Optimizer | None:
    return client_optimizer("lion", parameter_groups(model))


def by_json(model: nn.Module) -> None:
    """DeepSpeed's AdamW, named in the JSON."""


CASES = {
    "57 elements": Case(vectors_57, one_group, models.vector_data),
    "5 elements": Case(vectors_5, one_group, models.vector_data),
    "tied, 2 groups, wp": Case(tied, tied_two_groups, models.token_data, "wp"),
    "dpu, bf16": Case(net_bf16, two_groups, mode="dpu", dtype=torch.bfloat16),
    "another optimizer": Case(net, lion),
    "frozen": Case(frozen, one_group),
    "sync, DeepSpeed's Adam": Case(net, by_json, mode="sync"),
}


@dataclass
class State:
    """This rank's view of a training: partitions, step counts, weights shown to compute, loss of a fixed batch."""

    masters: list[Any]
    moments: list[dict[str, Any]]
    steps: list[Any]
    where: list[Any]
    shown: Params
    real: Params
    loss: float
    global_steps: int


def state_of(case: Case, engine: Any, zero: Any) -> State:
    """Drains; changes nothing else."""
    import megatron_acco

    drain(engine)
    masters, moments, steps = shards(zero)
    shown = {name: numpy(p) for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        loss = float(engine.module(*case.data(1000, 0, 0, case.dtype)))  # past the engine: at the weights shown
    with megatron_acco.real_parameters(engine):
        real = {name: numpy(value) for name, value in engine.module.state_dict().items()}
    return State(masters, moments, steps, layout(engine, zero), shown, real, loss, engine.global_steps)


@contextlib.contextmanager
def engine_of(case: Case, seed: int, **extra: Any) -> Iterator[Any]:
    model = case.model(seed)
    model.universal_checkpoint_info = {"universal_checkpoint_version": 0.4}
    engine, zero = start(model, case.config(**extra), case.optimizer(model))
    try:
        yield engine, zero
    finally:
        engine.destroy()


def save(cases: dict[str, Case], folder: str) -> dict[str, State]:
    """Job: train and save every case."""
    states = {}
    for name, case in cases.items():
        with engine_of(case, seed=1) as (engine, zero):
            for update in range(UPDATES):
                one_update(engine, update, case.data, case.dtype)
            states[name] = state_of(case, engine, zero)
            engine.save_checkpoint(f"{folder}/{name}", tag="saved")
    return states


def resume(cases: dict[str, Case], folder: str, options: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Job: load every case into a model of another initialisation; the state, and that of two updates later."""
    states = {}
    for name, case in cases.items():
        with engine_of(case, seed=99, **extra) as (engine, zero):
            path, _ = engine.load_checkpoint(f"{folder}/{name}", tag="saved", **(options or {}))
            assert path is not None
            after_load = state_of(case, engine, zero)
            run_updates(engine, zero, range(UPDATES, UPDATES + 2), case.data, case.dtype)
            states[name] = after_load, state_of(case, engine, zero)
    return states


def by_name(states: list[State]) -> tuple[Params, dict[str, Params]]:
    """Masters and moments of all ranks; asserts that padding is zero and that step counts agree."""
    where, keys = states[0].where, sorted({key for s in states for group in s.moments for key in group})
    assert all(s.steps == states[0].steps for s in states)
    masters = named([s.masters for s in states], where)
    return masters, {key: named([[g[key] for g in s.moments] for s in states], where) for key in keys}


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def assert_resumed(before: list[State], after: list[State], estimate: bool = True, label: str = "") -> None:
    """Everything bit-identical by name; `estimate`: what compute is shown, too (otherwise that is theta)."""
    (masters, moments), (loaded, loaded_moments) = by_name(before), by_name(after)
    assert same(masters, loaded), (label, "masters")
    assert moments.keys() == loaded_moments.keys() and moments, (label, "moments")
    for key, values in moments.items():
        assert same(values, loaded_moments[key]), (label, key)
    assert before[0].steps == after[0].steps and any(before[0].steps), (label, "steps")
    for state in after:
        assert same(before[0].real, state.real), (label, "theta, frozen weights, buffers")
        assert state.global_steps == before[0].global_steps == UPDATES
        if estimate:
            assert same(before[0].shown, state.shown), (label, "weights shown to compute")
            assert state.loss == before[0].loss, (label, "first loss")
        else:
            assert all(np.array_equal(value, before[0].real[name]) for name, value in state.shown.items()), label


def pick(results: list[dict[str, Any]], name: str) -> list[Any]:
    return [r[name] for r in results]


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, list[dict[str, State]]]]:
    """`saved(n)`: all cases, trained and saved once on n ranks."""
    known: dict[int, tuple[str, list[dict[str, State]]]] = {}

    def get(n: int) -> tuple[str, list[dict[str, State]]]:
        if n not in known:
            folder = str(tmp_path_factory.mktemp(f"saved_by_{n}"))
            known[n] = folder, ranks(n).run(save, CASES, folder)
        return known[n]

    return get


# ---- other numbers of ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4)]
)
def test_B08_resume_on_any_number_of_ranks(ranks, saved, before: int, after: int) -> None:
    folder, states = saved(before)
    results = ranks(after).run(resume, CASES, folder)
    for name, case in CASES.items():
        shown = pick(states, name)[0].shown
        is_theta = all(np.array_equal(value, pick(states, name)[0].real[key]) for key, value in shown.items())
        assert is_theta == (case.mode == "sync"), "there is an estimate to lose"
        loaded = [pair[0] for pair in pick(results, name)]
        assert_resumed(pick(states, name), loaded, label=name)
        moved = by_name([pair[1] for pair in pick(results, name)])[0]
        assert not same(moved, by_name(loaded)[0]) and all(np.isfinite(v).all() for v in moved.values()), name


@pytest.mark.parametrize(
    "options", [{"load_optimizer_states": False}, {"load_module_only": True}], ids=lambda o: min(o)
)
@pytest.mark.parametrize("after", [3, 4])
def test_B31_weights_only_on_any_number_of_ranks(ranks, saved, after: int, options: dict[str, Any]) -> None:
    folder, states = saved(2)
    results = ranks(after).run(resume, CASES, folder, options)
    for name in CASES:
        loaded, before = [pair[0] for pair in pick(results, name)], pick(states, name)[0]
        masters, moments = by_name(loaded)
        assert all(np.array_equal(value, before.real[key]) for key, value in masters.items()), name
        assert not any(value.any() for state in moments.values() for value in state.values()), name
        for state in loaded:
            assert same(state.real, before.real), name
            assert all(np.array_equal(value, before.real[key]) for key, value in state.shown.items()), name


# ---- to and from ZeRO-1 ---------------------------------------------------------------------------------------------

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ZERO1 = {
    "fp32": Case(net, two_groups, mode=None),
    "elastic": Case(net, by_json, mode=None, extra={"zero": {"elastic_checkpoint": True}}),
    "round robin": Case(net, two_groups, mode=None, extra={"zero": {"round_robin_gradients": True}}),
    "aligned": Case(net, two_groups, mode=None, extra={"zero": {"parameter_alignment": True}}),
    "bf16": Case(net_bf16, two_groups, mode=None, dtype=torch.bfloat16),
    "BF16_Optimizer": Case(net_bf16, two_groups, mode=None, dtype=torch.bfloat16, extra=FP32_SUMS),
    "stage 2": Case(net, two_groups, mode=None, extra={"zero": {"stage": 2}}),
}


def under(mode: str | None, cases: dict[str, Case]) -> dict[str, Case]:
    return {name: Case(c.model, c.optimizer, c.data, mode, c.dtype) for name, c in cases.items()}


@pytest.mark.parametrize("after", [2, 4])
def test_a_zero1_checkpoint_continues_under_acco(ranks, tmp_path, after: int) -> None:
    states = ranks(2).run(save, ZERO1, str(tmp_path))
    for mode in ("acco", "sync"):
        results = ranks(after).run(resume, under(mode, ZERO1), str(tmp_path))
        for name in ZERO1:
            loaded = [pair[0] for pair in pick(results, name)]
            assert_resumed(pick(states, name), loaded, label=name)


def test_an_acco_checkpoint_continues_under_zero1(ranks, tmp_path) -> None:
    kinds = {"fp32": ZERO1["fp32"], "bf16": ZERO1["bf16"], "BF16_Optimizer": ZERO1["BF16_Optimizer"]}
    states = ranks(2).run(save, under("acco", kinds), str(tmp_path))
    results = ranks(2).run(resume, kinds, str(tmp_path))
    for name in kinds:
        loaded = [pair[0] for pair in pick(results, name)]
        assert_resumed(pick(states, name), loaded, estimate=False, label=name)


# ---- the universal form ---------------------------------------------------------------------------------------------

CONVERTIBLE = {name: case for name, case in CASES.items() if name != "another optimizer"}  # of Adam only: DeepSpeed


def to_universal(folder: str, out: str, **options: Any) -> None:
    """DeepSpeed's converter, on the folder of one checkpoint."""
    from deepspeed.checkpoint.ds_to_universal import main

    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    settings |= {"inject_missing_state": False, **options}
    main(argparse.Namespace(input_folder=folder, output_folder=out, **settings))


@pytest.fixture(scope="module")
def universal(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, State]]]:
    """The checkpoints of two ranks in the universal form."""
    folder, states = saved(2)
    out = tmp_path_factory.mktemp("universal")
    for name in CONVERTIBLE:
        to_universal(f"{folder}/{name}/saved", f"{out}/{name}/saved")
    return str(out), states


@pytest.mark.parametrize("after", [1, 2, 4])
def test_B34_resume_from_the_universal_form(ranks, universal, after: int) -> None:
    folder, states = universal
    results = ranks(after).run(resume, CONVERTIBLE, folder, **UNIVERSAL)
    for name in CONVERTIBLE:
        loaded = [pair[0] for pair in pick(results, name)]
        assert_resumed(pick(states, name), loaded, estimate=False, label=name)


def test_B34_an_acco_checkpoint_in_the_universal_form_continues_under_zero1(ranks, universal) -> None:
    folder, states = universal
    # Where a rank has no part of a group, DeepSpeed's own load fails: not on 4 ranks here.
    cases = {name: CONVERTIBLE[name] for name in ("57 elements", "tied, 2 groups, wp")}
    results = ranks(3).run(resume, under(None, cases), folder, **UNIVERSAL)
    for name in cases:
        assert_resumed(pick(states, name), [pair[0] for pair in pick(results, name)], estimate=False, label=name)


# ---- refusals: on all ranks, with names, and the training goes on ---------------------------------------------------


def load_and_go_on(case: Case, folder: str, **extra: Any) -> tuple[str, State, State]:
    """Job: train one update, try to load, train another; the refusal, and the states around it."""
    with engine_of(case, seed=1, **extra) as (engine, zero):
        one_update(engine, 0, case.data, case.dtype)
        before = state_of(case, engine, zero)
        for micro in range(2):  # the try comes in the middle of an update, an estimate in flight
            engine.backward(engine(*case.data(1, torch.distributed.get_rank(), micro)))
            engine.step()
        refused = ""
        try:
            engine.load_checkpoint(folder, tag="saved")
        except ValueError as error:
            refused = str(error)
        for micro in range(2, 4):
            engine.backward(engine(*case.data(1, torch.distributed.get_rank(), micro)))
            engine.step()
        return refused, before, state_of(case, engine, zero)


def without_a_try(case: Case) -> State:
    """Job: the two updates of `load_and_go_on`."""
    with engine_of(case, seed=1) as (engine, zero):
        for update in range(2):
            one_update(engine, update, case.data, case.dtype)
        return state_of(case, engine, zero)


def lose_shard(folder: Path) -> None:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def lose_weights(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").unlink()


def cut_off(folder: Path) -> None:
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:2000])


def rename_parameter(folder: Path) -> None:
    for rank in range(2):
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = torch.load(file, weights_only=False)
        for mapping in content["optimizer_state_dict"]["param_slice_mappings"]:
            for name in list(mapping):
                mapping[f"old_{name}"] = mapping.pop(name)
        torch.save(content, file)


def tell_two_tensor_parallel_parts(folder: Path) -> None:
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), "mp_world_size": 2}, file)


DAMAGES = [
    (lose_shard, ["1 of", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
    (lose_weights, ["no file", "mp_rank_00_model_states.pt"]),
    (cut_off, ["zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged"]),
    (rename_parameter, ["the checkpoint's parameter group 0 has the parameter old_vectors.0"]),
    (tell_two_tensor_parallel_parts, ["2 tensor-parallel parts", "ds_to_universal"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
@pytest.mark.parametrize("after", [2, 3])
def test_B33_damaged_or_foreign_checkpoints_are_refused_whole(
    ranks, saved, tmp_path, damage: Any, words: list[str], after: int
) -> None:
    case = CASES["57 elements"]
    folder, _ = saved(2)
    shutil.copytree(f"{folder}/57 elements", tmp_path / "copy")
    damage(tmp_path / "copy" / "saved")
    results = ranks(after).run(load_and_go_on, case, str(tmp_path / "copy"))
    messages = {message for message, _, _ in results}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert message and all(word in message for word in words), message
    undisturbed = ranks(after).run(without_a_try, case)
    assert same(by_name([end for _, _, end in results])[0], by_name(undisturbed)[0])


def lose_a_moment(parameter: Path) -> None:
    (parameter / "exp_avg.pt").unlink()


def cut_off_a_moment(parameter: Path) -> None:
    os.truncate(parameter / "exp_avg.pt", 200)


UNIVERSAL_DAMAGES = {
    shutil.rmtree: ["lacks ", " of this model", "/fp32.pt"],
    lose_a_moment: ["lacks 1 files", "/exp_avg.pt)"],
    cut_off_a_moment: ["/exp_avg.pt is damaged"],
}


def test_B34_a_damaged_universal_form_is_refused_whole(ranks, universal, tmp_path) -> None:
    case, folder = CASES["57 elements"], universal[0]
    for damage, words in UNIVERSAL_DAMAGES.items():
        copy = tmp_path / damage.__name__
        shutil.copytree(f"{folder}/57 elements", copy)
        damage(min(path for path in (copy / "saved" / "zero").iterdir() if path.is_dir()))
        results = ranks(2).run(load_and_go_on, case, str(copy), **UNIVERSAL)
        messages = {message for message, _, _ in results}
        assert len(messages) == 1, messages
        assert all(word in next(iter(messages)) for word in words), messages
    undisturbed = ranks(2).run(without_a_try, case)
    assert same(by_name([end for _, _, end in results])[0], by_name(undisturbed)[0])


# ---- ACCO's own state -----------------------------------------------------------------------------------------------


def from_the_future(case: Case, folder: str) -> tuple[State, list[str]]:
    """Job: load a checkpoint whose ACCO state has a later version; the state after it, and the warnings."""
    from deepspeed.utils import logger

    warnings: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with engine_of(case, seed=99) as (engine, zero):
        logger.addHandler(handler)
        try:
            engine.load_checkpoint(folder, tag="saved")
        finally:
            logger.removeHandler(handler)
        return state_of(case, engine, zero), warnings


@pytest.mark.parametrize("after", [2, 3])
def test_acco_state_of_a_later_version_is_left_out_with_a_warning(ranks, saved, tmp_path, after: int) -> None:
    case = CASES["57 elements"]
    folder, states = saved(2)
    shutil.copytree(f"{folder}/57 elements", tmp_path / "copy")
    for rank in range(2):
        file = tmp_path / "copy" / "saved" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["acco"] = {"version": 7, "estimates": [torch.ones(3)]}
        torch.save(content, file)
    results = ranks(after).run(from_the_future, case, str(tmp_path / "copy"))
    assert_resumed(pick(states, "57 elements"), [state for state, _ in results], estimate=False)
    assert any("version 7" in text and "starts at theta" in text for text in results[0][1])
    assert not any("version 7" in text for _, warnings in results[1:] for text in warnings)


def test_acco_state_in_a_shard_is_one_copy_of_the_shown_partition(saved) -> None:
    folder, _ = saved(2)
    for name, tensors in (("57 elements", 1), ("tied, 2 groups, wp", 4), ("sync, DeepSpeed's Adam", 0)):
        for rank in range(2):
            file = f"{folder}/{name}/saved/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            state = torch.load(file, weights_only=False)["optimizer_state_dict"]
            own = [t for value in state["acco"].values() if isinstance(value, list) for t in value]
            weights = state["single_partition_of_fp32_groups"]
            assert len(own) == tensors
            assert [t.numel() for t in own] == [w.numel() for w in weights] * (tensors // len(weights)), name


# ---- zero_to_fp32 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 2, 4])
def test_B33_zero_to_fp32_gives_every_parameter(saved, before: int) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, states = saved(before)
    for name in CASES:
        masters, _ = by_name(pick(states, name))
        exported = {
            k: numpy(v) for k, v in get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}", "saved").items()
        }
        real = pick(states, name)[0].real
        assert exported.keys() == real.keys(), name
        for key, value in real.items():
            assert np.array_equal(exported[key], masters.get(key, value)) or key == "head.weight", (name, key)
        if "head.weight" in exported:
            assert np.array_equal(exported["head.weight"], exported["embedding.weight"])
