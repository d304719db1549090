"""The `optimizer` and `scheduler` sections: names and arguments, checked before the model is built.

DeepSpeed looks both up by name after the model is built, and fails there with the look-up's own error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_acco.ds_json.check import check_leaf, describe, is_number_in_quotes, nearest
from megatron_acco.ds_json.schema import Leaf

# DeepSpeed's own names, any case, that ACCO's rounds work with. All but Muon (megatron_acco/zero/muon.py) act on each
# element by itself, as the flat shards need; so do the torch optimizers below (spelt exactly as in torch.optim).
ACCO_DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
ACCO_TORCH_OPTIMIZERS = ("SGD", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")

_WHY_NOT = {
    "muon": 'it orthogonalizes whole matrices, and a rank holds a flat shard; "type": "Muon" in the JSON works',
    "lamb": "its trust ratio needs the norm of whole layers, and a rank holds a flat shard",
    "onebitadam": "its own compressed communication takes the place of ACCO's rounds",
    "zerooneadam": "its own compressed communication takes the place of ACCO's rounds",
    "onebitlamb": "its own compressed communication takes the place of ACCO's rounds",
    "adafactor": "it factors whole matrices, and a rank holds a flat shard",
    "sparseadam": "it takes sparse gradients only",
    "lbfgs": "it evaluates the model inside its step",
}
_ADAM_NAMES = ("adam", "adamw")
# DeepSpeed's NS_METHODS, in a module that compiles kernels when it is imported.
_NS_METHODS = ("gram", "standard")
# What DeepSpeed's engine takes for its two kinds of groups; it leaves out anything else without a word.
_MUON_PARAMS: dict[str, Any] = {
    **{"lr": 0.02, "muon_lr": 0.02, "momentum": 0.95, "ns_method": "gram", "weight_decay": 0.0},
    **{"adam_lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "adam_w_mode": True, "per_head_muon": False},
}
# Taken out of "params" by DeepSpeed before the optimizer is built.
_ADAM_EXTRAS: dict[str, Any] = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": None}


def deepspeed_optimizer_names() -> list[str]:
    """The names (lower case) that DeepSpeed knows by itself."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return list(DEEPSPEED_OPTIMIZERS)


def torch_optimizer_names() -> list[str]:
    """The classes of torch.optim."""
    return [name for name, item in vars(torch.optim).items() if _is_optimizer(item) and name != "Optimizer"]


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse an unknown optimizer, arguments it does not take, and settings that DeepSpeed ignores.

    Raises:
        ValueError: naming the key and what is accepted.
    """
    section = config.get("optimizer")
    if section is None:
        return
    name = _type_name(section, "optimizer", "AdamW")
    known = deepspeed_optimizer_names()
    if name.lower() not in known and name not in torch_optimizer_names():
        spelt = {item.lower(): item for item in (*known, *torch_optimizer_names(), *ACCO_DEEPSPEED_OPTIMIZERS)}
        close = nearest(name, spelt.values())
        raise ValueError(
            f'"optimizer.type": DeepSpeed knows no optimizer "{name}"'
            + (
                f'; did you mean "{close}"?'
                if close
                else f"; known: {', '.join(sorted(spelt.values(), key=str.lower))}"
            )
        )
    params = _params(section, "optimizer")
    if "max_grad_norm" in params:
        raise ValueError('"optimizer.params.max_grad_norm" is refused by DeepSpeed; use top-level "gradient_clipping"')
    if name.lower() == "adamw" and params.get("adam_w_mode") is False:
        raise ValueError(
            '"optimizer.params.adam_w_mode": false is ignored for "type": "AdamW"; use "type": "Adam" for L2 decay'
        )
    accepted = _accepted_params(name, params, config)
    if accepted is not None:
        _check_arguments(params, accepted, "optimizer.params", name)
    if name.lower() == "muon":
        if params.get("ns_method", "gram") not in _NS_METHODS:
            raise ValueError(
                f'"optimizer.params.ns_method" must be one of {", ".join(_NS_METHODS)}, got '
                f"{describe(params['ns_method'])}"
            )
        if not _is_beta(params.get("momentum", 0.95)):
            raise ValueError(
                f'"optimizer.params.momentum" must be a number from 0 up to but not 1, got {params["momentum"]}'
            )
    _check_ranges(params)


def check_untested_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse, as DeepSpeed does after building the model, a ZeRO run with an optimizer outside its list."""
    name = str((config.get("optimizer") or {}).get("type", "adamw"))
    tested = name.lower() in ("adam", "adamw", "adagrad", "lion", "muon")
    if not tested and not config.get("zero_allow_untested_optimizer", False):
        raise ValueError(
            f'"optimizer.type": "{name}" is not on DeepSpeed\'s list for ZeRO; add "zero_allow_untested_optimizer": '
            f"true at the top level to use it"
        )


