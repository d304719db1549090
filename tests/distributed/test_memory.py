"""Model state takes the memory that the account says, and no more than the cost model allows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.training import engine_for


class Wide(nn.Module):
    """A million parameters, so that model state is what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().pow(2).mean()


def allocated() -> int:
    """Bytes of all tensors that Python knows of; a storage counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(sums: str, acco: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """Job: the account, the bytes that tensors take beyond those from before, the number of parameters."""
    before = allocated()
    model = Wide()
    parameters = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": sums},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "acco": acco,
        "steps_per_print": 10**9,
    }
    with engine_for(model, config) as (engine, zero):
        start = zero.memory_account()
        for _ in range(4):
            engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)))
            engine.step()
        engine.drain()
        account = zero.memory_account()
        assert {**account, "optimizer state": 0} == {**start, "optimizer state": 0}
        assert account["optimizer state"] == pytest.approx(start["optimizer state"], abs=64)
        return account, allocated() - before, parameters


@pytest.mark.parametrize("sums", ["bf16", "fp32"])
def test_model_state_takes_what_the_account_says(ranks: Callable, sums: str) -> None:
    """bf16: 2 + 2 + 2 bytes per parameter and (12 + 4) / N, N ranks; the gradients in flight make room for weights."""
    for account, taken, parameters in ranks(2).run(measure, sums, {}):
        state = {what: size for what, size in account.items() if what != "exchange"}
        bound = parameters * ((2 + 2 + 2 if sums == "bf16" else 2 + 4 + 4) + (12 + 4) / 2)
        assert sum(state.values()) <= 1.001 * bound
        # Gradients that travel in a narrower type are copied for the exchange only.
        kept = sum(state.values()) + 2 * parameters
        assert account["exchange"] == 2 * parameters * (1 if sums == "bf16" else 2)
        assert taken == pytest.approx(kept, rel=0.01)


def test_groups_of_one_rank_hold_all_of_the_state(ranks: Callable) -> None:
    """2 + 2 + 2 and 12 + 4 bytes; the sum over two groups takes 2, what arrives 2, and a part in fp32 4 / 2."""
    for account, taken, parameters in ranks(2).run(measure, "bf16", {"estimate_group": 1}):
        assert account["exchange"] == 6 * parameters
        assert sum(account.values()) <= 1.001 * (6 + 16 + 6) * parameters
        assert taken == pytest.approx(sum(account.values()), rel=0.01)
