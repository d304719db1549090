"""The cost model: time of one update from compute and exchange times (docs/how-it-works.md). Pure arithmetic.

`c`: compute of one micro-batch; `k`: micro-batches per update and rank; `T`: one reduce-scatter plus all-gather, with
the optimizer's work between them (of an estimate round `estimate`, where it is quantized); `R` and `G`: the all-reduce
and the all-gather of DeepSpeed's ZeRO-1. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Costs:
    """What an update is made of.

    Attributes:
        compute: one micro-batch, `c`.
        exchange: one reduce-scatter, optimizer step and all-gather that everybody waits for, `T`.
        reduction: of DeepSpeed's ZeRO-1, `R`. It averages gradients by all-reduce (`use_multi_rank_bucket_allreduce`,
            on by default), which moves what a reduce-scatter and an all-gather move: None is `T`.
        gathering: of DeepSpeed's ZeRO-1, `G`; None is half of `T`.
        blocking: a collective keeps the thread that calls it waiting (gloo), so that ZeRO-1 overlaps nothing.
        estimate: the exchange of an estimate round, where it is another than a commit's (quantized); None is `T`.
    """

    compute: float
    exchange: float
    reduction: float | None = None
    gathering: float | None = None
    blocking: bool = False
    estimate: float | None = None

    def compute_only(self, steps: int) -> float:
        """An update of `steps` micro-batches without any communication."""
        return steps * self.compute

    def sync(self, steps: int) -> float:
        """Mode `sync`: one exchange that is waited for."""
        return steps * self.compute + self.exchange

    def zero1(self, steps: int) -> float:
        """DeepSpeed's ZeRO-1 with nothing overlapped."""
        return steps * self.compute + self.reduction_seconds + self.gathering_seconds

    def overlapped_zero1(self, steps: int) -> float:
        """DeepSpeed's ZeRO-1 with `overlap_comm`: the all-reduce hides in the last backward, the all-gather does not.

        Backward is taken for two thirds of a micro-batch.
        """
        hidden = 0.0 if self.blocking else min(self.reduction_seconds, 2.0 / 3.0 * self.compute)
        return self.zero1(steps) - hidden

    def zero2(self, steps: int) -> float:
        """DeepSpeed's ZeRO-2 with nothing overlapped: partitioned gradients are reduced after every micro-batch."""
        return steps * (self.compute + self.reduction_seconds) + self.gathering_seconds

    def ddp(self, steps: int) -> float:
        """PyTorch's DDP and ZeroRedundancyOptimizer, accumulating without synchronisation.

        The all-reduce hides in the last backward, on gloo too: its threads, not the caller, do the work. Then every
        rank broadcasts its share of the weights, in all what an all-gather moves.
        """
        return self.zero1(steps) - min(self.reduction_seconds, 2.0 / 3.0 * self.compute)

    def fsdp2(self, steps: int) -> float:
        """PyTorch's `fully_shard`, one all-gather and one reduce-scatter per update.

        It waits for them on gloo, whose reduce-scatter moves what an all-reduce moves; elsewhere both overlap as in
        Megatron's distributed optimizer.
        """
        return self.zero1(steps) if self.blocking else self.megatron(steps)

    def megatron(self, steps: int) -> float:
        """Megatron's distributed optimizer, overlapped.

        The reduce-scatter hides in the last backward, the all-gather in the first forward: two thirds and one third of
        a micro-batch.
        """
        half = self.exchange / 2.0
        if self.blocking:
            return self.sync(steps)
        exposed = max(0.0, half - 2.0 / 3.0 * self.compute) + max(0.0, half - self.compute / 3.0)
        return steps * self.compute + exposed

    @property
    def reduction_seconds(self) -> float:
        """`R`."""
        return self.exchange if self.reduction is None else self.reduction

    @property
    def gathering_seconds(self) -> float:
        """`G`."""
        return self.exchange / 2.0 if self.gathering is None else self.gathering

    def delayed(self, steps: int) -> float:
        """Modes `dpu` and `wp`: one exchange behind the whole next update."""
        return max(steps * self.compute, self.exchange)

    def with_estimate_of(self, bits: int, value_bytes: int) -> Costs:
        """These, with estimates that travel in `bits` bits in the place of `value_bytes` bytes."""
        return replace(self, estimate=self.exchange * quantized_share(bits, value_bytes))

    def acco(self, steps: int, first_half: int | None = None) -> float:
        """Mode `acco`: the commit behind the first half (of half the micro-batches unless given), the estimate behind
        the second."""
        first_half = steps // 2 if first_half is None else first_half
        first, second = first_half * self.compute, (steps - first_half) * self.compute
        return max(first, self.exchange) + max(second, self._estimate)

    def best_first_half(self, steps: int, slack: float = 0.0) -> int:
        """The split of mode `acco` that takes the least time; of those within 0.5 % of it the most even one.

        Args:
            steps: micro-batches per update, two or more.
            slack: share by which the exchanges are taken for longer than they were measured.
        """
        slow = replace(self, exchange=self.exchange * (1.0 + slack), estimate=self._estimate * (1.0 + slack))
        seconds = {first: slow.acco(steps, first) for first in range(1, steps)}
        good = [first for first, time in seconds.items() if time <= 1.005 * min(seconds.values())]
        return min(good, key=lambda first: abs(first - steps / 2))

    def acco_steps_to_hide(self) -> int:
        """Smallest number of micro-batches per update that, split as is best, hides both exchanges of mode `acco`."""
        if self.compute <= 0.0:
            return 2
        return sum(max(1, math.ceil(time / self.compute - 1e-9)) for time in (self.exchange, self._estimate))

    @property
    def _estimate(self) -> float:
        return self.exchange if self.estimate is None else self.estimate

    def adaptive_steps(self, floor: int, most_per_half: int) -> int:
        """Micro-batches per update of `accumulation: adaptive`: halves grow until they cover the exchange."""
        half = min(max(math.ceil(self.exchange / self.compute - 1e-9) if self.compute > 0.0 else 1, 1), most_per_half)
        return max(floor, 2 * half)


