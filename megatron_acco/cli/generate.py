"""`megatron-acco generate`: text from a checkpoint of pretrain_gpt_acco.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_acco.cli.common import add_model_arguments, check_file, given_tokenizer, write_text
from megatron_acco.preprocess.inputs import read_lines


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "generate",
        help="sample text from a checkpoint",
        description="Samples text from a checkpoint that pretrain_gpt_acco.py wrote, in one process. A checkpoint is a "
        "pickle file: use only those from people you trust.",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", default=None, help="text to continue, again for more (default: a new document)"
    )
    parser.add_argument(
        "--prompts", type=Path, default=None, help="file with a prompt per line; .jsonl: objects with a text `prompt`"
    )
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="sample among this many; 0: among all (default: 40)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the likeliest of this probability (default: 1, all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole text for every token")
    parser.add_argument(
        "--out", type=Path, default=None, help="write the texts here instead of printing them; .jsonl: as objects"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sample and print."""
    for flag, value in (("--tokens", args.tokens), ("--batch-size", args.batch_size)):
        if value < 1:
            raise ValueError(f"{flag} must be 1 or more, got {value}")
    if args.tokenizer_model is not None and not Path(args.tokenizer_model).exists():
        raise ValueError(f"--tokenizer-model {args.tokenizer_model}: no such file")
    check_file(args.out)
    prompts = read_prompts(args.prompt, args.prompts)

    from megatron_acco.inference.loading import load, one_process, start_of_text
    from megatron_acco.inference.sampling import SamplingOptions, generate

    options = SamplingOptions(args.temperature, args.top_k, args.top_p, args.seed)
    with one_process():
        loaded = load(args.checkpoint, given_tokenizer(args), args.dtype)
        tokenizer = loaded.tokenizer
        before = start_of_text(tokenizer, args.text_start)
        ids = [list(tokenizer.tokenize(prompt)) if prompt else [] for prompt in prompts]
        if not before and not all(ids):
            raise ValueError("--text-start none needs a --prompt to continue")
        added = generate(
            loaded.model,
            [[*before, *prompt] for prompt in ids],
            count=args.tokens,
            longest=loaded.longest,
            end=tokenizer.eod,
            options=options,
            batch_size=args.batch_size,
            cache=not args.no_cache,
        )
        texts = [tokenizer.detokenize([*prompt, *more]) for prompt, more in zip(ids, added, strict=True)]
    if args.out is None:
        print("\n\n".join(texts))
    elif args.out.suffix == ".jsonl":
        records = [
            {"prompt": prompt, "text": text, "tokens": len(more)}
            for prompt, text, more in zip(prompts, texts, added, strict=True)
        ]
        write_text(args.out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    else:
        write_text(args.out, "\n\n".join(texts) + "\n")
    return 0


def read_prompts(given: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or of a file; without both, one empty prompt.

    Raises:
        ValueError: both are given, or the file cannot be used.
    """
    if file is None:
        return given or [""]
    if given is not None:
        raise ValueError("--prompt and --prompts contradict each other; give one")
    lines = read_lines(file, "--prompts")
    prompts = []
    for number, line in enumerate(lines, 1):
        if file.suffix != ".jsonl":
            prompts.append(line.removesuffix("\r"))
        elif line.strip():
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                prompt = None
            if not isinstance(prompt, str):
                raise ValueError(f"{file}:{number}: not a JSON object with a text under 'prompt'")
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"--prompts {file} is empty")
    return prompts
