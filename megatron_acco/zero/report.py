"""What one finished round did, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_acco.zero.schedule import RoundKind


@dataclass
class RoundReport:
    """Figures of one round on one rank. Times are seconds of wall clock.

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
