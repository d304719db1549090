"""`megatron-acco generate`: text from a checkpoint of pretrain_gpt_acco.py."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "generate",
        help="sample text from a checkpoint",
        description="Samples text on the CPU from a checkpoint that pretrain_gpt_acco.py wrote. A checkpoint is a "
        "pickle file: use only those from people you trust.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="the --save folder, or one checkpoint in it")
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="SentencePiece model of the training data")
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="sample among this many; 0: among all (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--out", type=Path, default=None, help="write the text here instead of printing it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sample and print."""
    if args.tokens < 1 or args.temperature < 0 or args.top_k < 0:
        raise ValueError("--tokens must be 1 or more, --temperature and --top-k 0 or more")
    if not args.tokenizer_model.is_file():
        raise ValueError(f"--tokenizer-model {args.tokenizer_model}: no such file")
    model_file = find_model_file(args.checkpoint)

    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(args.tokenizer_model))
    prompt = tokenizer.encode(args.prompt)
    # Every document of the training data stands after another one's end.
    ids = [tokenizer.eos_id(), *prompt] if tokenizer.eos_id() >= 0 else prompt
    if not ids:
        raise ValueError("the tokenizer has no end-of-document token, so there must be a --prompt")
    model, longest, vocabulary = load_model(model_file)
    if tokenizer.vocab_size() > vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size()} ids and the model only {vocabulary}: it was trained with "
            f"another tokenizer"
        )
    sampled = sample(
        model,
        ids,
        count=args.tokens,
        longest=longest,
        vocabulary=tokenizer.vocab_size(),
        end=tokenizer.eos_id(),
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    text = tokenizer.decode(prompt + sampled)
    if args.out is None:
        print(text)
    else:
        staged = args.out.with_name(f".partial-{args.out.name}")
        staged.write_text(text + "\n")
        staged.replace(args.out)
    return 0


def find_model_file(checkpoint: Path) -> Path:
    """The file with the weights, from a `--save` folder (its newest checkpoint) or one checkpoint's folder.

    Raises:
        ValueError: there is no checkpoint.
    """
    name = "mp_rank_00_model_states.pt"
    folder = checkpoint
    if (checkpoint / "latest").is_file():
        folder = checkpoint / (checkpoint / "latest").read_text().strip()
    if not (folder / name).is_file():
        raise ValueError(f"--checkpoint {checkpoint}: no checkpoint there (no file {folder / name})")
    if (folder / "mp_rank_01_model_states.pt").exists():
        raise ValueError(f"--checkpoint {checkpoint}: the weights are split over tensor-parallel ranks")
    return folder / name


def load_model(model_file: Path) -> tuple[Any, int, int]:
    """Build the model that a checkpoint describes, in float32 on the CPU, with its weights.

    Returns:
        The model in evaluation mode, its longest sequence, and the rows of its embedding.

    Raises:
        ValueError: the file is damaged or was not written by pretrain_gpt_acco.py.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    import torch

    from megatron_acco.training.model import ModelOptions, build_model

    try:
        content = torch.load(model_file, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise ValueError(f"{model_file} is damaged: {error}") from error
    try:
        described = dict(content["megatron_acco"]["identity"]["model"])
        weights = content["module"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{model_file} was not written by pretrain_gpt_acco.py") from error
    rows = described.pop("padded_vocab_size")
    options = dataclasses.replace(ModelOptions(**described), use_cpu_initialization=True)
    _one_process()
    model = build_model(options, rows, torch.float32)
    model.load_state_dict(weights)
    return model.eval(), options.max_position_embeddings, rows


def sample(
    model: Any,
    ids: list[int],
    *,
    count: int,
    longest: int,
    vocabulary: int,
    end: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> list[int]:
    """Sample up to `count` tokens after `ids`, one at a time, until `end`.

    Each step computes the whole sequence (its last `longest` tokens) again, which for small models and short texts is
    quick enough and needs no cache.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    sequence = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            window = torch.tensor([sequence[-longest:]])
            positions = torch.arange(window.shape[1]).unsqueeze(0)
            # Rows past the tokenizer's size are padding of the embedding.
            logits = model(window, positions, None)[0, -1, :vocabulary].float()
            token = _choose(logits, temperature, top_k, generator)
            if token == end:
                break
            sequence.append(token)
    return sequence[len(ids) :]


def _choose(logits: Any, temperature: float, top_k: int, generator: Any) -> int:
    import torch

    if temperature == 0.0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def _one_process() -> None:
    """megatron-core builds a model only inside process groups; one process alone makes its own."""
    import torch
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
