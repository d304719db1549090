"""`megatron-acco plan --simulate`: the plan, played event by event (docs/PERFORMANCE.md)."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy

from megatron_acco.cost_model import Costs, Link, update
from megatron_acco.report.runs import read_runs
from megatron_acco.simulation.compute_times import ComputeTimes, measured
from megatron_acco.simulation.links import Cluster
from megatron_acco.simulation.rounds import HALVES, METHODS, Setting, play
from megatron_acco.simulation.sizes import PER_NODE, Assumptions, table

MOST_RANKS = 4096
# Of methods whose rule has another name.
NAMES = {"acco-coarse": "acco-8-bit"}
_SPREAD = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that only a simulation has."""
    group = parser.add_argument_group("simulation")
    group.add_argument("--simulate", action="store_true", help="play the rounds event by event on all ranks")
    group.add_argument("--updates", type=int, default=200, help="that are played")
    group.add_argument("--seed", type=int, default=0, help="of everything random")
    group.add_argument(
        "--spread", type=float, default=None, help=f"of a micro-batch's time: deviation over mean ({_SPREAD})"
    )
    group.add_argument(
        "--compute-from", type=Path, default=None, metavar="RUN", help="take compute times that this run has recorded"
    )
    group.add_argument("--slow-share", type=float, default=0.0, help="share of the ranks that are slow")
    group.add_argument("--slow-factor", type=float, default=2.0, help="how much longer these take")
    group.add_argument("--pause-every", type=float, default=0.0, help="mean seconds between two pauses of a rank")
    group.add_argument("--pause", type=float, default=0.0, help="seconds that a pause lasts")
    group.add_argument(
        "--ranks-per-node", type=int, default=1, help="bandwidth and latency are then those of a node, between nodes"
    )
    group.add_argument("--hierarchical", action="store_true", help="exchange inside nodes first, in the place of rings")
    group.add_argument("--inside-gbit", type=float, default=3600.0, help="of a rank, inside its node (Gbit/s)")
    group.add_argument("--inside-latency-us", type=float, default=3.0, help="of one message inside a node")
    group.add_argument(
        "--table",
        action="store_true",
        help="models of 125 M to 70 B parameters on 10 to 400 Gbit/s; --tflops, --tokens",
    )


def only_for_simulations(args: argparse.Namespace) -> list[str]:
    """Flags that were given although nothing is simulated."""
    return [f"--{name.replace('_', '-')}" for name in _given(args) if not args.simulate]


def not_for_tables(args: argparse.Namespace) -> list[str]:
    """Flags that were given although the table has models, ranks and links of its own."""
    plan = ("parameters", "ranks", "micro_batches", "compute_ms", "bandwidth_gbit", "latency_us", "measure")
    given = [name for name in plan if getattr(args, name)]
    given += [name for name in _given(args) if name not in ("simulate", "table", "spread")]
    return [f"--{name.replace('_', '-')}" for name in given if args.table]


def _given(args: argparse.Namespace) -> list[str]:
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    return [name for name, value in vars(defaults.parse_args([])).items() if getattr(args, name) != value]


def problems(args: argparse.Namespace) -> dict[str, bool]:
    """What can be wrong with the numbers of a simulation: message, whether it is so."""

    def wrong(name: str, right: Callable[[float], bool]) -> bool:
        value = getattr(args, name)
        return value is not None and not (math.isfinite(value) and right(value))

    return {
        "--updates must be 1 to 100000": wrong("updates", lambda v: 1 <= v <= 100_000),
        "--seed must be 0 or more": wrong("seed", lambda v: v >= 0),
        "--spread must be 0 to 3": wrong("spread", lambda v: 0 <= v <= 3),
        "--slow-share must be 0 to 1": wrong("slow_share", lambda v: 0 <= v <= 1),
        "--slow-factor must be 1 or more": wrong("slow_factor", lambda v: v >= 1),
        "--pause-every and --pause must be 0 or more": wrong("pause_every", lambda v: v >= 0)
        or wrong("pause", lambda v: v >= 0),
        "--pause-every and --pause go together": (args.pause_every > 0) != (args.pause > 0),
        "--ranks-per-node must be 1 or more": wrong("ranks_per_node", lambda v: v >= 1),
        "--inside-gbit must be above 0": wrong("inside_gbit", lambda v: v > 0),
        "--inside-latency-us must be 0 or more": wrong("inside_latency_us", lambda v: v >= 0),
        f"a simulation has {MOST_RANKS} ranks at most": args.ranks is not None and args.ranks > MOST_RANKS,
        "--compute-from gives the compute times; leave out --compute-ms and --tflops": args.compute_from is not None
        and (args.compute_ms, args.tflops) != (None, None),
        "--measure measures flat links; leave out --ranks-per-node": args.measure and args.ranks_per_node != 1,
        "--plot draws the formulas; leave out --simulate": args.plot is not None,
    }


