"""What one finished round did, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_acco.zero.schedule import RoundKind


@dataclass(frozen=True)
class RankFigures:
    """What one data-parallel rank told the others in a round (tensor-parallel ranks: their mean). Times are seconds.

    Attributes:
        micro_batches: micro-batches of the half that the round took over.
        compute_seconds: their forward and backward passes.
        reduce_scatter_seconds, optimizer_seconds, all_gather_seconds: the rank's time in the lane of the round before.
        wait_seconds: the time that the round before kept the rank's compute waiting.
    """

    micro_batches: int
    compute_seconds: float
    reduce_scatter_seconds: float
    optimizer_seconds: float
    all_gather_seconds: float
    wait_seconds: float

    @property
    def exchange_seconds(self) -> float:
        """The whole round before. Only the last rank to arrive sees its true length: take the smallest of all ranks."""
        return self.reduce_scatter_seconds + self.optimizer_seconds + self.all_gather_seconds


@dataclass
class RoundReport:
    """Figures of one round on one rank. Times are seconds; on accelerators, of the device.

    Attributes:
        update: 0-based number of the update the round belongs to.
        kind: estimate or commit.
        micro_batches: micro-batches in the round's averaged gradient, summed over the data-parallel ranks (for a
            commit in mode acco: both halves).
        grad_norm: L2 norm of the averaged gradient before clipping, over all ranks and groups.
        applied: False if the gradient was not finite or empty, so that the update was skipped.
        learning_rate: learning rate of the first parameter group, as captured at launch.
        reduce_scatter_seconds, optimizer_seconds, all_gather_seconds: parts of the lane's time.
        seconds: lane time of the whole round.
        wait_seconds: time the main thread was blocked for the round (exposed).
        bytes_sent: payload bytes that this rank sent to other ranks.
        compute_seconds: forward and backward passes of this rank's micro-batches since the round before.
        by_rank: figures of every data-parallel rank, the same on all ranks. Those of an estimate among some of the
            ranks (whose `micro_batches` and `grad_norm` are theirs) come with the commit.
        has_halves: the round is of an update with an estimate and a commit.
        compute_spans: (start, end) of each of those micro-batches, marks of the lane's clock.
        lane_marks: start, end of the reduce-scatter, of the optimizer, of the all-gather; marks of the lane's clock.
    """

    update: int
    kind: RoundKind
    micro_batches: int = 0
    grad_norm: float = 0.0
    applied: bool = True
    learning_rate: float = 0.0
    reduce_scatter_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    all_gather_seconds: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_sent: int = 0
    compute_seconds: float = 0.0
    by_rank: tuple[RankFigures, ...] = ()
    has_halves: bool = False
    compute_spans: tuple[tuple[Any, Any], ...] = field(default=(), repr=False)
    lane_marks: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def communication_seconds(self) -> float:
        """Time of the two exchanges."""
        return self.reduce_scatter_seconds + self.all_gather_seconds

    @property
    def hidden_share(self) -> float:
        """Share of the round's lane time that compute covered, 0 to 1."""
        if self.seconds <= 0.0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.wait_seconds / self.seconds))
