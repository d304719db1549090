"""Checkpoints of tensor-parallel runs: exact resume, other tensor- and data-parallel sizes (CASES B08, B29, B34)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.distributed import gpt
from tests.distributed.gpt import Case, whole

UPDATES, SAVE_AT = 6, 3


@dataclass
class Outcome:
    """What a rank sees: weights shown to compute, theta, masters and moments (whole over data-parallel ranks).

    `after` are the weights shown at the end of the training.
    """

    tp_rank: int
    dp_rank: int
    split: dict[str, tuple[int, int] | None]
    shown: dict[str, torch.Tensor]
    real: dict[str, torch.Tensor]
    master: dict[str, torch.Tensor]
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    losses: list[float]
    skipped: int


def run(
    case: Case, updates: range, folder: str, save_at: int = -1, load: bool = False, universal: bool = False
) -> Outcome:
    """Job: some updates of a case, saving before one of them or loading first; the state before the first or there."""
    import megatron_acco
    from megatron_acco.training.environment import Mpu

    with gpt.parallel(case.tp), gpt.fp16_allowed():
        replica, replicas = Mpu.get_data_parallel_rank(), Mpu.get_data_parallel_world_size()
        gas = gpt.GAS * gpt.REPLICAS // replicas
        model = gpt.build(case)
        engine = gpt.engine_of(case, model, gas, **({"checkpoint": {"load_universal": True}} if universal else {}))
        if load:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            path, _ = engine.load_checkpoint(folder, tag="saved")
            assert path is not None and engine.global_steps == updates.start
        losses: list[float] = []
        state = observe(engine) if load else {}
        for update in updates:
            if update == save_at:
                state = observe(engine)
                engine.save_checkpoint(folder, tag="saved")
            for micro in range(gas):
                number = micro * replicas + replica  # the same samples in each half, however many replicas
                tokens, labels = gpt.batch(update, number // gpt.REPLICAS, number % gpt.REPLICAS)
                loss = engine(tokens, torch.arange(gpt.LENGTH).expand(2, -1), None, labels=labels).float().mean()
                engine.backward(loss)
                if case.poison == (update, micro) and (Mpu.get_model_parallel_rank(), replica) == (1, 0):
                    next(iter(model.parameters())).main_grad.view(-1)[3] = float("inf")
                engine.step()
                losses.append(loss.item())
        megatron_acco.drain(engine)
        outcome = Outcome(
            tp_rank=Mpu.get_model_parallel_rank(),
            dp_rank=replica,
            split={name: gpt.split_of(p) for name, p in model.named_parameters()},
            **state,
            after=gpt.snapshot(model),
            losses=losses,
            skipped=engine.skipped_steps,
        )
        engine.destroy()
        return outcome


def observe(engine: Any) -> dict[str, Any]:
    """Drains; changes nothing else."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import megatron_acco

    megatron_acco.drain(engine)
    result = {"shown": gpt.snapshot(engine.module)}
    named = dict(engine.module.named_parameters())
    result["master"] = {name: safe_get_full_fp32_param(p) for name, p in named.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        result[key] = {name: safe_get_full_optimizer_state(p, key) for name, p in named.items()}
    with megatron_acco.real_parameters(engine):
        result["real"] = gpt.snapshot(engine.module)
    return result


EXACT = {
    "fp32": Case(tp=2),
    "bf16": Case("llama", tp=2, sequence_parallel=True, bf16=True),
    "fp16": Case(tp=2, fp16=True, poison=(SAVE_AT - 1, 1)),
    "wp": Case(tp=2, mode="wp"),
}


@pytest.mark.parametrize("name", EXACT)
def test_B29_resume_is_bit_identical_on_two_tensor_parallel_ranks(ranks, tmp_path, name: str) -> None:
    case, world = EXACT[name], 4 if name == "fp32" else 2
    uninterrupted = ranks(world).run(run, case, range(UPDATES), str(tmp_path), SAVE_AT)
    resumed = ranks(world).run(run, case, range(SAVE_AT, UPDATES), str(tmp_path), load=True)
    assert {outcome.skipped for outcome in (*uninterrupted, *resumed)} == {1 if name == "fp16" else 0}
    for before, after in zip(uninterrupted, resumed, strict=True):
        for which in ("shown", "real", "master", "exp_avg", "exp_avg_sq", "after"):
            ours, theirs = getattr(before, which), getattr(after, which)
            assert ours.keys() == theirs.keys() and ours, which
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items()), which
        assert before.losses[len(before.losses) // UPDATES * SAVE_AT :] == after.losses


def assert_same_state(before: list[Outcome], after: list[Outcome], shown: str) -> None:
    for which, want in (
        ("master", "master"),
        ("exp_avg",) * 2,
        ("exp_avg_sq",) * 2,
        ("real", "real"),
        ("shown", shown),
    ):
        ours, theirs = whole(before, want), whole(after, which)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), which


@pytest.mark.parametrize("style", gpt.STYLES)
def test_B34_other_tensor_and_data_parallel_sizes(ranks, tmp_path, style: str) -> None:
    """2 x 2 (tensor x data) -> directly 2 x 1; through the universal form 1 x 2, 1 x 4, 2 x 1 and back from 1 x 2."""
    from deepspeed.checkpoint.ds_to_universal import main

    case = Case(style, tp=2)
    saved = ranks(4).run(run, case, range(SAVE_AT + 1), f"{tmp_path}/tp2", SAVE_AT)
    direct = ranks(2).run(run, case, range(SAVE_AT, UPDATES), f"{tmp_path}/tp2", load=True)
    assert_same_state(saved, direct, shown="shown")

    def convert(source: str, target: str) -> None:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": f"{tmp_path}/{source}/saved", "output_folder": f"{tmp_path}/{target}/saved"}
        main(argparse.Namespace(**folders, **options, inject_missing_state=False))

    convert("tp2", "universal")
    finals = []
    for tp, world in ((1, 2), (1, 4), (2, 2)):
        job = (replace(case, tp=tp), range(SAVE_AT, UPDATES), f"{tmp_path}/universal")
        loaded = ranks(world).run(run, *job, load=True, universal=True)
        assert_same_state(saved, loaded, shown="real")
        finals.append(whole(loaded, "after"))
    for final in finals[1:]:  # the same samples, summed in another order
        assert max(float((final[name] - finals[0][name]).abs().max()) for name in final) < 1e-4
    single = replace(case, tp=1)
    back = ranks(2).run(run, single, range(SAVE_AT + 1), f"{tmp_path}/tp1", SAVE_AT)
    convert("tp1", "universal1")
    loaded = ranks(4).run(run, case, range(SAVE_AT, UPDATES), f"{tmp_path}/universal1", load=True, universal=True)
    assert_same_state(back, loaded, shown="real")


def refused(case: Case, folder: str) -> str:
    """Job: load a checkpoint of another tensor-parallel size; the message."""
    with gpt.parallel(case.tp):
        engine = gpt.engine_of(case, gpt.build(case), gpt.GAS)
        try:
            engine.load_checkpoint(folder, tag="saved")
        except ValueError as error:
            return str(error)
        finally:
            engine.destroy()
        return ""


def test_another_tensor_parallel_size_needs_the_universal_form(ranks, tmp_path) -> None:
    ranks(2).run(run, Case(tp=2), range(SAVE_AT + 1), str(tmp_path), SAVE_AT)
    for message in ranks(2).run(refused, Case(), str(tmp_path)):
        assert "2 tensor-parallel parts, this run has 1" in message and "ds_to_universal" in message
