"""One rank: it calibrates, takes turns, and hands what it saw to rank 0.

python -m benchmarks.compare.rank FOLDER    started by benchmarks.compare, which put the arguments there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist

import megatron_acco
from benchmarks import turns
from benchmarks.cluster import bits_per_second
from benchmarks.compare import memory
from benchmarks.compare.methods import METHODS, Kind
from benchmarks.compare.trainers import Trainer, compute_micro_batch, flat, new_trainer
from megatron_acco.cost_model import Costs
from megatron_acco.ops import prepare_cpu_ops
from megatron_acco.zero.collectives import clone_group, make_exchange
from megatron_acco.zero.probe import CollectiveSeconds, time_collectives
from megatron_acco.zero.report import RoundReport
from megatron_acco.zero.schedule import RoundKind

T = TypeVar("T")
# Updates after which what is chosen from measurements (`fallback`, `estimate_fraction`) is chosen and in force.
UPDATES_TO_CHOOSE = 9
ANSWER_SECONDS = 60.0
# Exact methods differ by rounding: of what training has changed, and of the gradient's norm.
EXACT = {False: 1e-3, True: 0.1}  # by --bf16


@dataclass
class Turn:
    """What one rank saw in the timed part of one turn. Times are seconds.

    Attributes:
        seconds: of the window.
        micro_batches: in it: of this rank (compute), of all ranks (the others).
        updates: in it.
        sent: bytes that left through the interface.
        compute_seconds: forward and backward passes (of ACCO's engine only, as all that follows).
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
    sent: int = 0
    compute_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    halves: int = 0
    optimizer_seconds: float = 0.0
    lane_cpu: float = 0.0
    other_cpu: float = 0.0


class Clocks:
    """Wall time, CPU time of the lane and of all threads but the calling one, bytes sent."""

    def __init__(self, engine: Any) -> None:
        self._lane: int | None = None
        self._counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
        optimizer: Any = getattr(engine, "optimizer", None)
        if hasattr(optimizer, "round_observer"):
            optimizer.round_observer = self._meet_lane

    def _meet_lane(self, *unused: Any) -> None:
        self._lane = time.pthread_getcpuclockid(threading.get_ident())

    def read(self) -> tuple[float, float, float, int]:
        """(wall, lane's CPU, others' CPU, seconds; bytes)."""
        lane = 0.0 if self._lane is None else time.clock_gettime(self._lane)
        others = time.process_time() - time.thread_time()
        return time.perf_counter(), lane, others, int(self._counter.read_text())


@dataclass(frozen=True)
class State:
    """Where a method stands: weights [parameters], and the norm of the last gradient."""

    weights: torch.Tensor
    norm: float

    def off(self, other: State, first: torch.Tensor) -> float:
        """Distance of the weights over how far they have come from `first`, or that of the norms if it is larger.

        Adam hides a gradient that is too large by a factor; the norm does not.
        """
        distance = float((self.weights - other.weights).norm() / (other.weights - first).norm())
        distances = distance, abs(self.norm / other.norm - 1.0)
        return math.inf if any(map(math.isnan, distances)) else max(distances)


class Failures:
    """Methods that cannot be measured, and why.

    A method that fails on all ranks is left out from there on, and stands in the table with its reason. If it fails on
    some, the others hang in a collective of theirs, and nothing that follows could be trusted: the run ends.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self.reasons: dict[str, str] = {}

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it failed on all ranks.

        Raises:
            RuntimeError: it failed on this rank and not on all.
        """
        try:
            return work()
        except Exception as error:
            print(f"{name} on rank {self._rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            (self._folder / f"failed-{name}-{self._rank}").touch()
            expected = [self._folder / f"failed-{name}-{rank}" for rank in range(self._world_size)]
            if not _wait(lambda: all(path.exists() for path in expected), ANSWER_SECONDS):
                raise RuntimeError(f"{name} failed on rank {self._rank} and not on all") from error
            self.reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return None


class Rank:
    """One rank's part of the benchmark."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        prepare_cpu_ops(["ShareMemCommBuilder", "FusedAdamBuilder"])  # once, and not in every process for memory
        self.peaks = {} if args.no_memory else memory.peaks(args)
        turns.start()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.failures = Failures(folder, self.rank, self.world_size)
        self.model = turns.new_model(args)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        world = dist.group.WORLD
        assert world is not None
        self.exchange = make_exchange(clone_group(world), torch.bfloat16 if args.bf16 else torch.float32)
        self.off: dict[str, float] = {}
        self.trainers: dict[str, Trainer] = {}
        for name in args.methods:
            if METHODS[name].kind is not Kind.COMPUTE:
                trainer = self.failures.attempt(name, lambda name=name: new_trainer(name, args))  # type: ignore[misc]
                if trainer is not None:
                    self.trainers[name] = trainer
        self.clocks = {name: Clocks(getattr(trainer, "engine", None)) for name, trainer in self.trainers.items()}

    def run(self) -> None:
        """Calibrate, take turns; rank 0 writes the result."""
        args = self.args
        compute = self.measure_compute()
        rate = self.choose_rate(min(compute))
        self.say("unshaped" if rate is None else f"link of {rate / 1e6:.1f} Mbit/s")
        collectives: list[tuple[float, ...]] = []
        results: dict[str, list[list[Turn]]] = {name: [] for name in args.methods}
        for number in range(args.turns + 1):
            for name in args.methods:
                self.say(f"turn {number} of {args.turns}: {name}")
                mine = self.take_turn(name, number, min(compute))
                if mine is not None and number > 0:  # the first turn warms up
                    results[name].append(self.everyone(mine))
            if number == 0:
                self.compare_exact()
            else:
                collectives.append(astuple(self.collective_seconds()))
        exchange, reduction, gathering = map(statistics.median, zip(*collectives, strict=True))
        costs = Costs(min(compute), exchange, reduction, gathering, blocking=True)
        result = {
            "arguments": vars(args) | {"out": str(args.out)},
            "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
            "measured": {
                "rate": rate,
                "costs": asdict(costs),
                "collectives": collectives,
                "compute_by_rank": compute,
                "parameters": self.parameters,
                "cores": os.cpu_count(),
            },
            "failed": self.failures.reasons,
            "off": self.off,
            "peaks": self.everyone(self.peaks),
            "turns": {name: [[asdict(turn) for turn in ranks] for ranks in all_] for name, all_ in results.items()},
        }
        if self.rank == 0:
            (self.folder / "result").write_text(json.dumps(result))
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # engines share communicators that need not be taken down in order

    def take_turn(self, name: str, number: int, micro_batch_seconds: float) -> Turn | None:
        """None: the method has failed, now or before."""
        if name in self.failures.reasons:
            return None
        if METHODS[name].kind is Kind.COMPUTE:
            return self.compute_turn(micro_batch_seconds, number)
        updates = self.args.block if number else (UPDATES_TO_CHOOSE if METHODS[name].chooses else 1)
        return self.failures.attempt(name, lambda: self.turn(name, updates, number))

    def everyone(self, mine: T) -> list[T]:
        """Of all ranks."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine)
        return gathered

    def say(self, line: str) -> None:
        """Progress."""
        if self.rank == 0:
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    # ---- what the methods have in common ----------------------------------------------------------------------------

    def compare_exact(self) -> None:
        """After the same updates on the same data exact methods have the same weights: else they are not comparable."""
        first = flat([parameter.detach() for parameter in self.model.parameters()])
        exact = [name for name in self.trainers if METHODS[name].exact and name not in self.failures.reasons]
        reference: State | None = None
        for name in exact:
            state = State(self.trainers[name].weights(), self.trainers[name].grad_norm())
            reference = reference or state
            self.off[name] = worst = max(self.everyone(state.off(reference, first)))
            if worst > EXACT[self.args.bf16]:
                self.failures.reasons[name] = (
                    f"after the same updates its weights or gradient are {worst:.1%} off those of {exact[0]}"
                )

    # ---- one turn ---------------------------------------------------------------------------------------------------

    def compute_turn(self, micro_batch_seconds: float, seed: int) -> Turn:
        """Compute only, all ranks over the same time."""
        batches, steps = turns.micro_batches(self.args, seed), self.args.gas

        def compute(count: int) -> None:
            if count % steps == 0:
                self.model.zero_grad(set_to_none=True)
            compute_micro_batch(self.model, next(batches), steps)

        compute(0)
        dist.barrier()
        window = max(3, self.args.block * steps) * micro_batch_seconds
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < window:
            compute(count)
            count += 1
        return Turn(time.perf_counter() - start, count)

    def measure_compute(self) -> list[float]:
        """Seconds of a micro-batch on every rank."""
        self.compute_turn(0.1, seed=0)
        mine = self.compute_turn(0.5, seed=0)
        return self.everyone(mine.seconds / mine.micro_batches)

    def turn(self, name: str, updates: int, seed: int) -> Turn:
        """One update to get going, then `updates` timed ones."""
        trainer, clocks = self.trainers[name], self.clocks[name]
        batches = turns.micro_batches(self.args, seed)
        engine: Any = getattr(trainer, "engine", None)
        samples = engine.global_samples if engine is not None else 0
        dist.barrier()
        trainer.update(batches)
        before = _reports(name, engine)
        start = clocks.read()
        for _ in range(updates):
            trainer.update(batches)
        end = clocks.read()
        during = _reports(name, engine)
        wall, lane, other, sent = (last - first for first, last in zip(start, end, strict=True))
        if METHODS[name].acco is None:
            return Turn(wall, updates * self.args.gas * self.world_size, updates, int(sent), other_cpu=other)
        megatron_acco.drain(engine)
        after = _reports(name, engine)
        # A commit's count is known after the update that it ends.
        commits = [r.micro_batches for r in (*before, *during, *after) if r.kind is RoundKind.COMMIT]
        assert sum(commits) * self.args.micro_batch_size == engine.global_samples - samples, "the engine counts else"
        return Turn(
            seconds=wall,
            micro_batches=sum(commits[-updates:]),
            updates=updates,
            sent=int(sent),
            compute_seconds=sum(r.compute_seconds for r in during),
            waits=[r.wait_seconds for r in during],
            rounds=[r.seconds for r in during],
            halves=sum(r.has_halves for r in during),
            optimizer_seconds=sum(r.optimizer_seconds for r in during),
            lane_cpu=lane,
            other_cpu=other,
        )

    # ---- the link ---------------------------------------------------------------------------------------------------

    def choose_rate(self, compute: float) -> float | None:
        """The link's rate (bit/s); with `--r`, shape it so that one exchange takes r k c."""
        args = self.args
        if args.r is None:
            return bits_per_second(args.rate)
        wanted = args.r * args.gas * compute
        sent = 2 * self.parameters * self.exchange.wire_dtype.itemsize * (self.world_size - 1) / self.world_size
        rate, measured = 8 * sent / wanted, wanted
        for _ in range(2):  # as the wires give it, then as the collectives really take
            rate *= measured / wanted
            if self.rank == 0:
                self.ask_for_rate(rate)
            dist.barrier()
            measured = self.collective_seconds().exchange
        return rate

    def ask_for_rate(self, bits: float) -> None:
        """Have the driver shape all links."""
        (self.folder / "draft").write_text(f"{bits / 1e3:.0f}kbit")
        (self.folder / "draft").rename(self.folder / "request")
        if not _wait((self.folder / "done").exists, ANSWER_SECONDS):
            raise TimeoutError(f"no answer of the driver to a request for a link's rate within {ANSWER_SECONDS:g} s")
        (self.folder / "done").unlink()

    def collective_seconds(self) -> CollectiveSeconds:
        """Of the model's size, once, with nothing beside them; the same on all ranks."""
        return time_collectives(self.exchange, self.parameters, times=1)


def _reports(name: str, engine: Any) -> list[RoundReport]:
    """Of the rounds that have ended since they were asked for last."""
    return [] if METHODS[name].acco is None else list(megatron_acco.round_reports(engine))


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it has become true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    Rank(pickle.loads((_folder / "arguments").read_bytes()), _folder).run()
