"""Values that both the command line and the DeepSpeed JSON can give."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_acco.ds_json.check import AUTO, describe

_ABSENT = object()


@dataclass(frozen=True)
class ArgumentValue:
    """One value of the command line that the DeepSpeed JSON may hold too.

    Attributes:
        json_path: where it stands in the JSON, such as "optimizer.params.lr".
        flag: its argument, such as "--lr".
        value: its value, given or default; None if it has none.
        given: it was given on the command line; otherwise `value` is the argument's default.
    """

    json_path: str
    flag: str
    value: Any
    given: bool


def reconcile(config: Mapping[str, Any], values: Sequence[ArgumentValue]) -> dict[str, Any]:
    """A copy of `config` in which both sides agree.

    "auto" in the JSON takes the argument's value (given or default). A key that is absent takes the value of an
    argument that was given. A value in the JSON stands when the argument was not given: the caller reads it back.

    Raises:
        ValueError: both sides give a value and they differ (naming both), or a section on the path is no object.
    """
    result: dict[str, Any] = copy.deepcopy(dict(config))
    flags: dict[str, str] = {}  # the argument that set a path, for arguments that share one
    for item in values:
        present = _look_up(result, item.json_path)
        if item.value is None:
            continue
        if present == AUTO or (present is _ABSENT and item.given):
            _set(result, item.json_path, item.value)
            flags[item.json_path] = item.flag
        elif item.given and present is not _ABSENT and not _same(present, item.value):
            raise ValueError(_contradiction(item, present, flags.get(item.json_path)))
    return result


def _contradiction(item: ArgumentValue, present: Any, other_flag: str | None) -> str:
    argument = f"{item.flag} {_as_argument(item.value)}"
    if other_flag:
        return f'{argument} contradicts {other_flag} {_as_argument(present)}: both set "{item.json_path}"; give one'
    return (
        f'{argument} on the command line contradicts "{item.json_path}": {describe(present)} in the DeepSpeed JSON; '
        f'make them equal, drop {item.flag}, or write "auto" in the JSON'
    )


def look_up(config: Mapping[str, Any], json_path: str, default: Any = None) -> Any:
    """The value at a dotted path, or `default`."""
    value = _look_up(config, json_path)
    return default if value is _ABSENT else value


def _look_up(config: Mapping[str, Any], json_path: str) -> Any:
    node: Any = config
    walked: list[str] = []
    for key in json_path.split("."):
        if not isinstance(node, Mapping):
            raise ValueError(f'"{".".join(walked)}" must be an object {{...}}, got {describe(node)}')
        if key not in node:
            return _ABSENT
        node = node[key]
        walked.append(key)
    return node


def _set(config: dict[str, Any], json_path: str, value: Any) -> None:
    *parents, last = json_path.split(".")
    node = config
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON values: true is not 1, a tuple is a list."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def _as_argument(value: Any) -> str:
    return value if isinstance(value, str) else describe(value)
