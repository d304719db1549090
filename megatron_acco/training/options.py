"""Command-line flags from dataclass fields: an options class stands beside the code that uses it."""

from __future__ import annotations

import argparse
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, NoReturn, TypeVar

Options = TypeVar("Options")


def option(default: Any = MISSING, doc: str = "", *, choices: Sequence[str] | None = None, flag: str = "") -> Any:
    """A dataclass field that is a command-line flag. Without a default the flag is required.

    Args:
        default: value when the flag is not given.
        doc: help text.
        choices: accepted values.
        flag: the flag's spelling if it is not `--` and the field's name with dashes.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "flag": flag})


def flag_of(option_field: Field[Any]) -> str:
    """The flag of a field, such as `--num-layers`."""
    return option_field.metadata["flag"] or "--" + option_field.name.replace("_", "-")


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError for bad arguments and names the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise ValueError for the first unknown argument.

        Raises:
            ValueError: with the nearest known flag.
        """
        if not unknown:
            return
        name = unknown[0].split("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown argument {name}{hint}")


def add_options(parser: argparse.ArgumentParser, cls: type[Any], title: str) -> None:
    """Add one flag per field of `cls`. Flags that are not given leave no trace in the parsed namespace."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for option_field in fields(cls):
        flag, default = flag_of(option_field), option_field.default
        doc = option_field.metadata["doc"].replace("%", "%%")
        common: dict[str, Any] = {"dest": option_field.name, "default": argparse.SUPPRESS, "help": doc}
        kind, many = _value_type(hints[option_field.name])
        if kind is bool:
            group.add_argument(flag, action="store_true", **common)
            continue
        if default is not MISSING and default is not None:
            common["help"] += f" (default: {default})"
        if many:
            common["nargs"] = "+"
        group.add_argument(
            flag,
            type=_parser_of(kind),
            choices=option_field.metadata["choices"],
            required=default is MISSING,
            **common,
        )


def build(cls: type[Options], given: Mapping[str, Any]) -> Options:
    """An instance of `cls` from the arguments that were given, defaults for the others."""
    return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})  # type: ignore[arg-type]


def _value_type(hint: Any) -> tuple[type, bool]:
    """The scalar type behind `T`, `T | None` or `list[T] | None`, and whether it is a list."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def _parser_of(kind: type) -> Any:
    return number if kind is float else kind


def number(text: str) -> float:
    """A finite float; argparse names this function in its message."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value