def check_acco_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse an optimizer that cannot run on flat shards with an estimate.

    Raises:
        ValueError: with the reason and the list of optimizers that work.
    """
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or section.get("type") is None:
        return
    name = str(section["type"])
    works = {item.lower() for item in ACCO_DEEPSPEED_OPTIMIZERS}
    if name.lower() in works or name in ACCO_TORCH_OPTIMIZERS:
        return
    reason = _WHY_NOT.get(name.lower())
    raise ValueError(
        f'"optimizer.type": "{name}" does not work with "acco"'
        + (f" ({reason})" if reason else "")
        + f"; use one of {', '.join((*ACCO_DEEPSPEED_OPTIMIZERS, *ACCO_TORCH_OPTIMIZERS))}"
    )


def check_acco_optimizer_object(optimizer: torch.optim.Optimizer) -> None:
    """As check_acco_optimizer, for an optimizer that a script builds itself.

    Optimizers that are not known here pass: they are taken to act on each element by itself.

    Raises:
        ValueError: with the reason and the list of optimizers that work.
    """
    if is_muon(optimizer):
        return
    for base in type(optimizer).__mro__:
        name = base.__name__.lower()
        reason = next((why for word, why in _WHY_NOT.items() if word in name), None)
        if reason:
            raise ValueError(
                f'the optimizer {type(optimizer).__name__} does not work with "acco" ({reason}); use one of '
                f"{', '.join((*ACCO_DEEPSPEED_OPTIMIZERS, *ACCO_TORCH_OPTIMIZERS))}"
            )


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is what DeepSpeed builds for "Muon". Without importing it, which compiles its kernels."""
    return type(optimizer).__module__ == "deepspeed.runtime.zero.muon.muon_optimizer"


def check_scheduler(config: Mapping[str, Any], zero_stage: int) -> None:
    """Refuse an unknown learning-rate scheduler and arguments it does not take.

    Raises:
        ValueError: naming the key and what is accepted.
    """
    section = config.get("scheduler")
    if section is None:
        return
    from deepspeed.runtime import lr_schedules

    known = list(lr_schedules.VALID_LR_SCHEDULES)
    name = _type_name(section, "scheduler", "WarmupDecayLR")
    if name in known:
        scheduler = getattr(lr_schedules, name)
    else:
        scheduler = getattr(torch.optim.lr_scheduler, name, None)
        if not inspect.isclass(scheduler):
            close = nearest(name, known)
            raise ValueError(
                f'"scheduler.type": DeepSpeed knows no scheduler "{name}"'
                + (f'; did you mean "{close}"?' if close else f"; known: {', '.join(sorted(known))}")
            )
        if zero_stage > 0:
            raise ValueError(
                f'"scheduler.type": torch\'s "{name}" does not accept a ZeRO optimizer; use one of '
                f"{', '.join(sorted(known))}, or pass a scheduler to initialize()"
            )
    if "params" not in section:
        raise ValueError('"scheduler.params" is missing; DeepSpeed needs it, if only as {}')
    accepted = _signature(scheduler)
    _check_arguments(_params(section, "scheduler"), accepted, "scheduler.params", name, check_types=False)
    missing = [key for key, default in accepted.items() if default is inspect.Parameter.empty]
    for key in missing:
        if key not in section["params"]:
            raise ValueError(f'"scheduler.params.{key}" is missing; "{name}" needs it')


