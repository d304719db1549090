"""Per-token averaging: how much a token's loss weighs in an update, counted one update ahead.

    update             t-1                    |  t                      |  t+1
    read and count     micro-batches of t     |  of t+1                 |  of t+2
    all-reduce            start(t)..........wait   start(t+1).........wait

The engine takes the mean over micro-batches; ranks must know the tokens of a whole update before its first backward.
Counted at its start, that would be a wait for the network, and for the slowest rank, once per update. Hence the
micro-batches of the next update are read in the first half of this one, and their tokens summed beside its compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_acco.training.batches import Batch


class TokenWeights:
    """This rank's micro-batches, update by update, and what a token's loss is to be multiplied by.

    With that factor the engine's mean over the micro-batches of all ranks is the mean over all tokens with loss of the
    update. Which samples an update takes does not change: what was read ahead when a run ends is read again by the run
    that resumes it. All methods are collective, in the order of the updates.
    """

    def __init__(self, batches: Iterator[Batch], micro_batches: int, updates: int, control: dist.ProcessGroup) -> None:
        """Begin; nothing is read yet.

        Args:
            batches: this rank's micro-batches.
            micro_batches: per rank and update.
            updates: whole updates that there are to come; nothing is read beyond them.
            control: group of all ranks.
        """
        self._batches = batches
        self._count = micro_batches
        self._updates = updates
        self._control = control
        self._own: list[Batch] = []
        self._tokens = torch.zeros((), dtype=torch.float64)
        self._work: Any = None

    def take(self) -> tuple[list[Batch], float]:
        """The micro-batches of the next update, and the factor."""
        self.read_ahead(self._count)  # of the first update; later ones have been read
        self.finish()
        own, self._own = self._own, []
        # Every rank of a replica has counted the replica's tokens.
        micro_batches = self._count * dist.get_world_size(self._control)
        return own, micro_batches / max(1.0, float(self._tokens))

    def read_ahead(self, most: int = 2) -> None:
        """Read up to `most` micro-batches of the next update; once all are there, start to sum their tokens.

        Before every micro-batch of an update two are read, so that the sum starts in its first half: a rank then needs
        of a slower one no more than the exchange at that half needs as well.
        """
        missing = self._count - len(self._own) if self._updates else 0
        if not missing:
            return
        self._own += itertools.islice(self._batches, min(most, missing))
        if len(self._own) < self._count:
            return
        self._updates -= 1
        self._tokens = torch.tensor(float(sum(b["loss_mask"].sum() for b in self._own)), dtype=torch.float64)
        self._work = dist.all_reduce(self._tokens, group=self._control, async_op=True)

    def finish(self) -> None:
        """Wait for the sum in flight, if there is one."""
        if self._work is not None:
            self._work.wait()
            self._work = None
