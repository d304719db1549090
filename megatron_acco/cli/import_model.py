"""`megatron-acco import`: a Hugging Face model as a checkpoint to begin training with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_acco.cli.export import require_transformers


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "import",
        help="make a checkpoint from a Hugging Face model",
        description="Makes a checkpoint from a Hugging Face folder (GPT-2 or Llama), which pretrain_gpt_acco.py begins "
        "with: --load OUT --finetune, or --pretrained-checkpoint OUT.",
    )
    parser.add_argument("--input", type=Path, required=True, help="folder with config.json and weights")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=None, help="of the weights (default: as stored)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import and say what was made."""
    require_transformers()

    from megatron_acco.huggingface.importing import import_model

    print(import_model(args.input, args.out, dtype=args.dtype))
    return 0
