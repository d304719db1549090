"""Ways in: initialize, register; which class is built, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.training import Net, client_optimizer, json_config, one_update, parameter_groups


def _types(initialize: Any, config: dict[str, Any], optimizer: str = "torch_adamw", **kwargs: Any) -> tuple[str, str]:
    model = Net(dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    client = client_optimizer(optimizer, parameter_groups(model))
    parameters = None if client is not None else parameter_groups(model)
    engine, zero, _, _ = initialize(model=model, optimizer=client, model_parameters=parameters, config=config, **kwargs)
    one_update(engine, 0, dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    names = type(engine).__name__, type(zero).__name__
    assert engine.optimizer is zero
    engine.destroy()
    return names


OURS, STOCK = ("AccoEngine", "AccoZeroOptimizer"), ("DeepSpeedEngine", "DeepSpeedZeroOptimizer")


def register_and_unregister(path: str) -> None:
    """Job: the whole life of register()."""
    import json
    from pathlib import Path

    import deepspeed
    from deepspeed import initialize as taken_before

    import megatron_acco

    with_acco, without = json_config("acco"), json_config(None)
    off = {**with_acco, "acco": {"enabled": False}}
    Path(path).write_text(json.dumps(with_acco))

    assert _types(deepspeed.initialize, with_acco) == STOCK, "not before register()"
    assert _types(megatron_acco.initialize, with_acco) == OURS
    assert _types(deepspeed.initialize, with_acco) == STOCK, "initialize() registers nothing"
    own = deepspeed.DeepSpeedEngine
    megatron_acco.register()
    megatron_acco.register()
    assert _types(deepspeed.initialize, with_acco) == OURS
    assert _types(taken_before, with_acco) == OURS, "a name taken before register()"
    assert _types(deepspeed.initialize, path) == OURS, "a JSON file"
    assert _types(deepspeed.initialize, without) == STOCK
    assert _types(deepspeed.initialize, off) == STOCK
    assert _types(megatron_acco.initialize, off) == _types(megatron_acco.initialize, without) == STOCK
    # Positional arguments: args, model.
    model = Net()
    engine = deepspeed.initialize(
        None, model, client_optimizer("torch_adamw", parameter_groups(model)), config=with_acco
    )[0]
    assert type(engine).__name__ == OURS[0]
    engine.destroy()
    megatron_acco.unregister()
    megatron_acco.unregister()
    assert _types(deepspeed.initialize, with_acco) == _types(taken_before, with_acco) == STOCK
    assert deepspeed.DeepSpeedEngine is own
    megatron_acco.register()
    assert _types(deepspeed.initialize, with_acco) == OURS
    megatron_acco.unregister()


def test_register_is_idempotent_reversible_and_minds_its_own_business(ranks, tmp_path) -> None:
    ranks(1).run(register_and_unregister, str(tmp_path / "ds.json"))


def attempt(config: dict[str, Any], optimizer: str) -> tuple[str, ...] | str:
    """Job: the classes built, or the refusal; then the state of a plain initialisation afterwards."""
    import deepspeed

    import megatron_acco

    try:
        result: tuple[str, ...] | str = _types(megatron_acco.initialize, config, optimizer)
    except Exception as refused:
        result = f"{type(refused).__name__}: {refused}"
    # A refusal leaves nothing behind.
    assert _types(deepspeed.initialize, json_config(None)) == STOCK
    return result


SGD_JSON = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
MUST_BE_ACTIVE = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16_fp32_sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "sgd": {},
    "overlap_comm": {"zero": {"overlap_comm": True, "contiguous_gradients": False}},
}


@pytest.mark.parametrize("name", MUST_BE_ACTIVE)
def test_B20_acco_is_active(ranks, name: str) -> None:
    config = json_config("acco", **MUST_BE_ACTIVE[name])
    optimizer = "ds_adamw"
    if name == "sgd":
        config, optimizer = {**config, **SGD_JSON}, "json"
    else:
        config = json_config("acco", optimizer="ds_adamw", **MUST_BE_ACTIVE[name])
    assert ranks(2).run(attempt, config, optimizer) == [OURS] * 2


MUST_BE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage0": ({"zero_optimization": {"stage": 0}}, "stage"),
    "stage2": ({"zero_optimization": {"stage": 2}}, "stage"),
    "stage3": ({"zero_optimization": {"stage": 3}}, "stage"),
    "no_zero": ({"zero_optimization": None}, "stage"),
    "offload": ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload"),
    "round_robin": ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "round_robin_gradients"),
    "gas1": ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
    "typo": ({"acco": {"mod": "acco"}}, "mode"),
    "mode": ({"acco": {"mode": "aco"}}, "acco"),
}


@pytest.mark.parametrize("name", MUST_BE_REFUSED)
def test_B20_refused_with_the_reason(ranks, name: str) -> None:
    change, word = MUST_BE_REFUSED[name]
    config = {**json_config("acco", optimizer="ds_adamw"), **change}
    config = {key: value for key, value in config.items() if value is not None}
    for answer in ranks(1).run(attempt, config, "ds_adamw"):
        assert isinstance(answer, str) and answer.startswith("ValueError"), answer
        assert word in answer
        assert "\n" not in answer.strip(), "one clear line"
