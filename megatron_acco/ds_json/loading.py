"""Reading a DeepSpeed JSON strictly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class _Pairs(list[tuple[str, Any]]):
    """An object as parsed, before duplicates are looked for."""


class _NotFinite(str):
    """NaN, Infinity or a number too large for a float, as written."""


def load_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ValueError: the file is missing or unreadable, is not JSON (with line and column), repeats a key or holds a
            number that is not finite (with the key path), or is not an object at its top level.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"DeepSpeed JSON {path} does not exist; give --deepspeed_config an existing file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"DeepSpeed JSON {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"DeepSpeed JSON {path} cannot be read: {error.strerror}") from None
    try:
        tree = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_NotFinite, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"DeepSpeed JSON {path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"DeepSpeed JSON {path} is nested too deeply") from None
    if not isinstance(tree, _Pairs):
        raise ValueError(f"DeepSpeed JSON {path} must hold one object {{...}} at its top level")
    try:
        plain: dict[str, Any] = _plain(tree, "")
    except ValueError as error:
        raise ValueError(f"DeepSpeed JSON {path}: {error}") from None
    return plain


def _finite(text: str) -> float | _NotFinite:
    value = float(text)
    return value if math.isfinite(value) else _NotFinite(text)


def _plain(node: Any, path: str) -> Any:
    if isinstance(node, _Pairs):
        result: dict[str, Any] = {}
        for key, value in node:
            where = f"{path}.{key}" if path else key
            if key in result:
                raise ValueError(f'key "{where}" is given twice; remove one of them')
            result[key] = _plain(value, where)
        return result
    if isinstance(node, list):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(node)]
    if isinstance(node, _NotFinite):
        raise ValueError(f'"{path}" must be a finite number, got {node!s}')
    return node
