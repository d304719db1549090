"""`megatron-acco export`: a checkpoint for Hugging Face transformers."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

from megatron_acco.cli.common import add_checkpoint_arguments, given_tokenizer


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description="Writes a checkpoint of pretrain_gpt_acco.py (GPT-2 or Llama family, any number of tensor-parallel "
        "ranks) as a folder of Hugging Face transformers. A checkpoint is a pickle file: use only those from people "
        "you trust.",
    )
    add_checkpoint_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=None, help="of the weights (default: as stored)")
    parser.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer")
    parser.add_argument("--max-shard-size", default="5GB", help="of one file of weights (default: 5GB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export and say what was made."""
    require_transformers()
    if args.no_tokenizer and args.tokenizer_model is not None:
        raise ValueError("--no-tokenizer and --tokenizer-model contradict each other; give one")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", args.max_shard_size):
        raise ValueError(f"--max-shard-size {args.max_shard_size}: give a number with KB, MB, GB or TB behind it")

    from megatron_acco.huggingface.exporting import export

    tokenizer = None if args.no_tokenizer else given_tokenizer(args)
    print(export(args.checkpoint, args.out, tokenizer=tokenizer, dtype=args.dtype, max_shard_size=args.max_shard_size))
    return 0


def require_transformers() -> None:
    """Raise ModuleNotFoundError, with the way to get it, if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("transformers is not installed: pip install 'megatron-acco[hf]'")
