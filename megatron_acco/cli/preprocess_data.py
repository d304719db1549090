"""`megatron-acco preprocess-data`: raw text to Megatron indexed files."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_acco.preprocess.options import PreprocessOptions
from megatron_acco.training.options import add_options, build
from megatron_acco.training.tokenizer import TokenizerOptions


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "preprocess-data",
        help="tokenize text into Megatron indexed files",
        description="Tokenizes jsonl, text, parquet and Hugging Face datasets into Megatron's indexed files, with the "
        "argument names of Megatron-LM's tools/preprocess_data.py. The same command continues an interrupted run.",
    )
    add_options(parser, PreprocessOptions, "input and output")
    add_options(parser, TokenizerOptions, "tokenizer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Preprocess and say what was made."""
    from megatron_acco.preprocess.pipeline import preprocess

    given = vars(args)
    options, tokenizer = build(PreprocessOptions, given), build(TokenizerOptions, given)
    summary = preprocess(options, tokenizer, log=lambda line: print(line, flush=True))
    counts = summary.counts
    for prefix, (documents, tokens) in summary.prefixes.items():
        print(f"{prefix}.{{bin,idx}}: {documents:,} documents, {tokens:,} tokens")
    left_out = f", {counts.empty:,} of them empty and not written" if counts.empty else ""
    bad = f"; {counts.bad:,} bad ones left out" if counts.bad else ""
    print(
        f"{counts.documents:,} documents read{left_out}{bad}; {summary.input_bytes / 1e6:,.1f} MB in "
        f"{summary.seconds:.1f} s ({summary.way}, {options.number_of_workers} workers)",
        flush=True,
    )
    if not options.append_eod:
        print("NOTICE: without --append-eod nothing marks where one document ends and the next begins", flush=True)
    return 0