def _type_name(section: Any, where: str, example: str) -> str:
    name = section.get("type")
    if not isinstance(name, str):
        found = "is missing" if name is None else f"must be a string, got {describe(name)}"
        raise ValueError(f'"{where}.type" {found}; name one such as "{example}", or leave out "{where}"')
    return name


def _params(section: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    params = section.get("params", {})
    if not isinstance(params, Mapping):
        raise ValueError(f'"{where}.params" must be an object {{...}}, got {describe(params)}')
    return params


def _is_optimizer(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, torch.optim.Optimizer)


def _accepted_params(name: str, params: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Argument names and defaults of the class that DeepSpeed will build; None if it is not one known here."""
    if (config.get("zero_optimization") or {}) and _offloads(config["zero_optimization"]):
        return None
    if name.lower() in _ADAM_NAMES:
        if params.get("torch_adam", False):
            return {**_signature(torch.optim.AdamW), **_ADAM_EXTRAS}
        from deepspeed.ops.adam import FusedAdam

        if params.get("amsgrad") is True:
            raise ValueError(
                '"optimizer.params.amsgrad": DeepSpeed\'s fused Adam has no AMSGrad; add "torch_adam": true'
            )
        return {**_signature(FusedAdam), **_ADAM_EXTRAS}
    if name.lower() == "muon":
        return _MUON_PARAMS
    if name.lower() == "adagrad":
        return _signature(torch.optim.Adagrad)
    if name.lower() == "lion":
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.lion import FusedLion

        accelerator = get_accelerator()
        if accelerator.get_op_builder("FusedLionBuilder") is accelerator.get_op_builder("NoSuchBuilder"):
            raise ValueError(
                f'"optimizer.type": DeepSpeed has no Lion for the device ({accelerator.device_name()}) without '
                f"offloading; use AdamW, or pass a Lion optimizer to initialize()"
            )
        return _signature(FusedLion)
    if name.lower() not in deepspeed_optimizer_names():
        return _signature(getattr(torch.optim, name))
    return None


def _offloads(zero: Any) -> bool:
    if not isinstance(zero, Mapping):
        return False
    offload = zero.get("offload_optimizer") or {}
    return bool(zero.get("cpu_offload")) or offload.get("device", "none") != "none"


def _signature(build: Callable[..., Any]) -> dict[str, Any]:
    """Argument names and defaults of a constructor, without the first (the parameters or the optimizer)."""
    return {name: item.default for name, item in list(inspect.signature(build).parameters.items())[1:]}


def _check_arguments(
    params: Mapping[str, Any], accepted: Mapping[str, Any], where: str, name: str, check_types: bool = True
) -> None:
    for key, value in params.items():
        if key not in accepted:
            close = nearest(key, accepted)
            raise ValueError(
                f'unknown key "{where}.{key}" for "{name}"'
                + (f'; did you mean "{close}"?' if close else f"; it takes {', '.join(sorted(accepted))}")
            )
        default = accepted[key]
        kind = float if type(default) is int else type(default)
        if check_types and kind in (bool, float, str):
            check_leaf(value, Leaf(kind, nullable=False), f"{where}.{key}")
        elif not isinstance(default, str) and is_number_in_quotes(value):
            raise ValueError(f'"{where}.{key}" must be a number, got {describe(value)}; write it without the quotes')


def _check_ranges(params: Mapping[str, Any]) -> None:
    for key in ("lr", "weight_decay", "eps", "muon_lr", "adam_lr"):
        value = params.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f'"optimizer.params.{key}" must be a number, got {describe(value)}')
        if value < 0:
            raise ValueError(f'"optimizer.params.{key}" must be 0 or more, got {value}')
    if "betas" not in params:
        return
    betas = params["betas"]
    if not isinstance(betas, (list, tuple)) or len(betas) != 2 or not all(_is_beta(beta) for beta in betas):
        raise ValueError(f'"optimizer.params.betas" must be two numbers from 0 up to but not 1, got {betas!r}')


def _is_beta(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
