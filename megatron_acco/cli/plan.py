"""`megatron-acco plan`: what each method would take on a cluster, before it is rented (docs/how-it-works.md)."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_acco.cli import simulate
from megatron_acco.cost_model import Costs, Link, model_state_bytes, quantized_share, update

_DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MEASURED_BYTES = 64 << 20
_ALONE = "--measure needs two or more ranks: start it with the deepspeed launcher (megatron-acco plan --help)"


@dataclass(frozen=True)
class Case:
    """One cluster and model. Times are seconds, sizes bytes.

    Attributes:
        parameters: trainable parameters on each rank.
        ranks: data-parallel ranks.
        steps: micro-batches per rank and update.
        costs: compute of a micro-batch, and the exchange.
        tokens: tokens per micro-batch and rank; 0: unknown.
        weight_bytes, sum_bytes: of a weight, and of an element of the gradient sum.
        most_per_half: limit of adaptive accumulation.
    """

    parameters: float
    ranks: int
    steps: int
    costs: Costs
    tokens: int
    weight_bytes: int
    sum_bytes: int
    most_per_half: int


@dataclass(frozen=True)
class Row:
    """One method: micro-batches and seconds per update, exposed communication, model state per rank (None: unknown)."""

    method: str
    steps: int
    seconds: float
    exposed: float
    state_bytes: float | None

    def tokens_per_second(self, case: Case) -> float:
        """Over all ranks."""
        return case.ranks * self.steps * case.tokens / self.seconds


_NAMES = {
    "zero1": "ZeRO-1",
    "zero1-overlap": "ZeRO-1, overlapped",
    "zero2": "ZeRO-2",
    "ddp": "DDP, sharded Adam",
    "fsdp2": "FSDP2",
    "sync": "sync",
    "dpu": "dpu",
    "acco": "acco, fixed",
    "acco-coarse": "acco, 8-bit estimate",
    "adaptive": "acco, adaptive",
}
_PYTORCH = ("ddp", "fsdp2")
_WAITING = ("zero1", "zero1-overlap", "zero2")


def predict(case: Case) -> list[Row]:
    """A row per method."""
    costs = case.costs.with_estimate_of(8, case.weight_bytes)
    rows = []
    for method, name in _NAMES.items():
        if case.steps < 2 and method in ("acco", "acco-coarse"):
            continue
        of = costs if method == "acco-coarse" else case.costs
        steps, seconds = update(method, of, case.steps, case.most_per_half)
        rows.append(Row(name, steps, seconds, seconds - costs.compute_only(steps), _state_bytes(method, case)))
    return rows


def _state_bytes(method: str, case: Case) -> float | None:
    if method in _PYTORCH:
        return None  # what PyTorch keeps depends on how a script mixes precisions
    sizes = case.parameters, case.ranks, case.weight_bytes, case.sum_bytes
    state = model_state_bytes(*sizes, overlapped=method not in _WAITING, partitioned=method == "zero2")
    if method == "acco-coarse":
        state += 2 * case.parameters * quantized_share(8, 1)  # codes to send, codes received
    return state


def smallest_winning_accumulation(costs: Costs, most: int = 4096) -> int | None:
    """Fewest micro-batches per update with which fixed ACCO beats every rule that waits; None: not up to `most`."""
    for steps in range(2, most + 1):
        waiting = min(costs.overlapped_zero1(steps), costs.sync(steps))
        if costs.acco(steps) < 0.999 * waiting:
            return steps
    return None


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict time per update, tokens per second and memory of each method on a cluster",
        description=(
            "Predicts time per update, tokens per second, exposed communication and memory per rank of each method. "
            "The link is given, or measured with the real collectives: deepspeed --hostfile hosts --no_local_rank "
            "--module megatron_acco.cli.main plan --measure ..."
        ),
    )
    parser.add_argument("--parameters", type=float, default=None, help="trainable parameters on each rank, e.g. 1.3e9")
    parser.add_argument("--ranks", type=int, default=None, help="data-parallel ranks (with --measure: those started)")
    parser.add_argument("--micro-batches", type=int, default=None, help="per rank and update")
    parser.add_argument("--compute-ms", type=float, default=None, help="forward and backward of one micro-batch")
    parser.add_argument("--tflops", type=float, default=None, help="instead: sustained TFLOP/s of a rank (6 P tokens)")
    parser.add_argument("--tokens", type=int, default=0, help="tokens per micro-batch and rank")
    parser.add_argument("--bandwidth-gbit", type=float, default=None, help="of a rank, per direction (Gbit/s)")
    parser.add_argument("--latency-us", type=float, default=0.0, help="of one message")
    parser.add_argument("--measure", action="store_true", help="measure the exchange with the ranks that run this")
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), default="bf16", help="of weights, and of gradients on the wire"
    )
    parser.add_argument("--grad-accum-dtype", choices=("bf16", "fp32"), default="fp32", help="of the gradient sums")
    parser.add_argument("--max-micro-batches-per-half", type=int, default=64, help="limit of adaptive accumulation")
    parser.add_argument("--plot", type=Path, default=None, help="draw time per micro-batch against accumulation")
    simulate.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; with --measure on rank 0 only."""
    _check(args)
    if args.table:
        print("\n".join(simulate.sizes(args)))
        return 0
    weight_bytes = _DTYPES[args.dtype]
    times = None
    if args.simulate:
        times = simulate.compute_times(args, None if args.compute_from is not None else _compute(args))
    compute = _compute(args) if times is None else times.mean
    if args.measure:
        costs, ranks = measure(args.parameters, args.dtype, compute, args.ranks)
        if int(os.environ.get("RANK", "0")) != 0:
            return 0
    elif args.simulate:
        ranks = args.ranks
        costs = simulate.cluster(args).costs(args.parameters, weight_bytes, weight_bytes, compute)
    else:
        ranks = args.ranks
        link = Link(args.bandwidth_gbit * 1e9 / 8.0, args.latency_us * 1e-6)
        costs = Costs(compute, link.exchange(args.parameters, ranks, weight_bytes, weight_bytes))
    if not (costs.compute > 0.0 and math.isfinite(costs.compute + costs.exchange / costs.compute)):
        raise ValueError(f"these numbers give {costs.compute:.3g} s of compute and {costs.exchange:.3g} s of exchange")
    if times is not None:
        print("\n".join(simulate.report(args, ranks, times, costs, weight_bytes)))
        return 0
    sum_bytes = weight_bytes if args.dtype != "fp32" and args.grad_accum_dtype == "bf16" else 4
    case = Case(
        args.parameters, ranks, args.micro_batches, costs, args.tokens, weight_bytes, sum_bytes,
        args.max_micro_batches_per_half,
    )  # fmt: skip
    print("\n".join(report(case)))
    if args.plot is not None:
        draw(case, args.plot)
        print(f"wrote {args.plot}")
    return 0


