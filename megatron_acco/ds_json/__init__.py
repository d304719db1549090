"""Strict validation of a DeepSpeed JSON, before anything is built from it.

DeepSpeed ignores keys that it does not know, takes "auto" and numbers in quotes for some values and fails on them
after the model is built. Here each fault is a ValueError with one line: what is wrong, where, what to do.

    config = load_json(path)
    config = reconcile(config, [ArgumentValue("optimizer.params.lr", "--lr", 3e-4, given=True), ...])
    config = validate(config, dp_world_size=8)        # all checks; returns it with the batch triple complete
    print(describe_batch(config, 8, acco_config(config)))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_acco.config import acco_config
from megatron_acco.ds_json.batch import describe_batch, drop_derivable, resolve_batch
from megatron_acco.ds_json.check import (
    check_deepspeed_accepts,
    check_keys,
    check_monitor_packages,
    check_resolved,
    check_types,
)
from megatron_acco.ds_json.loading import load_json
from megatron_acco.ds_json.optimizers import check_optimizer, check_scheduler, check_untested_optimizer
from megatron_acco.ds_json.precision import check_device, check_precision
from megatron_acco.ds_json.reconcile import ArgumentValue, look_up, reconcile
from megatron_acco.ds_json.support import check_acco_support, zero_stage

__all__ = [
    "ArgumentValue",
    "check_acco_support",
    "check_device",
    "check_keys",
    "describe_batch",
    "load_json",
    "look_up",
    "reconcile",
    "resolve_batch",
    "validate",
]


def validate(config: Mapping[str, Any], dp_world_size: int, tensor_parallel: int = 1) -> dict[str, Any]:
    """A copy of `config` with all three batch sizes, after every check that needs no model.

    Args:
        config: the parsed JSON, with or without an `acco` section, "auto" already filled in; one of the three batch
            sizes may be "auto" and follows from the other two.
        dp_world_size: data-parallel size (all ranks / tensor_parallel).
        tensor_parallel: tensor-parallel size.

    Raises:
        ValueError: one line, with the key path and what to do.
    """
    config = drop_derivable(config)
    check_keys(config)
    acco = acco_config(config)
    check_resolved(config)
    check_types(config)
    stage = zero_stage(config.get("zero_optimization"))
    check_optimizer(config)
    if stage > 0 and config.get("optimizer"):
        check_untested_optimizer(config)
    check_scheduler(config, stage)
    check_precision(config)
    check_device(config)
    check_monitor_packages(config)
    resolved = resolve_batch(config, dp_world_size, tensor_parallel)
    check_acco_support(resolved)
    if acco is not None:
        acco.check_data_parallel(dp_world_size)
    check_deepspeed_accepts(resolved)
    return resolved
