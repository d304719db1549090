"""How long the ranks of a simulated cluster compute: given by a mean and a spread, or measured in a run."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from megatron_acco.report.runs import Run
from megatron_acco.timeline import COMPUTE

Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class ComputeTimes:
    """Forward and backward of micro-batches. Times are seconds.

    A micro-batch takes the mean of its rank times a random factor, and the pauses that fall into it.

    Attributes:
        mean: of a micro-batch, of ranks that are not slow.
        spread: standard deviation of the random factor (lognormal, of mean 1).
        factors: measured ones, to draw from in the place of `spread`.
        speeds: measured means of ranks over `mean`; ranks beyond their number draw from them.
        slow_share: share of the ranks that are slow, rounded to whole ranks, one at least.
        slow_factor: how much longer these take.
        pause_every: seconds of computing between two pauses of a rank, on average; infinite: none.
        pause: how long one lasts.
    """

    mean: float
    spread: float = 0.0
    factors: tuple[float, ...] = ()
    speeds: tuple[float, ...] = (1.0,)
    slow_share: float = 0.0
    slow_factor: float = 1.0
    pause_every: float = math.inf
    pause: float = 0.0

    def means(self, ranks: int, random: numpy.random.Generator) -> Array:
        """Mean of every rank, without pauses, [ranks]."""
        speeds = numpy.array(self.speeds)
        if ranks != len(speeds):
            speeds = random.choice(speeds, ranks) if len(speeds) > 1 else numpy.repeat(speeds, ranks)
        slow = max(1, round(self.slow_share * ranks)) if self.slow_share > 0.0 else 0
        speeds[ranks - slow :] *= self.slow_factor
        return self.mean * speeds

    def draw(self, means: Array, count: int, random: numpy.random.Generator) -> Array:
        """Times of `count` micro-batches of every rank, [ranks, count]."""
        shape = len(means), count
        if self.factors:
            times = means[:, None] * random.choice(numpy.array(self.factors), shape)
        elif self.spread > 0.0:
            sigma = math.sqrt(math.log1p(self.spread**2))
            times = means[:, None] * random.lognormal(-0.5 * sigma**2, sigma, shape)
        else:
            times = numpy.repeat(means[:, None], count, axis=1)
        if self.pause > 0.0 and math.isfinite(self.pause_every):
            times = times + self.pause * random.poisson(times / self.pause_every)
        return times


def measured(run: Run) -> ComputeTimes:
    """Those of a run: the means of its ranks from its log, or else its profile, which also has every micro-batch.

    Raises:
        ValueError: it has recorded neither.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    for span in run.spans:
        if span.row == COMPUTE and span.seconds > 0.0:
            by_rank[span.rank].append(span.seconds)
    profiled = {rank: float(numpy.mean(by_rank[rank])) for rank in sorted(by_rank)}
    factors = [seconds / mean for rank, mean in profiled.items() for seconds in by_rank[rank]]
    means = _means_of_the_log(run) or list(profiled.values())
    if not means:
        raise ValueError(
            f"{run.folder}: no compute times are recorded there; runs with the acco section record them by rank, and "
            "with --profile-rounds for every micro-batch"
        )
    mean = float(numpy.mean(means))
    return ComputeTimes(mean, factors=tuple(factors), speeds=tuple(m / mean for m in means))


def _means_of_the_log(run: Run) -> list[float]:
    """Seconds of a micro-batch on every rank, over the records with as many ranks as the last."""
    seconds: list[list[float]] = []
    counts: list[list[float]] = []
    for record in run.records.train:
        micro_batches, compute = record.numbers("micro_batches_by_rank"), record.numbers("compute_ms_by_rank")
        if len(micro_batches) == len(compute) and min(micro_batches, default=0.0) > 0.0 and sum(compute) > 0.0:
            # The log has compute per round, and the mean per micro-batch: hence the rounds.
            rounds = record.number("compute_ms_per_micro_batch") * sum(micro_batches) / sum(compute)
            seconds.append([1e-3 * rounds * ms for ms in compute])
            counts.append(micro_batches)
    ranks = len(counts[-1]) if counts else 0
    sums = [
        numpy.sum([values for values in table if len(values) == ranks], axis=0) if ranks else numpy.zeros(0)
        for table in (seconds, counts)
    ]
    means = [float(value) for value in sums[0] / sums[1]] if ranks else []
    return means if all(math.isfinite(mean) and mean > 0.0 for mean in means) else []
