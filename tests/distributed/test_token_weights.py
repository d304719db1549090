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
    mask[0, : 1 + 3 * (micro % GAS) + micro // GAS + 2 * replica] = 1.0
    mask[1, :replica] = 1.0
    positions = torch.arange(gpt.LENGTH).expand(2, -1)
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


UPDATES = 2


def some_updates(case: Case) -> dict[str, Any]:
    """Job: how far updates of the training loop with SGD at rate 1 move every weight, and when tokens are counted."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    import megatron_acco
    from megatron_acco.training import token_weights
    from megatron_acco.training.loop import train_update

    with gpt.parallel(case.tp):
        model = gpt.build(case)
        before = gpt.snapshot(model)
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        engine = gpt.engine_of(
            case, model, GAS, optimizer=optimizer, gradient_clipping=0.0, zero_allow_untested_optimizer=True
        )
        replica = parallel_state.get_data_parallel_rank()
        run: Any = SimpleNamespace(engine=engine, log=SimpleNamespace(add_loss=lambda loss: None), position=0)
        counted: list[int] = []  # micro-batches done when a count was started

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            assert kwargs["async_op"], "a rank must not wait where it starts to count"
            counted.append(run.position)
            return dist.all_reduce(*args, **kwargs)

        token_weights.dist = SimpleNamespace(all_reduce=all_reduce, get_world_size=dist.get_world_size)
        try:
            batches = iter([masked_batch(micro, replica) for micro in range(GAS * (UPDATES + 1))])
            weights = token_weights.TokenWeights(batches, GAS, UPDATES, dist.group.WORLD)
            moved: list[dict[str, torch.Tensor]] = []
            for _ in range(UPDATES):
                train_update(run, batches, weights)
                megatron_acco.drain(engine)
                with megatron_acco.real_parameters(engine):
                    moved.append({name: before[name] - p.detach() for name, p in model.named_parameters()})
            left = len(list(batches))
        finally:
            token_weights.dist = dist
        engine.destroy()
        return {"moved": moved, "counted": counted, "left": left}


def token_mean(case: Case) -> list[dict[str, torch.Tensor]]:
    """Job: the same by gradient descent on the mean over all tokens with loss of each update."""
    with gpt.parallel(1):
        model = gpt.build(case)
        before, moved = gpt.snapshot(model), []
        for update in range(UPDATES):
            total, count = torch.zeros(()), 0.0
            for replica in range(2):
                for micro in range(GAS * update, GAS * (update + 1)):
                    batch = masked_batch(micro, replica)
                    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
                    total = total + (losses * batch["loss_mask"]).sum()
                    count += float(batch["loss_mask"].sum())
            model.zero_grad()
            (total / count).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad
            moved.append({name: before[name] - p.detach() for name, p in model.named_parameters()})
        return moved


@pytest.mark.parametrize("mode", ["acco", None], ids=["acco", "zero1"])
def test_an_update_is_the_mean_over_tokens(ranks: Callable, mode: str | None) -> None:
    case = Case(mode=mode)
    [expected] = ranks(1).run(token_mean, case)
    for result in ranks(2).run(some_updates, case):
        # Of the first update before it; of the second in the first half of the first; nothing is read beyond.
        assert result["counted"] == [0, GAS // 2 - 1] and result["left"] == GAS
        updates = UPDATES if mode is None else 1  # the second one of `acco` is half computed at the estimate
        for moved, gradients in list(zip(result["moved"], expected, strict=True))[:updates]:
            for name, gradient in gradients.items():
                torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=2e-6, msg=name)


def test_tensor_parallel_ranks_count_their_tokens_once(ranks: Callable) -> None:
    case = Case(tp=2)
    [expected] = ranks(1).run(token_mean, Case())
    for result in ranks(4).run(some_updates, case):
        norm = "decoder.final_layernorm.weight"
        torch.testing.assert_close(result["moved"][0][norm], expected[0][norm], rtol=1e-4, atol=1e-6)
