"""`megatron-acco evaluate`: perplexity, bits per byte and last-word accuracy of a checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from megatron_acco.cli.common import add_model_arguments, check_file, given_tokenizer, write_text
from megatron_acco.preprocess.inputs import FORMATS


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "evaluate",
        help="perplexity, bits per byte, last-word accuracy of a checkpoint",
        description="Scores text with a checkpoint that pretrain_gpt_acco.py wrote, in one process. A checkpoint is a "
        "pickle file: use only those from people you trust.",
    )
    add_model_arguments(parser)
    parser.add_argument("--data-path", default=None, help="Megatron dataset (prefix of its .bin and .idx) to score")
    parser.add_argument("--input", nargs="+", default=None, help="raw text to score: jsonl, text, parquet; folders")
    parser.add_argument("--input-format", default="auto", choices=("auto", *FORMATS), help="(default: by the names)")
    parser.add_argument("--json-key", default="text", help="field with the text (default: text)")
    parser.add_argument("--last-word", type=Path, default=None, help="jsonl of passages whose last word is predicted")
    parser.add_argument(
        "--seq-length", type=int, default=None, help="tokens of a window (default: --seq-length of the training)"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the figures here too, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    given = {"--data-path": args.data_path, "--input": args.input, "--last-word": args.last_word}
    wanted = [flag for flag, value in given.items() if value is not None]
    if not wanted:
        raise ValueError(f"nothing to evaluate on: give one or more of {', '.join(given)}")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be 1 or more, got {args.batch_size}")

    if args.seq_length is not None and args.seq_length < 1:
        raise ValueError(f"--seq-length must be 1 or more, got {args.seq_length}")
    check_file(args.out)

    from megatron_acco.inference import scoring
    from megatron_acco.inference.loading import load, one_process, start_of_text

    passages = None if args.last_word is None else scoring.read_passages(args.last_word, args.json_key)
    sources = [] if args.input is None else scoring.text_sources(args.input, args.input_format, args.json_key)
    if args.data_path is not None:
        scoring.check_indexed(args.data_path)
    result: dict[str, Any] = {}
    with one_process():
        loaded = load(args.checkpoint, given_tokenizer(args), args.dtype)
        model, tokenizer, batch_size = loaded.model, loaded.tokenizer, args.batch_size
        before = start_of_text(tokenizer, args.text_start)
        length = _window(args.seq_length, loaded.weights.arguments, loaded.longest)
        result["checkpoint"] = {"folder": str(loaded.weights.folder), "iteration": loaded.weights.iteration}
        told = loaded.weights.told(args.dtype == "fp32")
        print(f"{loaded.weights.folder}, iteration {loaded.weights.iteration}{told}", flush=True)
        texts = {}
        if args.data_path is not None:
            texts["data"] = scoring.indexed_documents(args.data_path, tokenizer)
        if args.input is not None:
            texts["text"] = scoring.text_documents(sources, args.json_key, tokenizer)
        for name, documents in texts.items():
            started = time.perf_counter()
            score = scoring.score_documents(model, documents, before, length, batch_size)
            if not score.tokens:
                raise ValueError(f"{'--data-path' if name == 'data' else '--input'}: no text to score")
            seconds = time.perf_counter() - started
            result[name] = {**score.as_dict(), "seq_length": length}
            print(
                f"{name}: perplexity {score.perplexity:.4f} | loss {score.loss:.6f} | bits per byte "
                f"{score.bits_per_byte:.4f} | {score.documents:,} documents, {score.tokens:,} tokens, {score.bytes:,} "
                f"bytes in {seconds:.1f} s",
                flush=True,
            )
        if passages is not None:
            ids = [scoring.passage_ids(tokenizer, before, context, word) for context, word in passages]
            words = scoring.score_last_words(model, ids, loaded.longest, batch_size).as_dict()
            result["last_word"] = words
            print(
                f"last word: accuracy {words['accuracy']:.4f} | perplexity {words['perplexity']:.4f} | "
                f"{words['passages']:,} passages",
                flush=True,
            )
    if args.out is not None:
        write_text(args.out, json.dumps(result, indent=2) + "\n")
    return 0


def _window(given: int | None, arguments: Any, longest: int) -> int:
    """Tokens of a window: as given, else as in training, else as many as the model takes."""
    length = given or arguments.get("training", {}).get("seq_length") or longest
    if not 1 <= length <= longest:
        raise ValueError(f"--seq-length {length} must be between 1 and the model's {longest} positions")
    return int(length)
