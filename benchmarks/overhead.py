"""Tokens per second of every mode against DeepSpeed's own ZeRO-1 on a fast link, side by side in one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/overhead.py

All engines live in the same processes and take turns (A B C A B C ...), `--block` updates a turn, on the same model,
data and optimizer. A turn ends with the round in flight drained, so an overlapped mode pays one exposed round a turn.
Prints the median over turns and the ratio to ZeRO-1, turn by turn; `--out FILE` writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from megatron.core import parallel_state

import megatron_acco
from megatron_acco.shared_memory import release_shared_memory
from megatron_acco.training.model import ModelOptions, build_model

VOCABULARY = 4096


def main() -> None:
    """Parse, run the turns, print the table on rank 0."""
    args = parse_arguments()
    logger.setLevel(logging.WARNING)
    deepspeed.init_distributed()
    release_shared_memory()
    parallel_state.initialize_model_parallel()
    engines = {method: build_engine(method, args) for method in args.methods}
    rates: dict[str, list[float]] = {method: [] for method in args.methods}
    for turn in range(args.turns + 1):
        for method, engine in engines.items():
            rate = run_turn(engine, args, seed=turn)
            if turn > 0:  # the first turn warms up
                rates[method].append(rate)
    if dist.get_rank() == 0:
        report(rates, engines, args)
    for engine in engines.values():
        engine.destroy()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["zero1", "acco", "dpu", "wp", "sync"])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--block", type=int, default=4, help="updates a turn")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def build_engine(method: str, args: argparse.Namespace) -> Any:
    """An engine of its own for `method`, all with the same initial weights."""
    torch.manual_seed(1234)
    options = ModelOptions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = build_model(options, VOCABULARY, torch.bfloat16 if args.bf16 else torch.float32)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": args.bf16},
    }
    if method != "zero1":
        config["acco"] = {"mode": method}
    return megatron_acco.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def run_turn(engine: Any, args: argparse.Namespace, seed: int) -> float:
    """Tokens per second of all ranks over one turn, the last round included."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    shape = (args.micro_batch_size, args.seq_length + 1)
    device = get_accelerator().current_device_name()
    positions = torch.arange(args.seq_length, device=device).expand(args.micro_batch_size, -1)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(args.block * args.accumulation):
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        losses = engine(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        engine.backward(losses.float().mean())
        engine.step()
    megatron_acco.drain(engine)
    dist.barrier()
    seconds = time.perf_counter() - start
    return args.block * args.accumulation * args.micro_batch_size * args.seq_length * dist.get_world_size() / seconds


def report(rates: dict[str, list[float]], engines: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table; write the JSON."""
    parameters = sum(p.numel() for p in next(iter(engines.values())).module.parameters())
    print(
        f"\n{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, k = {args.accumulation}, "
        f"micro-batch {args.micro_batch_size} x {args.seq_length}, {args.turns} turns of {args.block} updates, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    )
    print(f"{'method':8} {'tokens/s':>10} {'min':>8} {'max':>8} {'ratio to zero1 (median, min, max)':>36}")
    table = {}
    for method, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates.get("zero1", values), strict=True)]
        table[method] = {"tokens_per_second": values, "ratio": ratios}
        print(
            f"{method:8} {statistics.median(values):10.0f} {min(values):8.0f} {max(values):8.0f} "
            f"{statistics.median(ratios):16.3f} {min(ratios):9.3f} {max(ratios):9.3f}"
        )
    if args.out:
        args.out.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "methods": table}))


if __name__ == "__main__":
    main()
