"""Parameters that break flat buffers: frozen, unused, tied, reused, empty, odd, fewer than ranks, several groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed import models
from tests.distributed.reference import check_commits, error, oracle_of
from tests.distributed.test_determinism import assert_same_bits
from tests.distributed.training import (
    BETAS,
    EPS,
    Net,
    Round,
    assemble,
    batch,
    json_config,
    numpy,
    run_updates,
    start,
    train_model,
)
from tests.oracle import Oracle, Rule

RULE = Rule("adamw", lr=1e-2, weight_decay=0.1, betas=BETAS, eps=EPS)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters, trainable or not, in one group."""
    return torch.optim.AdamW(model.parameters(), lr=RULE.lr, weight_decay=RULE.weight_decay, betas=BETAS, eps=EPS)


def trainable(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def one_group_oracle(model: nn.Module, data: Callable[..., Any], **options: Any) -> Oracle:
    options = {"mode": "acco", "ranks": 2, **options}
    return oracle_of(model, [(trainable(model), RULE)], data, **options)


def freeze_save_load(folder: str) -> tuple[list[Round], Any, dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Job: 6 updates with a frozen layer, save, load into a model of another initialisation."""
    import megatron_acco

    model = models.Frozen()
    config = json_config("acco", clip=0.5)
    engine, zero = start(model, config, one_group(model))
    rounds, layout = run_updates(engine, zero, range(6))
    engine.save_checkpoint(folder, tag="six")
    with megatron_acco.real_parameters(engine):
        saved = {name: numpy(p) for name, p in model.named_parameters()}
    masters = sum(p.numel() for p in zero.single_partition_of_fp32_groups)
    engine.destroy()

    other = models.Frozen(seed=77)
    engine, _ = start(other, config, one_group(other))
    engine.load_checkpoint(folder, tag="six")
    with megatron_acco.real_parameters(engine):
        loaded = {name: numpy(p) for name, p in other.named_parameters()}
    engine.destroy()
    return rounds, layout, saved, loaded, masters


def test_B01_frozen_weights(ranks, tmp_path) -> None:
    results = ranks(2).run(freeze_save_load, str(tmp_path))
    rounds = assemble([(r[0], r[1]) for r in results])
    model = models.Frozen()
    check_commits(rounds, one_group_oracle(model, batch, clip=0.5))
    frozen = {name: numpy(p) for name, p in models.Frozen().named_parameters() if not p.requires_grad}
    assert frozen and not set(frozen) & set(rounds[0].masters)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for _, _, saved, loaded, masters in results:
        assert masters < trained / 2 + 4, "no master copy of frozen weights"
        assert all(np.array_equal(saved[name], value) for name, value in frozen.items())
        assert saved.keys() == loaded.keys()
        assert all(np.array_equal(saved[name], loaded[name]) for name in saved)
        assert all(np.array_equal(saved[name], value) for name, value in rounds[-1].masters.items())


@pytest.mark.parametrize("gas", [2, 4])
def test_B03_weights_without_a_gradient_in_some_micro_batches(ranks, gas: int) -> None:
    job = (models.Alternating, json_config("acco", gas=gas, clip=0.5), 8, one_group, models.alternating_data)
    rounds = assemble(ranks(2).run(train_model, *job))
    oracle = one_group_oracle(models.Alternating(), models.alternating_data, gas=gas, clip=0.5)
    check_commits(rounds, oracle)
    # The weight that no micro-batch uses moves by decay alone, exactly as under stock ZeRO-1.
    stock = assemble(
        ranks(2).run(
            train_model, models.Alternating, json_config(None, gas=gas, clip=0.5), 8, one_group, models.alternating_data
        )
    )
    for ours, theirs in zip(rounds[1::2], stock, strict=True):
        assert np.array_equal(ours.masters["never.weight"], theirs.masters["never.weight"])
        assert not ours.state["exp_avg"]["never.weight"].any()


def test_B05_tied_and_reused_weights(ranks) -> None:
    config = json_config("acco", gas=2, clip=0.5)
    rounds = assemble(ranks(2).run(train_model, models.tied_off, config, 6, one_group, models.token_data))
    assert sorted(rounds[0].masters) == [
        "embedding.weight",
        "layer.bias",
        "layer.weight",
        "norm.bias",
        "norm.weight",
    ]
    check_commits(rounds, one_group_oracle(models.Tied(), models.token_data, gas=2, clip=0.5))


@pytest.mark.parametrize("make_model", [models.tied_recompute, models.tied_reentrant])
def test_B05_recompute_changes_nothing(ranks, make_model: Callable[[], nn.Module]) -> None:
    config = json_config("acco", gas=2, clip=0.5)
    plain = assemble(ranks(2).run(train_model, models.tied_off, config, 4, one_group, models.token_data))
    again = assemble(ranks(2).run(train_model, make_model, config, 4, one_group, models.token_data))
    if make_model is models.tied_recompute:
        assert_same_bits(plain, again)
    for a, b in zip(plain, again, strict=True):
        # The reentrant variant may add the uses of a shared weight in another order.
        assert error(a.masters, b.masters) < 1e-6 and error(a.shown, b.shown) < 1e-6


def empty_parameters(make_model: Callable[[], nn.Module], config: dict[str, Any], folder: str) -> Any:
    """Job: 4 updates, save, load into another model, one more update of each."""
    result = []
    for index in range(2):
        model = make_model()
        engine, zero = start(model, config, one_group(model))
        if index == 0:
            rounds, layout = run_updates(engine, zero, range(4), models.vector_data)
            engine.save_checkpoint(folder, tag="four")
        else:
            engine.load_checkpoint(folder, tag="four")
        more, _ = run_updates(engine, zero, range(4, 5), models.vector_data)
        shapes = [tuple(p.shape) for p in model.parameters()]
        result.append((more, shapes))
        engine.destroy()
    return rounds, layout, result


@pytest.mark.parametrize("make_model", [models.vectors_empty_inside, models.vectors_empty_last])
def test_B06_zero_element_parameter(ranks, tmp_path, make_model: Callable[[], nn.Module]) -> None:
    results = ranks(2).run(empty_parameters, make_model, json_config("acco", clip=0.5), str(tmp_path))
    rounds = assemble([(r[0], r[1]) for r in results])
    check_commits(rounds, one_group_oracle(make_model(), models.vector_data, clip=0.5))
    _check_continuation(results, make_model())


@pytest.mark.parametrize("make_model", [models.vectors_empty_inside_bf16, models.vectors_empty_last_bf16])
def test_B06_zero_element_parameter_bf16(ranks, tmp_path, make_model: Callable[[], nn.Module]) -> None:
    config = json_config("acco", clip=0.5, bf16={"enabled": True})
    results = ranks(2).run(empty_parameters, make_model, config, str(tmp_path))
    rounds = assemble([(r[0], r[1]) for r in results])
    # bf16 weights and gradients carry 8 bits; the masters of 4 updates stay near the fp32 rule.
    check_commits(rounds, one_group_oracle(make_model().float(), models.vector_data, clip=0.5), tolerance=3e-2)
    _check_continuation(results, make_model())


def _check_continuation(results: list[Any], model: nn.Module) -> None:
    """The loaded engine goes on exactly as the one that saved; shapes are kept."""
    shapes = [tuple(p.shape) for p in model.parameters()]
    layout = results[0][1]
    went_on, loaded = (assemble([(r[2][i][0], layout) for r in results]) for i in range(2))
    assert_same_bits(went_on, loaded)
    assert all(r[2][i][1] == shapes for r in results for i in range(2))


@pytest.mark.parametrize(
    ("ranks_", "make_model"), [(2, models.vectors_57), (4, models.vectors_57), (4, models.vectors_5)]
)
def test_B08_odd_totals_and_padding_only_shards(ranks, ranks_: int, make_model: Callable[[], nn.Module]) -> None:
    config = json_config("acco", clip=0.5)
    # assemble() asserts that the padding of weights, masters and moments stays zero.
    rounds = assemble(ranks(ranks_).run(train_model, make_model, config, 6, one_group, models.vector_data))
    check_commits(rounds, one_group_oracle(make_model(), models.vector_data, clip=0.5, ranks=ranks_))


B09_RULES = [
    dataclasses.replace(RULE, lr=1e-3, weight_decay=0.1),
    dataclasses.replace(RULE, lr=1e-4, weight_decay=0.0),
    dataclasses.replace(RULE, lr=0.0, weight_decay=0.1),
]


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups of every third parameter, the last with learning rate 0."""
    params = list(model.parameters())
    groups = [{"params": params[i::3], "lr": r.lr, "weight_decay": r.weight_decay} for i, r in enumerate(B09_RULES)]
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPS)


def test_B09_groups_with_own_rates_and_decay(ranks) -> None:
    model = Net()
    names = trainable(model)
    rounds = assemble(ranks(2).run(train_model, Net, json_config("acco", clip=0.5), 6, three_groups))
    groups = [(names[i::3], rule) for i, rule in enumerate(B09_RULES)]
    check_commits(rounds, oracle_of(model, groups, mode="acco", ranks=2, clip=0.5))
    for round_ in rounds:
        for name in names[2::3]:
            value = numpy(dict(Net().named_parameters())[name])
            assert np.array_equal(round_.shown[name], value) and np.array_equal(round_.masters[name], value)
