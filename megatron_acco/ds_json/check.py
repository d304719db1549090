"""Keys and types of a DeepSpeed JSON, against the keys that DeepSpeed reads. One fault, one line."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from megatron_acco.config import SECTION
from megatron_acco.ds_json.schema import Leaf, Section, deepspeed_schema, quiet_deepspeed

AUTO = "auto"
_LISTED = 16  # a message lists a section's keys up to this many
_ADAM_ARGUMENTS = ("lr", "betas", "eps", "weight_decay")
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse keys that DeepSpeed would ignore.

    Raises:
        ValueError: naming the key and the nearest right one.
    """
    _check_keys(config, deepspeed_schema(), "")


def check_types(config: Mapping[str, Any]) -> None:
    """Refuse values of the wrong type or out of range, before DeepSpeed converts them or fails on them later.

    Raises:
        ValueError: naming the key, the value found and what is accepted.
    """
    _check_finite(config, "")
    _check_types(config, deepspeed_schema(), "")
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f'"zero_optimization.stage" must be 0, 1, 2 or 3, got {describe(stage)}')
    _check_models(config, deepspeed_schema(), "")
    clip = config.get("gradient_clipping", 0)
    if clip < 0:
        raise ValueError(f'"gradient_clipping" must be 0 (no clipping) or more, got {clip}')


