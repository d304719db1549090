"""Engines that take turns in one run: what the benchmarks of speed share.

All engines live in the same processes, on the same model and data, and are timed turn by turn (A B C A B C ...), so
that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from megatron.core import parallel_state

import megatron_acco
from benchmarks.common import add_model_arguments as add_model_arguments
from benchmarks.common import attention_heads
from benchmarks.common import ratios as ratios
from benchmarks.common import spread as spread
from megatron_acco.shared_memory import release_shared_memory
from megatron_acco.training.model import ModelOptions, build_model

VOCABULARY = 4096
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
CLIPPING = 1.0


def start() -> None:
    """Meet the other ranks. Collective."""
    logger.setLevel(logging.WARNING)
    deepspeed.init_distributed()
    release_shared_memory()
    parallel_state.initialize_model_parallel()


def new_model(args: argparse.Namespace, seed: int = 1234) -> torch.nn.Module:
    """A GPT model, the same at every call and on every rank."""
    torch.manual_seed(seed)
    options = ModelOptions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=attention_heads(args.hidden_size),
        max_position_embeddings=args.seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    # Position embeddings are made in fp32: an engine would convert them, the bare model must run too.
    return build_model(options, VOCABULARY, dtype).to(dtype)


def new_engine(
    args: argparse.Namespace,
    accumulation: int,
    acco: Mapping[str, Any] | None,
    zero: Mapping[str, Any] | None = None,
) -> Any:
    """An engine of its own.

    Args:
        accumulation: micro-batches per rank and update.
        acco: the `acco` section; None is DeepSpeed's own ZeRO.
        zero: further keys of `zero_optimization`.
    """
    model = new_model(args)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "zero_optimization": {"stage": 1, **(zero or {})},
        "bf16": {"enabled": args.bf16},
    }
    if acco is not None:
        config["acco"] = dict(acco)
    return megatron_acco.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def micro_batches(args: argparse.Namespace, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Endless (tokens, positions, labels) of this rank, each [micro-batch, sequence]."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    shape = (args.micro_batch_size, args.seq_length + 1)
    while True:
        yield split(torch.randint(VOCABULARY, shape, generator=generator))


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, positions, labels) [micro-batch, sequence] on the device, from tokens [micro-batch, sequence + 1]."""
    tokens = tokens.to(get_accelerator().current_device_name())
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
    return tokens[:, :-1], positions, tokens[:, 1:]


def train_micro_batch(engine: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """The user's loop, one pass."""
    tokens, positions, labels = batch
    losses = engine(tokens, positions, None, labels=labels)
    engine.backward(losses.float().mean())
    engine.step()