def _compute(args: argparse.Namespace) -> float:
    """Seconds of a micro-batch."""
    if args.compute_ms is not None:
        return args.compute_ms / 1e3
    return 6.0 * args.parameters * args.tokens / (args.tflops * 1e12)


def report(case: Case) -> list[str]:
    """The table and what follows from it, as lines."""
    costs, k = case.costs, case.steps
    r = costs.exchange / costs.compute_only(k)
    lines = [
        f"compute {1e3 * costs.compute:.1f} ms per micro-batch, {k} micro-batches per update, exchange "
        f"{costs.exchange:.3g} s: r = {r:.2f}",
        "",
        f"{'method':20s} {'micro-batches':>13s} {'s/update':>10s} {'tokens/s':>12s} {'exposed':>9s} {'state GB':>9s}",
    ]
    for row in predict(case):
        tokens = f"{row.tokens_per_second(case):12,.0f}" if case.tokens else f"{'-':>12s}"
        state = f"{'-':>9s}" if row.state_bytes is None else f"{row.state_bytes / 1e9:9.2f}"
        lines.append(
            f"{row.method:20s} {row.steps:13d} {row.seconds:10.3f} {tokens} {row.exposed / row.seconds:9.1%} {state}"
        )
    wins = smallest_winning_accumulation(costs)
    lines += ["", f"fixed ACCO hides all of it from {costs.acco_steps_to_hide()} micro-batches per update on"]
    lines.append(
        "and is faster than ZeRO-1 in either form, and than sync rounds, "
        + (f"from {wins} on" if wins is not None else "with no accumulation up to 4096")
    )
    lines.append("(model state without activations; evaluation and saving take another copy of the weights)")
    return lines


