"""From measured rounds to advice, and to the choice between a mode's rounds and synchronous ones. Pure arithmetic.

Everything here comes from figures that all ranks have in the same bits (`RoundReport.by_rank`), and a choice takes
effect at an update whose predecessors have settled on every rank: all ranks choose the same, without a collective.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_acco.config import ALL, ESTIMATE_BITS, AccoConfig, Fallback, Mode
from megatron_acco.cost_model import Costs
from megatron_acco.zero.report import RoundReport
from megatron_acco.zero.schedule import RoundKind

# Updates that advice rests on.
WINDOW = 20
# Updates that a first choice of rounds rests on; every change doubles it, so that a choice on the edge comes to rest.
TRIAL, LONGEST_TRIAL = 4, 256
# A commit settles during the next update, so its figures can decide about the one after that.
LAG = 2
# Less than this share of the time, waiting is not worth a word.
NEGLIGIBLE = 0.03
# Compute times of ranks that differ by more than this factor are unequal.
UNEQUAL = 1.15
LEAVE_MARGIN, RETURN_MARGIN = 0.97, 0.95
# A split is chosen for exchanges that take a little longer than measured, and changed for a gain of 2 % or more.
SPLIT_SLACK, SPLIT_MARGIN = 0.1, 0.98


@dataclass(frozen=True)
class UpdateFigures:
    """One update. Times are seconds.

    Attributes:
        halves: compute of the slowest rank in each half (one entry where an update has no half boundary).
        micro_batches: micro-batches of the rank with the longest compute.
        exchanges: the exchange beside each half, the shortest that any rank saw; 0 where none was measured. The first
            half runs beside the commit of the update before, the second beside the estimate.
        exposed: waiting of the rank that waited least: for the exchange, not for other ranks.
        rates: seconds per micro-batch, by rank (0 where a rank did none).
    """

    halves: tuple[float, ...]
    micro_batches: int
    exchanges: tuple[float, ...]
    exposed: float
    rates: tuple[float, ...]

    @property
    def compute(self) -> float:
        """Of the whole update."""
        return sum(self.halves)


class Adviser:
    """Follows the rounds of a run."""

    def __init__(self, config: AccoConfig, steps: int = 2) -> None:
        """
        Args:
            config: of the run.
            steps: configured micro-batches per rank and update; with adaptive accumulation the least of them.
        """
        self._config = config
        self.steps = steps
        # Exchange of an estimate over that of a commit.
        self._estimate_share = config.estimate_bits / ESTIMATE_BITS[0]
        self.restart(config.mode)

    def restart(self, mode: Mode, fraction: float | None = None) -> None:
        """Forget all figures; `mode` and the split `fraction` (None: the configured one) are in force from here on."""
        self._mode, self._fraction = mode, fraction
        self._changes: dict[int, Mode] = {}
        self._splits: dict[int, float] = {}
        self._rounds: list[RoundReport] = []
        self._window: deque[UpdateFigures] = deque(maxlen=WINDOW)
        self._trial: deque[UpdateFigures] = deque(maxlen=TRIAL)
        self._verdict = ""
        self._lines: list[str] = []

    def add(self, report: RoundReport) -> None:
        """Take in a settled round."""
        self._rounds.append(report)
        if report.kind is not RoundKind.COMMIT:
            return
        rounds, self._rounds = self._rounds, []
        # The warm-up tells nothing about the mode, and the first updates compile and allocate.
        if report.update < self._config.warmup_updates + 1 or not report.by_rank or not report.applied:
            return
        figures = figures_of(rounds)
        if not all(figures.exchanges) or figures.compute <= 0.0:
            return
        self._window.append(figures)
        self._trial.append(figures)
        self._choose(report.update)
        self._choose_split(report.update)
        if len(self._window) == WINDOW:
            self._advise()

    def mode(self, update: int) -> Mode:
        """The rounds to make update `update` of; asked in order."""
        if update in self._changes:
            self._mode = self._changes.pop(update)
        return self._mode

    def fraction(self, update: int) -> float | None:
        """The chosen share of the first half in update `update`, None for the configured one; asked in order."""
        if update in self._splits:
            self._fraction = self._splits.pop(update)
        return self._fraction

    def take_lines(self) -> list[str]:
        """What there is to say since the last call."""
        lines, self._lines = self._lines, []
        return lines

    # ---- choice -----------------------------------------------------------------------------------------------------

    def _choose(self, update: int) -> None:
        config = self._config
        if config.fallback is not Fallback.AUTO or config.mode is Mode.SYNC or self._changes:
            return
        if len(self._trial) < (self._trial.maxlen or 0):
            return
        waited, hidden = self._predict(self._trial)
        if self._mode is Mode.SYNC:
            wanted = config.mode if hidden < RETURN_MARGIN * waited else Mode.SYNC
        else:
            wanted = Mode.SYNC if waited < LEAVE_MARGIN * hidden else config.mode
        if wanted is self._mode:
            return
        self._changes[update + LAG] = wanted
        self._trial = deque(maxlen=min(2 * (self._trial.maxlen or TRIAL), LONGEST_TRIAL))
        self._window.clear()
        self._verdict = ""
        self._lines.append(
            f"fall-back: {wanted.value} rounds from update {update + LAG} on; an update of mode {config.mode.value} "
            f"takes {hidden:.3g} s, with sync rounds {waited:.3g} s"
        )

    def _choose_split(self, update: int) -> None:
        config, steps = self._config, self.steps
        if not config.auto_fraction or self._mode is not Mode.ACCO or steps < 3 or self._changes or self._splits:
            return
        if len(self._trial) < (self._trial.maxlen or 0):
            return
        costs = self._costs(self._trial)
        now, best = config.first_half_micro_batches(steps, self._fraction), costs.best_first_half(steps, SPLIT_SLACK)
        if costs.acco(steps, best) > SPLIT_MARGIN * costs.acco(steps, now):
            return
        self._splits[update + LAG] = best / steps
        self._trial = deque(maxlen=min(2 * (self._trial.maxlen or TRIAL), LONGEST_TRIAL))
        self._window.clear()
        self._verdict = ""
        self._lines.append(
            f"estimate_fraction: the first half takes {best} of {steps} micro-batches (was {now}) from update "
            f"{update + LAG} on; a commit's exchange takes {costs.exchange:.3g} s, an estimate's "
            f"{costs.estimate:.3g} s, a micro-batch {costs.compute:.3g} s"
        )

    def _costs(self, window: Sequence[UpdateFigures]) -> Costs:
        """Medians over the window. The estimate's exchange, while there is none, is what its bits let expect."""
        compute = statistics.median(figures.compute / max(1, figures.micro_batches) for figures in window)
        exchange = statistics.median(figures.exchanges[0] for figures in window)
        estimates = [figures.exchanges[1] for figures in window if len(figures.exchanges) > 1]
        if estimates and exchange > 0.0:
            self._estimate_share = statistics.median(estimates) / exchange
        return Costs(compute, exchange, estimate=exchange * self._estimate_share)

    def _predict(self, window: Sequence[UpdateFigures]) -> tuple[float, float]:
        """Seconds per update with synchronous rounds, and with the mode's."""
        costs = self._costs(window)
        if self._config.adaptive:
            return self._predict_adaptive(costs)
        compute = statistics.median(figures.compute for figures in window)
        if self._config.auto_fraction and self._config.mode is Mode.ACCO:
            # The split would follow.
            return compute + costs.exchange, costs.acco(self.steps, costs.best_first_half(self.steps))
        return compute + costs.exchange, self._mode_time(self._halves(window), costs)

    def _predict_adaptive(self, costs: Costs) -> tuple[float, float]:
        """As `_predict`, for the micro-batches of the configured update.

        An adaptive update has more of them than a synchronous one: what can be compared is the time of each.
        """
        config, parts = self._config, [self.steps]
        if config.mode is Mode.ACCO:
            first = config.first_half_micro_batches(self.steps, self._fraction)
            parts = [first, self.steps - first]
        covers = [math.ceil(seconds / costs.compute - 1e-9) for seconds in _exchanges(costs)]
        most = config.max_micro_batches_per_half
        counts = [max(least, min(most, cover)) for least, cover in zip(parts, covers, strict=False)]
        hidden = self._mode_time([count * costs.compute for count in counts], costs)
        return costs.sync(self.steps), hidden * self.steps / sum(counts)

    def _halves(self, window: Sequence[UpdateFigures]) -> tuple[float, ...]:
        last = window[-1]
        if self._config.mode is not Mode.ACCO:
            return (statistics.median(figures.compute for figures in window),)
        if len(last.halves) == 2:
            return tuple(statistics.median(h[i] for h in (f.halves for f in window) if len(h) == 2) for i in (0, 1))
        compute = statistics.median(figures.compute for figures in window)
        first = self._config.first_half_micro_batches(last.micro_batches, self._fraction)
        share = first / max(1, last.micro_batches)
        return share * compute, (1.0 - share) * compute

    def _mode_time(self, halves: Sequence[float], costs: Costs) -> float:
        return sum(max(half, exchange) for half, exchange in zip(halves, _exchanges(costs), strict=False))

    # ---- advice -----------------------------------------------------------------------------------------------------

    def _advise(self) -> None:
        verdict, text = self._judge()
        if verdict != self._verdict:
            self._verdict = verdict
            self._lines.append(f"advice after {WINDOW} updates: {text}")

    def _judge(self) -> tuple[str, str]:
        window, config = list(self._window), self._config
        compute = statistics.median(figures.compute for figures in window)
        exposed = statistics.median(figures.exposed for figures in window)
        steps = max(1, round(statistics.median(figures.micro_batches for figures in window)))
        costs = replace(self._costs(window), compute=compute / steps)
        share = exposed / (compute + exposed)
        halves = self._halves(window)
        unlike = len(halves) == 2 and (config.coarse or config.estimating_ranks != ALL)
        covers = (
            f"an exchange takes {costs.exchange:.3g} s, "
            + (f"an estimate's {costs.estimate:.3g} s, " if unlike else "")
            + (
                f"the halves of an update compute {halves[0]:.3g} s and {halves[1]:.3g} s"
                if len(halves) == 2
                else f"an update computes {compute:.3g} s"
            )
        )
        unequal = self._unequal(window)
        if self._mode is Mode.SYNC:
            if config.mode is not Mode.SYNC:
                return "fallen back", f"sync rounds are waited for, and still the faster choice: {covers}"
            first = config.first_half_micro_batches(steps)
            gain = costs.sync(steps) / costs.acco(steps, first) - 1.0 if steps > 1 else 0.0
            if gain > NEGLIGIBLE:
                return "sync", f'{covers}; "mode": "acco" would be {gain:.0%} faster'
            return "sync", covers
        if share < NEGLIGIBLE and not unequal:
            return "hidden", f"communication is hidden: {covers}, waiting is {share:.1%} of the time"
        if share < NEGLIGIBLE or (unequal and not config.adaptive):
            if config.adaptive:
                return "hidden", f"communication is hidden: {covers}, waiting is {share:.1%} of the time; {unequal}"
            return "unequal", f'{unequal}; "accumulation": "adaptive" lets each do what it can in the same time'
        return "exposed", f"communication is not hidden: {covers}, waiting is {share:.0%} of the time; " + self._remedy(
            costs, halves, steps
        )

    def _remedy(self, costs: Costs, halves: Sequence[float], steps: int) -> str:
        config = self._config
        if config.adaptive:
            return f'raise "max_micro_batches_per_half" above {config.max_micro_batches_per_half}'
        whole = math.ceil(costs.exchange / costs.compute - 1e-9)
        needed = costs.acco_steps_to_hide() if config.mode is Mode.ACCO else whole
        hidden = self._mode_time(halves, costs)
        text = f"gradient_accumulation_steps {needed} would hide it (now {steps})"
        if config.mode is Mode.ACCO:
            text += ', or "accumulation": "adaptive"'
            if not config.coarse:
                text += ', or a quantized estimate ("estimate_bits": 8 with "estimate_fraction": "auto")'
        if costs.sync(steps) < LEAVE_MARGIN * hidden:
            gain = hidden / costs.sync(steps) - 1.0
            text += f'; at this batch size sync rounds are {gain:.0%} faster ("fallback": "auto" takes them)'
        return text

    def _unequal(self, window: Sequence[UpdateFigures]) -> str:
        """A sentence about the slowest rank, empty if all are about as fast."""
        columns = zip(*(figures.rates for figures in window), strict=True)
        rates = [statistics.median(seen) if (seen := [r for r in column if r > 0.0]) else 0.0 for column in columns]
        known = [rate for rate in rates if rate > 0.0]
        if not known or max(known) < UNEQUAL * min(known):
            return ""
        slow = rates.index(max(known))
        return (
            f"data-parallel rank {slow} takes {max(known) / min(known):.2g} times as long for a micro-batch as rank "
            f"{rates.index(min(known))} ({max(known):.3g} s)"
        )


def _exchanges(costs: Costs) -> tuple[float, float]:
    return costs.exchange, costs.exchange if costs.estimate is None else costs.estimate


def figures_of(rounds: Sequence[RoundReport]) -> UpdateFigures:
    """The figures of one update from its rounds, in order."""
    by_rank = list(zip(*(report.by_rank for report in rounds), strict=True))
    compute = [sum(part.compute_seconds for part in parts) for parts in by_rank]
    counts = [sum(part.micro_batches for part in parts) for parts in by_rank]
    waits = [sum(part.wait_seconds for part in parts) for parts in by_rank]
    slowest = compute.index(max(compute))
    return UpdateFigures(
        halves=tuple(max(part.compute_seconds for part in report.by_rank) for report in rounds),
        micro_batches=counts[slowest],
        exchanges=tuple(min(part.exchange_seconds for part in report.by_rank) for report in rounds),
        exposed=min(waits),
        rates=tuple(seconds / count if count else 0.0 for seconds, count in zip(compute, counts, strict=True)),
    )
