"""Tokens per second on a shaped link between the hosts of a cluster in a box, all methods side by side in one run.

    python -m benchmarks.shaped --r 0.45 --methods compute zero1 zero1-overlap acco
    python -m benchmarks.shaped --rate 100mbit --gas 8 --cpu 1.0 0.5

One rank on each host. `--r` asks for a link on which one exchange (reduce-scatter and all-gather of the real
collectives) takes r times the compute of an update (k micro-batches): both are measured at the start, and the link's
rate is chosen by them. `--rate` gives the rate instead.

The engines take turns (benchmarks/turns.py). A turn is one update to get going and `--block` timed ones, from the end
of an update to the end of an update: what was in flight at the start of the clock stands for what is in flight at its
end, so that no method is charged for being stopped. `compute` is forward and backward of the bare model, each rank by
itself, for as long as a turn of compute takes.

Prints for each method the tokens per second (median, smallest, largest over turns), its ratio to the faster ZeRO-1
and to compute, micro-batches per update, the exposed wait per round, and the CPU time of the lane and of all threads
but the main one (lane and gloo) as a share of compute: on CPUs these share the ranks' cores, which on a GPU they do
not, so that a figure of overlap means something only where they are small. `model` is how far the cost model, fed with
the compute and the collectives measured at the start, is off. `--out FILE` writes it all as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster import Cluster, ClusterError, bits_per_second

if TYPE_CHECKING:
    from megatron_acco.cost_model import Costs
    from megatron_acco.zero.probe import CollectiveSeconds

METHODS: dict[str, dict[str, Any]] = {
    "compute": {},
    "zero1": {"acco": None, "zero": {"overlap_comm": False}},
    "zero1-overlap": {"acco": None, "zero": {"overlap_comm": True}},
    "sync": {"acco": {"mode": "sync"}},
    "dpu": {"acco": {"mode": "dpu"}},
    "acco": {"acco": {"mode": "acco"}},
    "adaptive": {"acco": {"mode": "acco", "accumulation": "adaptive", "max_micro_batches_per_half": 256}},
    "auto": {"acco": {"mode": "acco", "fallback": "auto"}},
    "acco-8-bit": {"acco": {"mode": "acco", "estimate_bits": 8, "estimate_fraction": "auto"}},
    "acco-4-bit": {"acco": {"mode": "acco", "estimate_bits": 4, "estimate_fraction": "auto"}},
}
BASELINES = ("zero1", "zero1-overlap")
# Updates after which what is chosen from measurements (`fallback`, `estimate_fraction`) is chosen and in force.
UPDATES_TO_CHOOSE = 9
ANSWER_SECONDS = 60.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line of both the driver and its ranks."""
    from benchmarks import turns

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--rate", help='rate of every host\'s link, such as "300mbit"')
    link.add_argument("--r", type=float, help="exchange over compute of an update; chooses the rate")
    parser.add_argument("--gas", type=int, default=4, help="micro-batches per rank and update (k)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cpu", nargs="+", type=float, default=[1.0], help="CPUs per host: one for all, or one each")
    parser.add_argument("--no-pin", action="store_true", help="do not bind host i to CPU i")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["compute", *BASELINES, "acco", "adaptive"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--block", type=int, default=2, help="timed updates a turn")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the run is given up")
    turns.add_model_arguments(parser, seq_length=512, hidden_size=128, num_layers=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Make the cluster and run the ranks on it; in a rank, its part."""
    args = parse_arguments()
    if args.rank_of is not None:
        Rank(args).run()
        return 0
    try:
        bits_per_second(args.rate)
        cpu = args.cpu if len(args.cpu) > 1 else args.cpu[0]
        cluster = Cluster(args.hosts, args.rate, cpu, pin=not args.no_pin, ssh=False)
    except (ClusterError, ValueError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    with cluster, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.shaped", *sys.argv[1:], "--rank-of", folder]
        job = cluster.launch(command, env={"OMP_NUM_THREADS": "1"})
        codes = job.wait(args.limit, poll=lambda: _answer(cluster, Path(folder)))
    return max(abs(code) for code in codes)


def _chooses(name: str) -> bool:
    return "auto" in (METHODS[name].get("acco") or {}).values()


# ---- the link's rate, as asked for by rank 0 ------------------------------------------------------------------------


def _answer(cluster: Cluster, folder: Path) -> None:
    """Driver: set the rate that rank 0 asks for."""
    request = folder / "request"
    if not request.exists():
        return
    for host in range(len(cluster)):
        cluster.set_rate(host, request.read_text())
    request.rename(folder / "done")


def _ask_for_rate(folder: Path, bits: float) -> None:
    """Rank 0: have the driver shape all links."""
    (folder / "draft").write_text(f"{bits / 1e3:.0f}kbit")
    (folder / "draft").rename(folder / "request")
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (folder / "done").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer of the driver to a request for a link's rate within {ANSWER_SECONDS:g} s")
        time.sleep(0.02)
    (folder / "done").unlink()


# ---- one turn -------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """What one rank saw in the timed part of one turn. Times are seconds.

    Attributes:
        seconds: of the window.
        micro_batches: in it: of this rank (compute), of all ranks (the others).
        updates: in it.
        compute_seconds: forward and backward passes.
        waits: exposed wait of each round.
        rounds: lane time of each round.
        halves: how many of the rounds were estimates or commits of two halves.
        optimizer_seconds: of the rounds.
        lane_cpu: CPU time of the lane's thread.
        other_cpu: CPU time of all threads but the main one.
    """

    seconds: float
    micro_batches: int
    updates: int = 0
    compute_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    halves: int = 0
    optimizer_seconds: float = 0.0
    lane_cpu: float = 0.0
    other_cpu: float = 0.0


class Clocks:
    """Wall time, and CPU time of the lane and of all threads but the calling one."""

    def __init__(self, engine: Any) -> None:
        self._lane: int | None = None
        optimizer: Any = getattr(engine, "optimizer", None)
        if hasattr(optimizer, "round_observer"):
            optimizer.round_observer = self._meet_lane

    def _meet_lane(self, *unused: Any) -> None:
        self._lane = time.pthread_getcpuclockid(threading.get_ident())

    def read(self) -> tuple[float, float, float]:
        """(wall, lane's CPU, others' CPU), seconds."""
        lane = 0.0 if self._lane is None else time.clock_gettime(self._lane)
        return time.perf_counter(), lane, time.process_time() - time.thread_time()


class Rank:
    """One rank's part of the benchmark."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks import turns

        self.args = args
        turns.start()
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = turns.new_model(args)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.engines: dict[str, Any] = {
            name: turns.new_engine(args, args.gas, **METHODS[name]) for name in args.methods if name != "compute"
        }
        self.clocks = {name: Clocks(engine) for name, engine in self.engines.items()}

    def run(self) -> None:
        """Calibrate, take turns, report."""
        import torch.distributed as dist

        args = self.args
        compute = self.measure_compute()
        measured = self.choose_rate(compute)
        results: dict[str, list[list[Turn]]] = {name: [] for name in args.methods}
        for number in range(args.turns + 1):
            for name in args.methods:
                block = args.block if number else (UPDATES_TO_CHOOSE if _chooses(name) else 1)
                mine = self.compute_turn(compute, number) if name == "compute" else self.turn(name, block, number)
                everyone: list[Any] = [None] * self.world_size
                dist.all_gather_object(everyone, mine)
                if number > 0:  # the first turn warms up
                    results[name].append(everyone)
        if self.rank == 0:
            report(results, {**measured, "parameters": self.parameters}, args)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # engines share communicators that need not be taken down in order

    def bare_micro_batches(self, seed: int) -> Callable[[], None]:
        """A function that computes one micro-batch on the bare model."""
        from benchmarks import turns

        batches = turns.micro_batches(self.args, seed)
        count = 0

        def compute() -> None:
            nonlocal count
            if count % self.args.gas == 0:
                self.model.zero_grad(set_to_none=True)
            tokens, positions, labels = next(batches)
            self.model(tokens, positions, None, labels=labels).float().mean().div(self.args.gas).backward()
            count += 1

        return compute

    def compute_turn(self, micro_batch_seconds: float, seed: int) -> Turn:
        """Compute only, all ranks over the same time."""
        import torch.distributed as dist

        compute = self.bare_micro_batches(seed)
        compute()
        dist.barrier()
        window = max(3, self.args.block * self.args.gas) * micro_batch_seconds
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < window:
            compute()
            count += 1
        return Turn(time.perf_counter() - start, count)

    def measure_compute(self) -> float:
        """Seconds of a micro-batch on the fastest rank."""
        import torch.distributed as dist

        self.compute_turn(0.1, seed=0)
        mine = self.compute_turn(0.5, seed=0)
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine.seconds / mine.micro_batches)
        return min(everyone)

    def turn(self, name: str, updates: int, seed: int) -> Turn:
        """One update to get going, then `updates` timed ones."""
        import torch.distributed as dist

        import megatron_acco
        from benchmarks import turns
        from megatron_acco.zero.schedule import RoundKind

        engine, clocks, args = self.engines[name], self.clocks[name], self.args
        acco = METHODS[name]["acco"] is not None
        batches = turns.micro_batches(args, seed)

        def update() -> None:
            end = engine.global_steps + 1
            while engine.global_steps < end:
                turns.train_micro_batch(engine, next(batches))

        samples = engine.global_samples
        dist.barrier()
        update()
        before = megatron_acco.round_reports(engine)
        start = clocks.read()
        for _ in range(updates):
            update()
        end = clocks.read()
        during = megatron_acco.round_reports(engine)
        megatron_acco.drain(engine)
        after = megatron_acco.round_reports(engine)
        wall, lane, other = (last - first for first, last in zip(start, end, strict=True))
        if not acco:
            return Turn(wall, updates * args.gas * self.world_size, updates, other_cpu=other)
        # A commit's count is known after the update that it ends.
        commits = [r.micro_batches for r in (*before, *during, *after) if r.kind is RoundKind.COMMIT]
        assert sum(commits) * args.micro_batch_size == engine.global_samples - samples, "the engine counts otherwise"
        return Turn(
            seconds=wall,
            micro_batches=sum(commits[-updates:]),
            updates=updates,
            compute_seconds=sum(r.compute_seconds for r in during),
            waits=[r.wait_seconds for r in during],
            rounds=[r.seconds for r in during],
            halves=sum(r.has_halves for r in during),
            optimizer_seconds=sum(r.optimizer_seconds for r in during),
            lane_cpu=lane,
            other_cpu=other,
        )

    # ---- the link ---------------------------------------------------------------------------------------------------

    def choose_rate(self, compute: float) -> dict[str, Any]:
        """With `--r`, the rate at which one exchange takes r k c. Returns the rate (bit/s or None) and `Costs`."""
        import torch.distributed as dist

        from megatron_acco.cost_model import Costs

        rate = bits_per_second(self.args.rate)
        if self.args.r is not None:
            wanted = self.args.r * self.args.gas * compute
            sent = 2 * self.parameters * (2 if self.args.bf16 else 4) * (self.world_size - 1) / self.world_size
            rate, measured = 8 * sent / wanted, wanted
            for _ in range(2):  # as the wires give it, then as the collectives really take
                rate *= measured / wanted
                if self.rank == 0:
                    _ask_for_rate(self.args.rank_of, rate)
                dist.barrier()
                seconds = self.collective_seconds(1)
                measured = seconds.exchange
        else:
            seconds = self.collective_seconds(2)
        costs = Costs(compute, seconds.exchange, seconds.reduction, seconds.gathering, blocking=True)
        return {"rate": rate, **asdict(costs)}

    def collective_seconds(self, times: int) -> CollectiveSeconds:
        """Of the model's size, with nothing beside them; the same on all ranks."""
        import torch
        import torch.distributed as dist

        from megatron_acco.zero.collectives import clone_group, make_exchange
        from megatron_acco.zero.probe import time_collectives

        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        return time_collectives(make_exchange(clone_group(dist.group.WORLD), dtype), self.parameters, times)