def check_resolved(config: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> None:
    """Refuse values left at "auto" (DeepSpeed drops them or takes them for text).

    Args:
        ignore: prefixes of key paths that may stay "auto".

    Raises:
        ValueError: naming the key path.
    """
    for path in unresolved(config):
        if not path.startswith(ignore):
            raise ValueError(
                f'"{path}" is "auto" and nothing fills it in; give a value, or leave the key out for the default'
            )


def unresolved(config: Mapping[str, Any]) -> Iterator[str]:
    """Paths of the values that are "auto" and for which "auto" is not DeepSpeed's own default.

    Not of the acco section, which has an "auto" of its own; AccoConfig refuses the others.
    """
    rest = {key: value for key, value in config.items() if key != SECTION}
    yield from _unresolved(rest, deepspeed_schema(), "")


def _unresolved(value: Any, node: Leaf | Section, path: str) -> Iterator[str]:
    if value == AUTO and not (isinstance(node, Leaf) and node.auto):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            child = node.child(key) if isinstance(node, Section) else Leaf()
            yield from _unresolved(item, child, join(path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _unresolved(item, Leaf(), f"{path}[{index}]")


def join(path: str, key: str) -> str:
    """The path of `key` inside the section at `path`."""
    return f"{path}.{key}" if path else str(key)


def describe(value: Any) -> str:
    """`value` as JSON writes it, shortened, for messages."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "an object"
    return repr(value)


def nearest(name: str, known: Any) -> str | None:
    """The known name closest to `name` (case aside), if one is close."""
    by_lower = {item.lower(): item for item in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return by_lower[close[0]] if close else None


# ---- keys ------------------------------------------------------------------------------------------------------


def _check_keys(value: Mapping[str, Any], section: Section, path: str) -> None:
    for key, item in value.items():
        if key not in section.keys:
            if section.free:
                continue
            raise ValueError(_unknown_key(key, section, path))
        child = section.keys[key]
        if isinstance(child, Section) and isinstance(item, Mapping):
            _check_keys(item, child, join(path, key))


def _unknown_key(key: Any, section: Section, path: str) -> str:
    message = f'unknown key "{join(path, key)}"'
    close = nearest(str(key), section.keys)
    if close:
        return f'{message}; did you mean "{join(path, close)}"?'
    paths = [*_paths(deepspeed_schema(), ""), *(f"optimizer.params.{name}" for name in _ADAM_ARGUMENTS)]
    elsewhere = next((found for found in paths if found.rsplit(".", 1)[-1] == key), None)
    if elsewhere:
        return f'{message}; did you mean "{elsewhere}"?'
    if len(section.keys) <= _LISTED:
        return f"{message}; known keys: {', '.join(sorted(section.keys))}"
    return f"{message}: neither DeepSpeed nor megatron-acco reads it; remove it"


def _paths(section: Section, path: str) -> Iterator[str]:
    for key, child in section.keys.items():
        yield join(path, key)
        if isinstance(child, Section):
            yield from _paths(child, join(path, key))


# ---- types -----------------------------------------------------------------------------------------------------


def _check_finite(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, join(path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_finite(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'"{path}" must be a finite number, got {value}')


def _check_types(value: Mapping[str, Any], section: Section, path: str) -> None:
    for key, item in value.items():
        child, where = section.child(key), join(path, key)
        if isinstance(child, Leaf):
            check_leaf(item, child, where)
        elif isinstance(item, Mapping):
            _check_types(item, child, where)
        elif where == "zero_optimization" and isinstance(item, bool):
            continue  # the form of old: true is stage 1, false is stage 0
        elif not (where == "datastates_ckpt" and item is False) and not (item is None and child.nullable):
            raise ValueError(f'"{where}" must be an object {{...}}, got {describe(item)}')


def check_leaf(value: Any, leaf: Leaf, path: str) -> None:
    """Refuse a value that is not of the leaf's type; no conversions."""
    if leaf.kind is None or (value is None and leaf.nullable) or (leaf.auto and value == AUTO):
        return
    if not _is_a(value, leaf):
        hint = "; write it without the quotes" if leaf.kind in (int, float) and is_number_in_quotes(value) else ""
        raise ValueError(f'"{path}" must be {_WORDS[leaf.kind]}, got {describe(value)}{hint}')


def _is_a(value: Any, leaf: Leaf) -> bool:
    if isinstance(value, bool) or leaf.kind is bool:
        return isinstance(value, bool) and leaf.kind is bool
    if leaf.kind is int:
        return isinstance(value, int) or (leaf.integral_float and isinstance(value, float) and value.is_integer())
    if leaf.kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, str)


def is_number_in_quotes(value: Any) -> bool:
    """Whether `value` is text such as "1e-3"."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _check_models(value: Mapping[str, Any], section: Section, path: str) -> None:
    """Let the pydantic models of DeepSpeed check ranges and choices."""
    for key, child in section.keys.items():
        item = value.get(key)
        if not isinstance(child, Section) or not isinstance(item, Mapping):
            continue
        where = join(path, key)
        if child.model is None:
            _check_models(item, child, where)
            continue
        try:
            with quiet_deepspeed():
                child.model(**item)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            inner = ".".join([where, *(str(part) for part in first["loc"])])
            got = "" if isinstance(first["input"], (Mapping, child.model)) else f", got {describe(first['input'])}"
            reason = first["msg"].removeprefix("Value error, ")
            raise ValueError(f'"{inner}": {reason}{got}') from error
        except (AssertionError, TypeError) as error:
            raise ValueError(f'"{where}": {one_line(error)}') from error


def one_line(error: BaseException) -> str:
    """The message of `error` on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def check_deepspeed_accepts(config: Mapping[str, Any]) -> None:
    """Let DeepSpeed parse the whole JSON (removed keys, choices of plain keys, combinations).

    The batch triple is left out: it needs the data-parallel size, and resolve_batch has checked it.

    Raises:
        ValueError: with DeepSpeed's reason on one line.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    probe = {key: copy.deepcopy(value) for key, value in config.items() if key not in (SECTION, "train_batch_size")}
    probe.setdefault("train_micro_batch_size_per_gpu", 1)
    try:
        with quiet_deepspeed():
            DeepSpeedConfig(probe)
    except (DeepSpeedConfigError, AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"DeepSpeed refuses the configuration: {one_line(error)}") from error


# Section of the JSON: module that DeepSpeed imports for it, and how to get it.
_MONITOR_PACKAGES = {
    "tensorboard": ("tensorboard", "pip install 'megatron-acco[tensorboard]'"),
    "wandb": ("wandb", "pip install wandb"),
    "comet": ("comet_ml", "pip install comet_ml"),
}


def check_monitor_packages(config: Mapping[str, Any]) -> None:
    """Refuse a monitor whose package is not installed, which DeepSpeed finds out after the model is built.

    Raises:
        ValueError: with the package to install.
    """
    for key, (package, how) in _MONITOR_PACKAGES.items():
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") and find_spec(package) is None:
            raise ValueError(f'"{key}.enabled" needs the package {package}, which is not installed: {how}')
