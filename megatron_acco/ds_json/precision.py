"""The precision sections: bf16, fp16, data_types, communication_data_type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_acco.ds_json.check import describe


def check_precision(config: Mapping[str, Any]) -> None:
    """Refuse precisions that contradict each other, as DeepSpeed does after building the model or not at all.

    Raises:
        ValueError: naming the keys and what to change.
    """
    if "bf16" in config and "bfloat16" in config:
        raise ValueError('"bf16" and "bfloat16" are the same section under two names; remove "bfloat16"')
    bf16, fp16 = bool(bf16_section(config).get("enabled")), bool(_section(config, "fp16").get("enabled"))
    if bf16 and fp16:
        raise ValueError('"fp16.enabled" and "bf16.enabled" are both true; enable one of them')
    types = _section(config, "data_types")
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        if types.get(key) is not None and dtype_name(types[key]) not in ("fp32", "bf16", "fp16"):
            raise ValueError(f'"data_types.{key}" must be fp32, bf16 or fp16, got {describe(types[key])}')
    model = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if types.get("param_dtype") is not None and dtype_name(types["param_dtype"]) != model:
        raise ValueError(
            f'"data_types.param_dtype": {describe(types["param_dtype"])} contradicts the precision of the run '
            f'({model}); enable "bf16" or "fp16" instead, or leave it out'
        )


def check_device(config: Mapping[str, Any]) -> None:
    """Refuse a precision that the accelerator of this process cannot compute in.

    Raises:
        ValueError: naming the device and what to use instead.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device = accelerator.device_name()
    if _section(config, "fp16").get("enabled") and not accelerator.is_fp16_supported():
        better = '"bf16": {"enabled": true}' if accelerator.is_bf16_supported() else "fp32 (leave fp16 out)"
        raise ValueError(f'"fp16.enabled": the device ({device}) cannot train in fp16; use {better}')
    if bf16_section(config).get("enabled") and not accelerator.is_bf16_supported():
        raise ValueError(f'"bf16.enabled": the device ({device}) cannot train in bf16; use fp32 (leave bf16 out)')


def check_acco_precision(config: Mapping[str, Any]) -> None:
    """Refuse what ACCO's rounds do not compute in: fp32, and bf16 or fp16 with fp32 masters, are supported.

    Raises:
        ValueError: naming the key and what to use instead.
    """
    fp16 = _section(config, "fp16")
    if fp16.get("fp16_master_weights_and_grads"):
        raise ValueError('"fp16.fp16_master_weights_and_grads": "acco" keeps fp32 master weights; remove it')
    bf16 = bf16_section(config)
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if bf16.get(key):
            raise ValueError(f'"bf16.{key}": "acco" keeps fp32 master weights and optimizer state; remove it')
    low = "bf16" if bf16.get("enabled") else "fp16" if fp16.get("enabled") else None
    accepted = ("fp32",) if low is None else (low, "fp32")
    _check_dtype("data_types.grad_accum_dtype", _section(config, "data_types").get("grad_accum_dtype"), accepted)
    _check_dtype(
        "communication_data_type", config.get("communication_data_type"), ("bf16", "fp32") if low is None else accepted
    )


def bf16_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The bf16 section under its new or old name, as DeepSpeed picks it."""
    return _section(config, "bf16" if config.get("bf16") is not None else "bfloat16")


def dtype_name(value: Any) -> str | None:
    """fp32, bf16, fp16 or int8 for any of the names that DeepSpeed has for them; None for others."""
    from deepspeed.runtime.config import DtypeEnum

    try:
        return str(DtypeEnum(value.lower() if isinstance(value, str) else value).name)
    except ValueError:
        return None


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def _check_dtype(path: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value is not None and dtype_name(value) not in accepted:
        raise ValueError(
            f'"{path}" must be {" or ".join(accepted)} together with "acco", got {describe(value)}; '
            f"change it or leave it out"
        )
