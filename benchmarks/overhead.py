"""Tokens per second of every mode against DeepSpeed's own ZeRO-1 on a fast link, side by side in one run.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --module benchmarks.overhead

The engines take turns (benchmarks/turns.py), `--block` updates a turn. A turn ends with the round in flight drained,
so an overlapped mode pays one exposed round a turn. Prints the median over turns and the ratio to ZeRO-1, turn by
turn; `--out FILE` writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import megatron_acco
from benchmarks import turns


def main() -> None:
    """Parse, run the turns, print the table on rank 0."""
    args = parse_arguments()
    turns.start()
    engines = {
        method: turns.new_engine(args, args.accumulation, None if method == "zero1" else {"mode": method})
        for method in args.methods
    }
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
    turns.add_model_arguments(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def run_turn(engine: Any, args: argparse.Namespace, seed: int) -> float:
    """Tokens per second of all ranks over one turn, the last round included."""
    batches = turns.micro_batches(args, seed)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(args.block * args.accumulation):
        turns.train_micro_batch(engine, next(batches))
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
        ratios = turns.ratios(values, rates.get("zero1", values))
        table[method] = {"tokens_per_second": values, "ratio": ratios}
        print(
            "{:8} {:10.0f} {:8.0f} {:8.0f} {:16.3f} {:9.3f} {:9.3f}".format(
                method, *turns.spread(values), *turns.spread(ratios)
            )
        )
    if args.out:
        args.out.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "methods": table}))


if __name__ == "__main__":
    main()
