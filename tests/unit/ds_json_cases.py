"""Small DeepSpeed JSONs and the messages with which they are refused, shared by the tests of ds_json."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megatron_acco.ds_json import check_acco_support, validate

MICRO = "train_micro_batch_size_per_gpu"

Json = dict[str, Any]


def base(**changes: Any) -> Json:
    """A small JSON that is right, with top-level keys replaced."""
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 1},
        **changes,
    }


def acco(**changes: Any) -> Json:
    return base(acco={"mode": "acco"}, **changes)


def refusal(config: Json, dp: int = 2, tensor_parallel: int = 1) -> str:
    """The message with which validate refuses `config`."""
    before = copy.deepcopy(config)
    with pytest.raises(ValueError) as caught:
        validate(config, dp, tensor_parallel)
    assert config == before, "validate changed its input"
    message = str(caught.value)
    assert "\n" not in message
    return message


def unsupported(config: Json) -> str:
    """The message with which check_acco_support refuses `config`, after proving that acco is what it objects to."""
    check_acco_support({key: value for key, value in config.items() if key != "acco"})
    check_acco_support({**config, "acco": {"enabled": False}})
    with pytest.raises(ValueError) as caught:
        check_acco_support(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "acco" in message
    return message
