"""Rounds and phases as data. Pure Python: no torch, no DeepSpeed.

A *round* is one exchange in the lane plus the compute beside it. What goes into a round (what is summed, what is
kept, which weights are shown afterwards) is described by `RoundSpec`; the optimizer carries it out without knowing
the mode. A new kind of round is a new `RoundSpec`.

Timeline of one update in mode `acco` (theta~ is an estimate of theta, available half an update earlier):

    compute   | first half at theta~_t | second half at theta_t   | first half at theta~_{t+1} |
    lane      | commit -> theta_t      | estimate -> theta~_{t+1} | commit -> theta_{t+1}      |
    boundary                           ^ half                     ^ full
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_acco.config import AccoConfig, Mode


class RoundKind(StrEnum):
    """An estimate round ends the first half of an update, a commit round ends the update."""

    ESTIMATE = "estimate"
    COMMIT = "commit"


class Apply(StrEnum):
    """What the optimizer does with the averaged gradient of a round."""

    LOOK_AHEAD = "look_ahead"
    """Write Opt(theta, S, g) to the shown weights; theta and S are not changed."""
    STEP = "step"
    """(theta, S) <- Opt(theta, S, g); show theta."""
    STEP_THEN_LOOK_AHEAD = "step_then_look_ahead"
    """(theta, S) <- Opt(theta, S, g); show Opt(theta, S, g), a second application with the same gradient."""


@dataclass(frozen=True)
class RoundSpec:
    """One kind of round.

    Attributes:
        kind: estimate or commit.
        apply: which optimizer application the round makes.
        keep: the reduced gradient shard stays (fp32, 1/N of the parameters) and is added to the next commit.
        coarse: gradients and weights travel quantized. The round works on a copy of the local gradient sums, which
            stay where they are and go on accumulating, so that the commit reduces the whole update's exactly.
        add_kept: the kept shard, if there is one, and the micro-batch count of the half are added to this round's.
        overlapped: compute goes on while the round runs; otherwise the main thread waits for it at once.
    """

    kind: RoundKind
    apply: Apply
    keep: bool = False
    coarse: bool = False
    add_kept: bool = False
    overlapped: bool = True

    @property
    def shows_real_parameters(self) -> bool:
        """Whether the weights gathered by the round are theta (and can be gathered again from the masters)."""
        return self.apply is Apply.STEP


ESTIMATE = RoundSpec(RoundKind.ESTIMATE, Apply.LOOK_AHEAD, keep=True)
COARSE_ESTIMATE = RoundSpec(RoundKind.ESTIMATE, Apply.LOOK_AHEAD, coarse=True)
COMMIT = RoundSpec(RoundKind.COMMIT, Apply.STEP, add_kept=True)
DELAYED = RoundSpec(RoundKind.COMMIT, Apply.STEP)
PREDICTED = RoundSpec(RoundKind.COMMIT, Apply.STEP_THEN_LOOK_AHEAD)
WAITED = RoundSpec(RoundKind.COMMIT, Apply.STEP, overlapped=False)


@dataclass(frozen=True)
class UpdatePlan:
    """The rounds of one update.

    Attributes:
        first_half: micro-batches per rank before the half boundary (the least of them, if accumulation is adaptive);
            None if the update has no half boundary.
        half: the round launched at the half boundary, None if there is none.
        full: the round launched at the full boundary.
    """

    first_half: int | None
    half: RoundSpec | None
    full: RoundSpec


_FULL_ROUND = {Mode.ACCO: COMMIT, Mode.DPU: DELAYED, Mode.WP: PREDICTED, Mode.SYNC: WAITED}


def plan_update(
    config: AccoConfig, update: int, accumulation_steps: int, mode: Mode | None = None, fraction: float | None = None
) -> UpdatePlan:
    """The rounds of update number `update` (0-based, counted over the whole training, restarts included).

    Args:
        mode: what is asked for instead of the config's (fall-back).
        fraction: the first half's share, as chosen from measurements (`estimate_fraction` "auto").
    """
    mode = Mode.SYNC if update < config.warmup_updates else mode or config.mode
    if mode is Mode.ACCO:
        estimate = COARSE_ESTIMATE if config.coarse else ESTIMATE
        return UpdatePlan(config.first_half_micro_batches(accumulation_steps, fraction), estimate, COMMIT)
    return UpdatePlan(None, None, _FULL_ROUND[mode])
