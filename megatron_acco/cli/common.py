"""What the subcommands that read a checkpoint have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

TOKENIZERS = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "NullTokenizer")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """--checkpoint and the tokenizer."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="the --save folder, or one checkpoint in it")
    parser.add_argument(
        "--tokenizer-model", default=None, help="model file or Hugging Face folder (default: the checkpoint's own)"
    )
    parser.add_argument(
        "--tokenizer-type",
        default=None,
        choices=TOKENIZERS,
        help="kind of tokenizer (default: the checkpoint's; SentencePiece for a file, Hugging Face for a folder)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The same, and how to compute."""
    add_checkpoint_arguments(parser)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=None, help="of the weights (default: as stored)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts computed together (default: 8)")
    parser.add_argument(
        "--text-start",
        choices=("eod", "bos", "none"),
        default="eod",
        help="what stands before a text: the end of another document, as in training (default), the tokenizer's "
        "beginning, as for some imported models, or nothing",
    )


def given_tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    """The tokenizer arguments, None where not given."""
    return {"tokenizer_model": args.tokenizer_model, "tokenizer_type": args.tokenizer_type}


def check_file(path: Path | None) -> None:
    """Refuse a place that cannot take an output file, before hours of work for it.

    Raises:
        ValueError: it is a folder, or its folder is not there or cannot be written to.
    """
    if path is None:
        return
    if path.is_dir() or not path.name:
        raise ValueError(f"--out {path} is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--out {path}: cannot write to {path.parent}")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there.

    Raises:
        ValueError: the folder cannot be written to.
    """
    check_file(path)
    staged = path.with_name(f".partial-{path.name}")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise ValueError(f"cannot write {path}: {error}") from error
