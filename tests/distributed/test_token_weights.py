"""Token-weighted averaging: an update is the mean over all tokens with loss, wherever they are.

Covers CASES B12, the variant with a loss mask: ranks and micro-batches with 1 to 16 tokens. The oracle is autograd on
the sum of all losses in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import gpt
from tests.distributed.gpt import Case

GAS = 4


def masked_batch(micro: int, replica: int) -> dict[str, torch.Tensor]:
    tokens, labels = gpt.batch(0, micro, replica)
    mask = torch.zeros(2, gpt.LENGTH)
    mask[0, : 1 + 3 * micro + 2 * replica] = 1.0
    mask[1, :replica] = 1.0
    positions = torch.arange(gpt.LENGTH).expand(2, -1)
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def one_update(case: Case) -> dict[str, torch.Tensor]:
    """Job: how far one update of the training loop with SGD at rate 1 moves every weight."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    import megatron_acco
    from megatron_acco.training.loop import train_update

    with gpt.parallel(case.tp):
        model = gpt.build(case)
        before = gpt.snapshot(model)
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        engine = gpt.engine_of(
            case, model, GAS, optimizer=optimizer, gradient_clipping=0.0, zero_allow_untested_optimizer=True
        )
        replica = parallel_state.get_data_parallel_rank()
        run: Any = SimpleNamespace(
            engine=engine,
            arguments=SimpleNamespace(per_token_loss=True, num_microbatches=GAS),
            control=dist.group.WORLD,
            log=SimpleNamespace(add_loss=lambda loss: None),
            position=0,
        )
        train_update(run, iter([masked_batch(micro, replica) for micro in range(GAS)]))
        megatron_acco.drain(engine)
        with megatron_acco.real_parameters(engine):
            moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
        engine.destroy()
        return moved


def token_mean(case: Case) -> dict[str, torch.Tensor]:
    """Job: the gradient of the mean over all tokens with loss."""
    with gpt.parallel(1):
        model = gpt.build(case)
        total, count = torch.zeros(()), 0.0
        for replica in range(2):
            for micro in range(GAS):
                batch = masked_batch(micro, replica)
                losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
                total = total + (losses * batch["loss_mask"]).sum()
                count += float(batch["loss_mask"].sum())
        (total / count).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["acco", None], ids=["acco", "zero1"])
def test_an_update_is_the_mean_over_tokens(ranks: Callable, mode: str | None) -> None:
    case = Case(mode=mode)
    [expected] = ranks(1).run(token_mean, case)
    for moved in ranks(2).run(one_update, case):
        for name, gradient in expected.items():
            torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_tensor_parallel_ranks_count_their_tokens_once(ranks: Callable) -> None:
    case = Case(tp=2)
    [expected] = ranks(1).run(token_mean, Case())
    for moved in ranks(4).run(one_update, case):
        norm = "decoder.final_layernorm.weight"
        torch.testing.assert_close(moved[norm], expected[norm], rtol=1e-4, atol=1e-6)