def measure(parameters: float, dtype: str, compute: float, ranks: int | None = None) -> tuple[Costs, int]:
    """The costs with the real collectives of `parameters` elements, and the number of ranks.

    At most 64 MiB are exchanged, and scaled up. Collective over all ranks.

    Raises:
        ValueError: fewer than two ranks, or another number than the `ranks` that the user expects.
    """
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from megatron_acco.zero.collectives import make_exchange
    from megatron_acco.zero.probe import time_large_exchange

    if "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        raise ValueError(_ALONE)  # DeepSpeed would ask for mpi4py
    deepspeed.init_distributed()
    world = dist.get_world_size()
    if world < 2:
        raise ValueError(_ALONE)
    if ranks not in (None, world):
        raise ValueError(f"--ranks is {ranks}, but {world} were started to --measure; leave it out")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    group = dist.group.WORLD
    assert group is not None
    seconds = time_large_exchange(make_exchange(group, element), int(parameters), _MEASURED_BYTES // element.itemsize)
    blocking = dist.get_backend(group) == dist.Backend.GLOO
    dist.destroy_process_group()
    return Costs(compute, seconds.exchange, seconds.reduction, seconds.gathering, blocking), world


def draw(case: Case, out: Path) -> None:
    """Draw seconds per micro-batch of each method against the accumulation.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    costs = case.costs
    most = 8 * max(case.steps, costs.acco_steps_to_hide())
    steps = sorted({round(2 * 1.25**i) for i in range(60) if 2 * 1.25**i < most})
    curves: Sequence[tuple[str, Callable[[int], float]]] = [
        ("compute only", costs.compute_only),
        ("ZeRO-1", costs.zero1),
        ("ZeRO-1, overlapped", costs.overlapped_zero1),
        ("sync", costs.sync),
        ("dpu", costs.delayed),
        ("acco", costs.acco),
    ]
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, seconds in curves:
        axes.plot(steps, [1e3 * seconds(k) / k for k in steps], label=name, linestyle=":" if "only" in name else "-")
    axes.axvline(case.steps, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("micro-batches per rank and update")
    axes.set_ylabel("ms per micro-batch")
    axes.set_ylim(bottom=0.0)
    axes.legend()
    figure.savefig(out, dpi=120)


def _check(args: argparse.Namespace) -> None:
    alone, own = simulate.only_for_simulations(args), simulate.not_for_tables(args)
    positive = ("parameters", "compute_ms", "tflops", "bandwidth_gbit")
    whole = ("ranks", "micro_batches", "max_micro_batches_per_half")
    problems = {
        **{
            f"{_flag(name)} must be above 0 and finite": not _is(args, name, lambda value: value > 0)
            for name in positive
        },
        **{f"{_flag(name)} must be 1 or more": not _is(args, name, lambda value: value >= 1) for name in whole},
        **{
            f"{_flag(name)} must be 0 or more": not _is(args, name, lambda v: v >= 0)
            for name in ("tokens", "latency_us")
        },
        "--compute-ms and --tflops contradict each other; give one": None not in (args.compute_ms, args.tflops),
        f"{', '.join(alone)}: only with --simulate": bool(alone),
        f"--table has models, ranks and links of its own; leave out {', '.join(own)}": bool(own),
        **(simulate.problems(args) if args.simulate else {}),
        **({} if args.table else _missing(args)),
        "--measure measures the link; leave out --bandwidth-gbit and --latency-us": args.measure
        and (args.bandwidth_gbit is not None or args.latency_us > 0),
        f"--plot {args.plot} is a folder; name a file": args.plot is not None and args.plot.is_dir(),
        f"--plot {args.plot}: its folder does not exist": args.plot is not None and not args.plot.parent.is_dir(),
    }
    for message, wrong in problems.items():
        if wrong:
            raise ValueError(message)


def _missing(args: argparse.Namespace) -> dict[str, bool]:
    """What must be given unless a table is asked for."""
    return {
        "give --parameters and --micro-batches": None in (args.parameters, args.micro_batches),
        "give --compute-ms, or --tflops and --tokens": args.compute_from is None
        and args.compute_ms is None
        and not (args.tflops and args.tokens),
        "give --bandwidth-gbit and --ranks, or --measure": not args.measure
        and (args.bandwidth_gbit is None or args.ranks is None),
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is(args: argparse.Namespace, name: str, right: Callable[[float], bool]) -> bool:
    """Whether a number, if given, is finite and `right`."""
    value = getattr(args, name)
    return value is None or (math.isfinite(value) and right(value))