def compute_times(args: argparse.Namespace, compute: float | None) -> ComputeTimes:
    """Of the ranks, as measured or as given; `compute` is the mean of a micro-batch, None with `--compute-from`.

    Raises:
        ValueError: the run to take them from cannot be read or has none.
    """
    if compute is None:
        times = measured(read_runs([str(args.compute_from)])[0])
    else:
        times = ComputeTimes(compute)
    if args.spread is not None or not times.factors:
        times = dataclasses.replace(times, factors=(), spread=_SPREAD if args.spread is None else args.spread)
    return dataclasses.replace(
        times,
        slow_share=args.slow_share,
        slow_factor=args.slow_factor,
        pause_every=args.pause_every or math.inf,
        pause=args.pause,
    )


def cluster(args: argparse.Namespace) -> Cluster:
    """The ranks on the links that are given.

    Raises:
        ValueError: ranks that do not fill their nodes.
    """
    inside = Link(args.inside_gbit * 1e9 / 8.0, args.inside_latency_us * 1e-6)
    between = Link(args.bandwidth_gbit * 1e9 / 8.0, args.latency_us * 1e-6)
    return Cluster(args.ranks, args.ranks_per_node, inside, between, args.hierarchical)


def report(args: argparse.Namespace, ranks: int, times: ComputeTimes, exchange: Costs, wire_bytes: int) -> list[str]:
    """Play every method; the table, as lines."""
    k = args.micro_batches
    # Measured links are flat: a node has one rank, and nothing to exchange inside.
    inside = 0.0 if args.measure else cluster(args).inside_costs(args.parameters, wire_bytes, wire_bytes)
    most, played = args.max_micro_batches_per_half, (args.updates, args.seed)
    setting = Setting(ranks, k, times, exchange, most, *played, wire_bytes, args.ranks_per_node, inside)
    kind = f"{len(times.factors)} measured times" if times.factors else f"spread {times.spread:.1%}"
    lines = [
        f"{ranks} ranks, {k} micro-batches per rank and update of {1e3 * times.mean:.1f} ms ({kind}), exchange "
        f"{exchange.exchange:.3g} s: r = {exchange.exchange / (k * times.mean):.2f}; {args.updates} updates played",
        "",
        f"{'method':14s} {'micro-batches':>13s} {'s/update':>10s} {'5 %':>9s} {'95 %':>9s} {'tokens/s':>12s} "
        f"{'of compute':>10s} {'exposed':>8s} {'waiting':>8s} {'formula':>9s}",
    ]
    alone = play("compute", setting).rate
    for method in METHODS:
        if method in HALVES and k < 2:
            continue
        result = play(method, setting)
        low, median, high = (float(numpy.percentile(result.seconds, q)) for q in (5, 50, 95))
        mean = float(result.seconds.mean())
        tokens = f"{result.rate * args.tokens:12,.0f}" if args.tokens else f"{'-':>12s}"
        name = NAMES.get(method, method)
        lines.append(
            f"{name:14s} {result.micro_batches:13.1f} {median:10.3f} {low:9.3f} {high:9.3f} {tokens} "
            f"{result.rate / alone:10.1%} {result.exposed / mean:8.1%} {result.waiting / mean:8.1%} "
            f"{formula(method, setting):9.3f}"
        )
    lines += [
        "",
        "exposed: what even the last rank of a round waits, for the exchange; waiting: what ranks wait for others;",
        "formula: s/update by the cost model, of equal ranks without spread",
    ]
    return lines


def formula(method: str, setting: Setting) -> float:
    """Seconds per update by the cost model."""
    return update(method, setting.costs_of(method), setting.steps, setting.most_per_half)[1]


def sizes(args: argparse.Namespace) -> list[str]:
    """The table of model sizes, and what it takes for granted, as lines."""
    given = Assumptions()
    if args.tflops is not None:
        given = dataclasses.replace(given, tflops=args.tflops)
    if args.tokens:
        given = dataclasses.replace(given, tokens=args.tokens)
    if args.spread is not None:
        given = dataclasses.replace(given, spread=args.spread)
    return [
        f"Assumed: nodes of {PER_NODE} GPUs that share one network link of the given rate, NVLink of 450 GB/s inside; "
        f"{given.tflops:g} TFLOP/s sustained per GPU;",
        f"{given.tokens} tokens per GPU and micro-batch, bf16 weights, gradients and sums; spread of compute "
        f"{given.spread:.0%}; TP: tensor-parallel GPUs of a replica;",
        "k: micro-batches per update; r: an exchange over the compute of an update. Methods: tokens/s over those of "
        "compute alone. Its batch: of adaptive, over the configured one.",
        "",
        *table(given),
    ]