METHODS: dict[str, Callable[[Costs, int], float]] = {
    "compute": Costs.compute_only,
    "zero1": Costs.zero1,
    "zero1-overlap": Costs.overlapped_zero1,
    "zero2": Costs.zero2,
    "ddp": Costs.ddp,
    "fsdp2": Costs.fsdp2,
    "megatron": Costs.megatron,
    "sync": Costs.sync,
    "dpu": Costs.delayed,
    "wp": Costs.delayed,  # the second application of the optimizer takes no exchange
    "acco": Costs.acco,
    # A quantized estimate, or one inside a node.
    "acco-coarse": lambda costs, steps: costs.acco(steps, costs.best_first_half(steps)),
    "acco-node": lambda costs, steps: costs.acco(steps, costs.best_first_half(steps)),
    "adaptive": Costs.acco,
    "auto": lambda costs, steps: min(costs.acco(steps), costs.sync(steps)),
}


def update(method: str, costs: Costs, steps: int, most_per_half: int) -> tuple[int, float]:
    """Micro-batches per rank, and seconds, of an update of one of METHODS; all ranks alike.

    Args:
        costs: for `acco-coarse` and `acco-node` with the estimate's exchange.
        steps: micro-batches per rank and update that are configured; two or more for the kinds of `acco`.
        most_per_half: limit of `adaptive`.
    """
    if method == "adaptive":
        steps = costs.adaptive_steps(max(2, steps), most_per_half)
    return steps, METHODS[method](costs, steps)


@dataclass(frozen=True)
class Link:
    """What one rank can send to the others.

    Attributes:
        bandwidth: bytes per second, in each direction at once.
        latency: seconds of one message.
    """

    bandwidth: float
    latency: float = 0.0

    def exchange(self, parameters: float, ranks: int, wire_bytes: int, weight_bytes: int) -> float:
        """Seconds of a reduce-scatter of gradients and an all-gather of weights.

        Each moves (ranks - 1) / ranks of the parameters out of every rank, in ranks - 1 messages.

        Args:
            parameters: number of trainable parameters on each rank (of a tensor-parallel part).
            wire_bytes: of a gradient element as it travels.
            weight_bytes: of a weight.
        """
        share = (ranks - 1) / ranks
        return share * parameters * (wire_bytes + weight_bytes) / self.bandwidth + 2 * (ranks - 1) * self.latency


def quantized_share(bits: int, value_bytes: int, block: int = 256) -> float:
    """Bytes of a quantized exchange, one fp32 scale per block, over those of values of `value_bytes` each."""
    return (bits / 8.0 + 4.0 / block) / value_bytes


def model_state_bytes(
    parameters: float, ranks: int, weight_bytes: int, sum_bytes: int, overlapped: bool, partitioned: bool = False
) -> float:
    """Bytes of weights, gradients, fp32 masters and Adam's moments on one rank.

    Args:
        parameters: number of trainable parameters on each rank.
        ranks: data-parallel ranks.
        weight_bytes: of a weight as compute sees it.
        sum_bytes: of an element of the gradient sum.
        overlapped: ACCO's engine (any mode): a second gradient buffer, in flight, and the kept shard of the first half.
        partitioned: ZeRO-2: a rank keeps its share of the gradients.
    """
    gradients = sum_bytes * (2 if overlapped else 1 / ranks if partitioned else 1)
    return parameters * (weight_bytes + gradients + (12 + (4 if overlapped else 0)) / ranks)
