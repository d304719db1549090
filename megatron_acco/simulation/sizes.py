"""The table of model sizes and networks: what each method makes of compute, 125 M to 70 B parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_acco.cost_model import Link, model_state_bytes
from megatron_acco.simulation.compute_times import ComputeTimes
from megatron_acco.simulation.links import Cluster
from megatron_acco.simulation.rounds import Played, Setting, play

PER_NODE = 8
WIRE_BYTES = WEIGHT_BYTES = 2
RATES_GBIT = (10.0, 25.0, 100.0, 400.0)
# The name of every column, and its rule.
COLUMNS = {
    "zero1-overlap": "zero1-overlap",
    "megatron": "megatron",
    "dpu": "dpu",
    "acco": "acco",
    "8-bit": "acco-coarse",
    "node": "acco-node",
    "adaptive": "adaptive",
}


@dataclass(frozen=True)
class Size:
    """A model and the job that trains it.

    Attributes:
        name: to print.
        parameters: in all.
        gpus: in all, in nodes of eight.
        tensor_parallel: GPUs of a replica.
        tokens: per update, as published models of that size took (GPT-3's table 2.1; 4 M from 30 B on).
    """

    name: str
    parameters: float
    gpus: int
    tensor_parallel: int
    tokens: float


SIZES = (
    Size("125M", 125e6, 16, 1, 0.5e6),
    Size("350M", 350e6, 32, 1, 0.5e6),
    Size("1.3B", 1.3e9, 64, 1, 1e6),
    Size("2.7B", 2.7e9, 64, 1, 1e6),
    Size("6.7B", 6.7e9, 128, 1, 2e6),
    Size("13B", 13e9, 128, 2, 2e6),
    Size("30B", 30e9, 256, 4, 4e6),
    Size("70B", 70e9, 512, 8, 4e6),
)


@dataclass(frozen=True)
class Assumptions:
    """What the table takes for granted.

    Attributes:
        tflops: that a GPU sustains: 40 % of an H100's 989 (dense bf16).
        tokens: per GPU and micro-batch.
        spread: standard deviation of a micro-batch's time over its mean.
        inside: link of a GPU to the others of its node (NVLink, 450 GB/s, 3 us).
        latency: of a message between nodes, seconds.
        most_per_half: limit of adaptive accumulation.
        updates: that are played.
    """

    tflops: float = 395.0
    tokens: int = 4096
    spread: float = 0.03
    inside: Link = Link(450e9, 3e-6)
    latency: float = 20e-6
    most_per_half: int = 256
    updates: int = 40


@dataclass(frozen=True)
class Cell:
    """One size on one network.

    Attributes:
        size, rate: which; Gbit/s of a node.
        steps: micro-batches per rank and update.
        r: one exchange over the compute of an update.
        share: of the tokens per second that compute alone would make, by column.
        growth: adaptive micro-batches per update over `steps`.
        state_bytes: of a GPU: weights, gradients, optimizer.
    """

    size: Size
    rate: float
    steps: int
    r: float
    share: dict[str, float]
    growth: float
    state_bytes: float


def cell(size: Size, rate: float, given: Assumptions) -> Cell:
    """Play every method. The tensor-parallel groups of a node share its network."""
    ranks = size.gpus // size.tensor_parallel
    steps = max(2, round(size.tokens / (size.gpus * given.tokens)))
    own = size.parameters / size.tensor_parallel
    compute = 6.0 * size.parameters * given.tokens / (given.tflops * 1e12)
    between = Link(rate * 1e9 / 8.0 / size.tensor_parallel, given.latency)
    cluster = Cluster(ranks, PER_NODE // size.tensor_parallel, given.inside, between)
    costs = cluster.costs(own, WIRE_BYTES, WEIGHT_BYTES, compute)
    times = ComputeTimes(compute, given.spread)
    inside = cluster.inside_costs(own, WIRE_BYTES, WEIGHT_BYTES)
    most, per_node = given.most_per_half, cluster.per_node
    setting = Setting(ranks, steps, times, costs, most, given.updates, 0, WIRE_BYTES, per_node, inside)
    alone = play("compute", setting).rate
    played: dict[str, Played] = {name: play(method, setting) for name, method in COLUMNS.items()}
    return Cell(
        size,
        rate,
        steps,
        costs.exchange / costs.compute_only(steps),
        {method: result.rate / alone for method, result in played.items()},
        played["adaptive"].micro_batches / steps,
        model_state_bytes(own, ranks, WEIGHT_BYTES, WIRE_BYTES, overlapped=True),
    )


def table(given: Assumptions, sizes: Sequence[Size] = SIZES, rates: Sequence[float] = RATES_GBIT) -> list[str]:
    """The table, as lines of Markdown, which can be read as they are."""
    head = ["model", "GPUs", "TP", "k", "Gb/s", "r", *COLUMNS, "its batch", "state GB"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for size in sizes:
        for rate in rates:
            made = cell(size, rate, given)
            row = [size.name, f"{size.gpus}", f"{size.tensor_parallel}", f"{made.steps}", f"{rate:g}", f"{made.r:.2f}"]
            row += [f"{made.share[method]:.0%}" for method in COLUMNS]
            lines.append(_line([*row, f"{made.growth:.1f}x", f"{made.state_bytes / 1e9:.1f}"]))
    return lines


def _line(cells: Sequence[str]) -> str:
    widths = (5, 4, 4, 4, 4, 5, *(max(5, len(c)) for c in COLUMNS), 9, 8)
    first, *rest = (
        f"{cell:{'<' if i == 0 else '>'}{width}}" for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join((first, *rest)) + " |"