# ---- figures --------------------------------------------------------------------------------------------------------


def tokens_per_second(name: str, ranks: list[Turn], tokens: int) -> float:
    """Of all ranks in one turn, `tokens` a micro-batch; for `compute` the sum of their own rates.

    Adaptive ranks end the same update up to a micro-batch apart, early or late in turn: the mean of their windows.
    """
    if name == "compute":
        return sum(turn.micro_batches * tokens / turn.seconds for turn in ranks)
    return ranks[0].micro_batches * tokens / statistics.mean(turn.seconds for turn in ranks)


def report(results: dict[str, list[list[Turn]]], measured: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table; write the JSON."""
    import deepspeed
    import torch

    from benchmarks import turns
    from megatron_acco.cost_model import Costs

    tokens = args.micro_batch_size * args.seq_length
    rates = {name: [tokens_per_second(name, ranks, tokens) for ranks in all_] for name, all_ in results.items()}
    baselines = [name for name in BASELINES if name in rates]
    best = max(baselines, key=lambda name: statistics.median(rates[name]), default=None)
    costs = Costs(*(measured[f.name] for f in fields(Costs)))
    c, exchange, k = costs.compute, costs.exchange, args.gas
    rate = "unshaped" if measured["rate"] is None else f"{measured['rate'] / 1e6:.1f} Mbit/s"
    print(
        f"\n{measured['parameters'] / 1e6:.2f} M parameters, {args.hosts} hosts, CPUs {args.cpu}, link {rate}, "
        f"k = {k}, micro-batch {args.micro_batch_size} x {args.seq_length}\n"
        f"compute of a micro-batch {c:.3f} s, an exchange with nothing beside it {exchange:.3f} s: "
        f"r = {exchange / (k * c):.2f}; "
        f"ZeRO-1's all-reduce {costs.reduction:.3f} s, its all-gather {costs.gathering:.3f} s\n"
        f"{args.turns} turns of {args.block} updates, torch {torch.__version__}, deepspeed {deepspeed.__version__}\n"
    )
    heads = ["method", "tokens/s", "min", "max", f"/{best or 'zero1'}", "min", "max", "/compute", "min", "max"]
    heads += ["mb/update", "round s", "exposed s", "halves", "lane cpu", "all cpu", "model"]
    print(f"{heads[0]:14}" + "".join(f"{head:>{max(8, len(head) + 1)}}" for head in heads[1:]))
    methods: dict[str, Any] = {}
    for name, values in rates.items():
        row: list[str] = [f"{value:.0f}" for value in turns.spread(values)]
        methods[name] = {"tokens_per_second": values, "turns": [[asdict(t) for t in ranks] for ranks in results[name]]}
        for base in (best, "compute"):
            if base not in rates:
                row += ["-"] * 3
                continue
            methods[name][f"ratio_to_{base}"] = turns.ratios(values, rates[base])
            row += [f"{value:.3f}" for value in turns.spread(methods[name][f"ratio_to_{base}"])]
        methods[name]["rounds"] = figures = round_figures(results[name])
        row += [
            "-" if value is None else f"{value:{form}}"
            for (_, form), value in zip(FIGURES, figures.values(), strict=True)
        ]
        if len(set(args.cpu)) == 1:
            methods[name]["predicted"] = args.hosts * tokens * predicted(name, costs, k, 2 if args.bf16 else 4)
            row.append(f"{methods[name]['predicted'] / statistics.median(values) - 1.0:+.1%}")
        else:
            row.append("-")  # the model's ranks are alike
        print(f"{name:14}" + "".join(f"{t:>{max(8, len(h) + 1)}}" for h, t in zip(heads[1:], row, strict=True)))
    if args.out:
        arguments = {key: str(value) for key, value in vars(args).items()}
        args.out.write_text(json.dumps({"arguments": arguments, "measured": measured, "methods": methods}, indent=1))


def predicted(name: str, costs: Costs, steps: int, weight_bytes: int) -> float:
    """Micro-batches per second and rank by the cost model, as `megatron-acco plan` has them."""
    from megatron_acco.cost_model import quantized_share

    bits = (METHODS[name].get("acco") or {}).get("estimate_bits")
    if bits is not None:
        costs = replace(costs, estimate=costs.exchange * quantized_share(bits, weight_bytes))
    if name == "adaptive":
        steps = costs.adaptive_steps(steps, METHODS[name]["acco"]["max_micro_batches_per_half"])
    seconds = {
        "compute": costs.compute_only,
        "zero1": costs.zero1,
        "zero1-overlap": costs.overlapped_zero1,
        "sync": costs.sync,
        "dpu": costs.delayed,
        "acco": lambda k: costs.acco(k, k // 2),
        "adaptive": lambda k: costs.acco(k, k // 2),
        "auto": lambda k: min(costs.acco(k, k // 2), costs.sync(k)),
    }
    if bits is not None:
        return steps / costs.acco(steps, costs.best_first_half(steps))
    return steps / seconds[name](steps)


FIGURES = (
    ("micro_batches_per_update", ".1f"),
    ("round_seconds", ".3f"),
    ("exposed_seconds", ".3f"),
    ("halves_share", ".0%"),
    ("lane_cpu_share", ".1%"),
    ("all_cpu_share", ".1%"),
)


def round_figures(all_turns: list[list[Turn]]) -> dict[str, float | None]:
    """Figures over all turns and ranks, under the names of FIGURES; None where a method has none.

    Micro-batches are of all ranks; round and exposed wait are the mean of a round, shares are of compute.
    """
    ranks = [turn for turns_of_ranks in all_turns for turn in turns_of_ranks]
    updates = sum(turn.updates for turn in ranks)
    rounds = sum(len(turn.rounds) for turn in ranks)
    compute = sum(turn.compute_seconds for turn in ranks)
    values = [
        sum(turn.micro_batches for turn in ranks) / updates if updates else None,
        sum(sum(turn.rounds) for turn in ranks) / rounds if rounds else None,
        sum(sum(turn.waits) for turn in ranks) / rounds if rounds else None,
        sum(turn.halves for turn in ranks) / rounds if rounds else None,
        sum(turn.lane_cpu for turn in ranks) / compute if compute else None,
        sum(turn.other_cpu for turn in ranks) / compute if compute else None,
    ]
    return dict(zip((name for name, _ in FIGURES), values, strict=True))


if __name__ == "__main__":
    sys.exit(main())
