"""The reference of the `acco` JSON section, generated from AccoConfig, and its place in documents.

A document that holds the two markers gets the table between them:

    python -m megatron_acco.config_reference README.md docs/configuration.md            # rewrite
    python -m megatron_acco.config_reference --check README.md docs/configuration.md    # fail if out of date
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_acco.config import ALL, AUTO, MAY_BE_AUTO, NODE, AccoConfig

BEGIN = "<!-- acco reference: begin -->"
END = "<!-- acco reference: end -->"


def render() -> str:
    """The reference as a Markdown table, one row per option, without the markers."""
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in fields(AccoConfig):
        cells = (f"`{field.name}`", _type(field), f"`{_json(field.default)}`", field.metadata["doc"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def insert(text: str) -> str:
    """`text` with the generated table between its markers.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the document must hold the two markers once each: {BEGIN} and {END}")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n\n{render()}\n\n{END}{tail}"


def is_up_to_date(path: str | Path) -> bool:
    """Whether the document holds the table as it would be generated now."""
    text = Path(path).read_text(encoding="utf-8")
    return insert(text) == text


def update(path: str | Path) -> None:
    """Rewrite the table in the document."""
    file = Path(path)
    file.write_text(insert(file.read_text(encoding="utf-8")), encoding="utf-8")


def _type(field: Field[Any]) -> str:
    default = field.default
    if isinstance(default, Enum):
        return " or ".join(f'`"{member.value}"`' for member in type(default))
    if isinstance(default, str):
        return f'`"{ALL}"`, `"{NODE}"` or whole number'
    kind = {bool: "true or false", int: "whole number", float: "number"}[type(default)]
    return f'{kind} or `"{AUTO}"`' if field.name in MAY_BE_AUTO else kind


def _json(default: Any) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return str(default).lower() if isinstance(default, bool) else str(default)


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check documents; the number of documents out of date is the exit status under --check."""
    parser = argparse.ArgumentParser(prog="python -m megatron_acco.config_reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    parser.add_argument("documents", nargs="*", help="Markdown files with the markers; none: print the table")
    arguments = parser.parse_args(argv)
    if not arguments.documents:
        print(render())
    stale = 0
    for document in arguments.documents:
        if not arguments.check:
            update(document)
        elif not is_up_to_date(document):
            print(f"{document}: the acco reference is out of date; run python -m megatron_acco.config_reference")
            stale += 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
