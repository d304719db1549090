"""The weights of a checkpoint on another number of tensor-parallel ranks: megatron-core's own layout is the judge.

A whole model is cut for two ranks, must compute there what it computes on one, and put together again must be itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
