"""`megatron-acco prepare-corpus`: Python sources of this machine as a tokenizer and Megatron indexed files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_acco.corpus import CorpusSettings, prepare_corpus, standard_library


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "prepare-corpus",
        help="make a small training corpus from Python sources that are on this machine",
        description="Trains a SentencePiece model on the Python standard library's sources (or those in --source) and "
        "writes Megatron indexed files, split into training and validation by file. Downloads nothing. A corpus that "
        "is already there is kept.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make; holds the tokenizer and both splits")
    parser.add_argument("--source", type=Path, default=None, help="folder of *.py files (default: standard library)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of SentencePiece pieces (default: 4096)")
    parser.add_argument("--validation-percent", type=int, default=5, help="share of files held out (default: 5)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the corpus and print its size and paths."""
    source = standard_library() if args.source is None else args.source
    settings = CorpusSettings(str(source.resolve()), args.vocab_size, args.validation_percent)
    corpus = prepare_corpus(args.out, settings, log=lambda line: print(line, flush=True))
    if corpus.reused:
        print(f"reusing the corpus in {corpus.folder}")
    print(corpus.describe())
    print(f"tokenizer: {corpus.tokenizer}")
    print(f"indexed files: {corpus.prefix('train')}.{{bin,idx}} {corpus.prefix('valid')}.{{bin,idx}}", flush=True)
    return 0
