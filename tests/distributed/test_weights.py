"""The weights of a checkpoint on another number of tensor-parallel ranks: megatron-core's own layout is the judge.

A whole model is cut for two ranks, must compute there what it computes on one, and put together again must be itself.
So must the fp32 master weights of a bf16 run, from the optimizer files of its ranks; DeepSpeed's own accessor to
them is the judge.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert

from tests.distributed import gpt
from tests.distributed.gpt import Case


def load_and_compute(case: Case, whole: dict[str, torch.Tensor] | None, rows: int) -> dict[str, Any]:
    """Job: the logits of the model, and its state; `whole` are weights to load before."""
    from megatron.core import parallel_state

    from megatron_acco.training.checkpoint.weights import Weights, load_weights
    from megatron_acco.training.model import universal_checkpoint_info

    with gpt.parallel(case.tp), torch.no_grad():
        model = gpt.build(case).eval()
        rank = parallel_state.get_tensor_model_parallel_rank()
        if whole is not None:
            weights = Weights(Path("."), 0, {"padded_vocab_size": rows}, {}, None, ({"module": whole},))
            load_weights(model, weights, gpt.VOCABULARY, rank, case.tp)
        tokens, _ = gpt.batch(0, 0, 0)
        logits = model(tokens, torch.arange(gpt.LENGTH).expand(2, -1), None, runtime_gather_output=True)
        return {
            "rank": rank,
            "logits": logits,
            "module": model.state_dict(),
            "universal_checkpoint_info": universal_checkpoint_info(model),
        }


@pytest.mark.parametrize("style", gpt.STYLES)
def test_weights_fit_two_tensor_parallel_ranks_and_come_back(ranks: Callable, style: str) -> None:
    from megatron_acco.training.checkpoint.weights import merge

    [one] = ranks(1).run(load_and_compute, Case(style), None, gpt.VOCABULARY)
    # Other weights than those that the two ranks draw themselves, and told apart by element.
    whole = {name: value + torch.rand_like(value) * 0.05 for name, value in one["module"].items()}
    [one] = ranks(1).run(load_and_compute, Case(style), whole, gpt.VOCABULARY)
    two = ranks(2).run(load_and_compute, Case(style, tp=2), whole, gpt.VOCABULARY)
    two.sort(key=lambda result: result["rank"])
    for result in two:
        torch.testing.assert_close(result["logits"], one["logits"], rtol=0, atol=1e-5)
    merged = merge([result["module"] for result in two], two[0]["universal_checkpoint_info"])
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)


def save_and_tell(case: Case, folder: str) -> dict[str, Any]:
    """Job: one update, a checkpoint, and what DeepSpeed says the master weights of this rank's part are."""
    from deepspeed.utils import safe_get_full_fp32_param
    from megatron.core import parallel_state

    import megatron_acco

    with gpt.parallel(case.tp):
        model = gpt.build(case)
        engine = gpt.engine_of(case, model, gpt.GAS)
        for micro in range(gpt.GAS):
            tokens, labels = gpt.batch(0, micro, parallel_state.get_data_parallel_rank())
            positions = torch.arange(gpt.LENGTH).expand(2, -1)
            engine.backward(engine(tokens, positions, None, labels=labels).float().mean())
            engine.step()
        megatron_acco.drain(engine)
        identity = {
            "model": {"padded_vocab_size": gpt.VOCABULARY},
            "ranks": parallel_state.get_data_parallel_world_size(),
            "tensor_parallel": case.tp,
        }
        engine.save_checkpoint(folder, tag="step", client_state={"megatron_acco": {"identity": identity}})
        with megatron_acco.real_parameters(engine):
            result = {
                "rank": parallel_state.get_tensor_model_parallel_rank(),
                "masters": {name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()},
                "info": model.universal_checkpoint_info,
            }
        engine.destroy()
        return result


@pytest.mark.parametrize(
    "case",
    [Case("llama", mode=mode, bf16=True, tp=tp) for mode, tp in (("acco", 1), ("acco", 2), (None, 1))],
    ids=["acco", "acco, tp 2", "zero1"],
)
def test_master_weights_are_read_from_the_optimizer_files(ranks: Callable, tmp_path: Path, case: Case) -> None:
    from megatron_acco.training.checkpoint.weights import find_weights, merge

    told = ranks(2).run(save_and_tell, case, str(tmp_path))
    by_part = {result["rank"]: result["masters"] for result in told}
    expected = by_part[0] if case.tp == 1 else merge([by_part[0], by_part[1]], told[0]["info"])
    weights = find_weights(tmp_path)
    assert weights.has_masters and weights.dtype is torch.bfloat16
    stored, masters = weights.state(), weights.state(masters=True)
    assert stored.keys() == masters.keys() == expected.keys()
    for name, value in masters.items():
        assert value.dtype is torch.float32 and torch.equal(value, expected[name].view_as(value)), name
        assert torch.equal(value.bfloat16(), stored[name]), name
    assert any(not torch.equal(masters[name], stored[name].float()) for name in stored)
    if case.tp == 2:
        folders = {"input_folder": str(tmp_path / "step"), "output_folder": str(tmp_path / "universal")}
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        convert(argparse.Namespace(**folders, **options, inject_missing_state=False))
        universal = find_weights(tmp_path / "universal")
        assert universal.has_masters
        assert all(torch.equal(value, masters[name]) for name, value in universal.state(masters=True).items())
    missing = sorted((tmp_path / "step").glob("*_optim_states.pt"))[1]
    missing.unlink()
    with pytest.raises(ValueError, match=f"has no {missing.name}, which hold"):
        find_weights(tmp_path).state(masters=True)
    assert find_weights(tmp_path).state().keys() == stored.keys()
    for file in (tmp_path / "step").glob("*_optim_states.pt"):
        file.unlink()
    alone = find_weights(tmp_path)  # a copy without the optimizer
    assert not alone.has_masters
    assert all(torch.equal(value, stored[name].float()) for name, value in alone.state(masters=True).items())
