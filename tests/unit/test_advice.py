"""The cost model, and what the adviser says and chooses from figures."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron_acco.config import AccoConfig
from megatron_acco.cost_model import Costs
from megatron_acco.zero.advice import LAG, TRIAL, WINDOW, Adviser
from megatron_acco.zero.report import RankFigures, RoundReport
from megatron_acco.zero.schedule import RoundKind


def test_cost_model_is_that_of_the_design() -> None:
    """In units of k c: 1 + r; with an all-reduce 1 + 3r/2, of which 2/(3k) hide; max(1, r); max(1, 2r)."""
    k = 4
    for r in (0.05, 0.3, 0.5, 0.9, 1.0, 2.0, 4.0):
        costs = Costs(compute=1.0 / k, exchange=r)
        assert costs.sync(k) == pytest.approx(1 + r)
        assert costs.zero1(k) == pytest.approx(1 + 1.5 * r)
        assert costs.overlapped_zero1(k) == pytest.approx(1 + max(0, r - 2 / (3 * k)) + r / 2)
        assert costs.delayed(k) == pytest.approx(max(1, r))
        assert costs.acco(k, k // 2) == pytest.approx(max(1, 2 * r))


@pytest.mark.parametrize(("exchange", "steps"), [(0.1, 2), (1.0, 2), (1.01, 4), (2.0, 4), (7.5, 16)])
def test_accumulation_that_hides_the_exchange(exchange: float, steps: int) -> None:
    costs = Costs(compute=1.0, exchange=exchange)
    assert costs.acco_steps_to_hide() == steps
    assert costs.acco(steps, steps // 2) == pytest.approx(costs.compute_only(steps))
    if steps > 2:
        assert costs.acco(steps - 2, steps // 2 - 1) > costs.compute_only(steps - 2)


def test_adaptive_grows_to_the_exchange_within_its_limits() -> None:
    costs = Costs(compute=1.0, exchange=5.5)
    assert costs.adaptive_steps(floor=2, most_per_half=64) == 12
    assert costs.adaptive_steps(floor=20, most_per_half=64) == 20
    assert costs.adaptive_steps(floor=2, most_per_half=3) == 6


# ---- the adviser ----------------------------------------------------------------------------------------------------


def update(
    number: int, mode: str, exchange: float, compute: tuple[float, ...] = (0.25, 0.25), wait: float | None = None
) -> list[RoundReport]:
    """The rounds of one update of 4 micro-batches per rank; `compute` is seconds per micro-batch by rank."""
    halves = [2, 2] if mode == "acco" else [4]
    reports = []
    for index, count in enumerate(halves):
        longest = count * max(compute)
        waits = [wait if wait is not None else max(0.0, exchange - longest) + longest - count * c for c in compute]
        ranks = tuple(
            # The rank that arrives first sees the others' delay in its exchange.
            RankFigures(count, count * c, exchange + longest - count * c, 0.0, 0.0, w)
            for c, w in zip(compute, waits, strict=True)
        )
        kind = RoundKind.ESTIMATE if len(halves) == 2 and index == 0 else RoundKind.COMMIT
        reports.append(RoundReport(number, kind, micro_batches=count * len(compute), by_rank=ranks))
    return reports


def follow(adviser: Adviser, updates: range, exchange: float, **kwargs) -> list[str]:
    """The mode of each update, as a run would ask for it: before the commit of the one before has settled."""
    modes, before = [], []
    for number in updates:
        modes.append(adviser.mode(number).value)
        for report in before:
            adviser.add(report)
        before = update(number, modes[-1], exchange, **kwargs)
    return modes


def line(config: AccoConfig, exchange: float, **kwargs) -> str:
    adviser = Adviser(config)
    follow(adviser, range(WINDOW + 3), exchange, **kwargs)
    lines = adviser.take_lines()
    assert len(lines) == 1, lines
    follow(adviser, range(WINDOW + 3, 2 * WINDOW), exchange, **kwargs)
    assert adviser.take_lines() == [], "the same thing is said once"
    return lines[0]


def test_hidden_communication_is_said_to_be_hidden() -> None:
    text = line(AccoConfig(), exchange=0.4)
    assert "is hidden" in text and "0.4 s" in text and "0.5 s" in text


def test_exposed_communication_comes_with_what_would_hide_it() -> None:
    text = line(AccoConfig(), exchange=0.8)
    assert "not hidden" in text and "gradient_accumulation_steps 8 would hide it (now 4)" in text
    assert '"accumulation": "adaptive"' in text and "sync rounds" not in text


def test_a_link_that_is_too_slow_for_two_exchanges_is_said_to_be_so() -> None:
    text = line(AccoConfig(), exchange=2.0)
    assert "sync rounds are 33% faster" in text and '"fallback": "auto"' in text


def test_a_delayed_mode_needs_compute_for_one_exchange() -> None:
    assert "gradient_accumulation_steps 6 would hide it" in line(AccoConfig.from_dict({"mode": "dpu"}), exchange=1.5)


def test_a_slow_rank_is_named() -> None:
    text = line(AccoConfig(), exchange=0.1, compute=(0.25, 0.5, 0.25))
    assert "data-parallel rank 1 takes 2 times as long" in text and '"adaptive"' in text


def test_adaptive_at_its_limit_is_told_to_raise_it() -> None:
    config = AccoConfig.from_dict({"accumulation": "adaptive", "max_micro_batches_per_half": 2})
    assert '"max_micro_batches_per_half" above 2' in line(config, exchange=0.8)


def test_waited_rounds_are_told_of_overlapped_ones() -> None:
    text = line(AccoConfig.from_dict({"mode": "sync"}), exchange=0.5)
    assert '"mode": "acco" would be 50% faster' in text


def test_warn_changes_nothing() -> None:
    assert set(follow(Adviser(AccoConfig()), range(50), 3.0)) == {"acco"}


def test_fall_back_and_return_at_boundaries_that_all_ranks_know() -> None:
    adviser = Adviser(AccoConfig.from_dict({"fallback": "auto"}))
    modes = follow(adviser, range(20), exchange=2.0)
    # The first update is left out (compilation); the commit of an update settles during the next.
    change = 1 + TRIAL - 1 + LAG
    assert modes == ["acco"] * change + ["sync"] * (20 - change)
    assert adviser.take_lines()[0].startswith(f"fall-back: sync rounds from update {change} on")
    modes = follow(adviser, range(20, 60), exchange=0.2)
    assert modes[-1] == "acco" and modes.count("sync") >= TRIAL
    assert "acco rounds from update" in adviser.take_lines()[0]


def test_adaptive_accumulation_falls_back_only_where_a_micro_batch_gets_cheaper() -> None:
    """4 micro-batches of 0.25 s configured, 16 per update at the limit of 8, T = 3 s: 0.375 s each, 1 s with `sync`."""

    def modes(limit: int, count: int, exchange: float) -> list[str]:
        section = {"accumulation": "adaptive", "fallback": "auto", "max_micro_batches_per_half": limit}
        adviser, seen = Adviser(AccoConfig.from_dict(section), steps=4), []
        for number in range(20):
            seen.append(adviser.mode(number).value)
            acco = seen[-1] == "acco"
            for report in update(number, seen[-1], exchange):
                per_rank = count if acco else 4
                ranks = tuple(RankFigures(per_rank, per_rank * 0.25, exchange, 0.0, 0.0, 0.0) for _ in report.by_rank)
                adviser.add(dataclasses.replace(report, by_rank=ranks))
        return seen

    # By the seconds of whole updates, 6 s against 4 + 3 s and at 5 s 10 against 9, the second would fall back.
    assert set(modes(limit=8, count=8, exchange=3.0)) == {"acco"}
    assert set(modes(limit=8, count=8, exchange=5.0)) == {"acco"}
    # At a limit that leaves no more than the configured halves it is what fixed accumulation is.
    assert modes(limit=2, count=2, exchange=3.0)[-1] == "sync"


def test_a_choice_on_the_edge_comes_to_rest() -> None:
    adviser, modes = Adviser(AccoConfig.from_dict({"fallback": "auto"})), []
    for start in range(0, 2000, 10):
        modes += follow(adviser, range(start, start + 10), exchange=2.0 if start % 20 else 0.2)
    changes = sum(a != b for a, b in itertools.pairwise(modes))
    assert changes < 40


def test_warm_up_and_skipped_updates_are_no_figures() -> None:
    adviser = Adviser(AccoConfig.from_dict({"warmup_updates": 5, "fallback": "auto"}))
    for number in range(5):
        for report in update(number, "sync", 9.0):
            adviser.add(report)
    for number in range(5, 60):
        for report in update(number, "acco", 9.0):
            report.applied = False
            adviser.add(report)
    assert adviser.mode(60).value == "acco" and adviser.take_lines() == []


# ---- the split of an update, and quantized estimates -----------------------------------------------------------------


def test_the_best_split_covers_each_exchange_by_a_half() -> None:
    """k = 5, c = 1: 4 + 1 for exchanges of 3.5 and 0.8 s; equal exchanges, or none to speak of, leave equal halves."""
    assert Costs(1.0, 3.5, estimate=0.8).best_first_half(5) == 4
    assert Costs(1.0, 3.5, estimate=0.8).acco(5, 4) == 5.0
    assert Costs(1.0, 3.0).best_first_half(6) == 3
    assert Costs(1.0, 0.1, estimate=0.1).best_first_half(6) == 3
    assert Costs(1.0, 9.0, estimate=9.0).best_first_half(5) in (2, 3)
    # With slack the same exchange needs more than four micro-batches, and six have five for it.
    assert Costs(1.0, 3.9, estimate=0.5).best_first_half(6) == 4
    assert Costs(1.0, 3.9, estimate=0.5).best_first_half(6, slack=0.1) == 5
    assert Costs(1.0, 3.5, estimate=0.8).acco_steps_to_hide() == 5


def halves(number: int, first: int, steps: int, commit: float, estimate: float, c: float = 0.25) -> list[RoundReport]:
    """The rounds of an update of `steps` micro-batches; each report has the times of the exchange before it."""
    result = []
    for kind, count, exchange in (
        (RoundKind.ESTIMATE, first, commit),
        (RoundKind.COMMIT, steps - first, estimate),
    ):
        ranks = (RankFigures(count, count * c, exchange, 0.0, 0.0, max(0.0, exchange - count * c)),) * 2
        result.append(RoundReport(number, kind, micro_batches=2 * count, by_rank=ranks))
    return result


def splits(config: AccoConfig, times: list[tuple[float, float]], steps: int = 6) -> tuple[list[int], list[str]]:
    """First halves as a run would ask for them, update by update, and what was said."""
    adviser, seen, before = Adviser(config, steps), [], []
    for number, (commit, estimate) in enumerate(times):
        adviser.mode(number)
        seen.append(config.first_half_micro_batches(steps, adviser.fraction(number)))
        for report in before:
            adviser.add(report)
        before = halves(number, seen[-1], steps, commit, estimate)
    return seen, adviser.take_lines()


AUTO = AccoConfig.from_dict({"estimate_fraction": "auto", "estimate_bits": 8})


def test_auto_makes_the_first_half_long_where_the_commit_is() -> None:
    seen, lines = splits(AUTO, [(1.1, 0.2)] * 20)
    change = 1 + TRIAL - 1 + LAG
    assert seen == [3] * change + [5] * (20 - change)
    assert "first half takes 5 of 6 micro-batches (was 3)" in lines[0] and "1.1 s" in lines[0] and "0.2 s" in lines[0]


def test_auto_leaves_alone_what_is_hidden_or_configured() -> None:
    assert set(splits(AUTO, [(0.5, 0.2)] * 20)[0]) == {3}
    assert set(splits(AccoConfig.from_dict({"estimate_bits": 8}), [(1.1, 0.2)] * 20)[0]) == {3}


def test_auto_follows_a_link_and_comes_to_rest() -> None:
    seen, _ = splits(AUTO, [(1.1, 0.2)] * 40 + [(0.2, 1.1)] * 60)
    assert seen[39] == 5 and seen[-1] == 1
    wild, _ = splits(AUTO, [times for _ in range(100) for times in [(1.1, 0.2)] * 10 + [(0.2, 1.1)] * 10])
    assert sum(a != b for a, b in itertools.pairwise(wild)) < 20


def test_an_exposed_exact_exchange_is_told_of_a_quantized_estimate() -> None:
    text = line(AccoConfig(), exchange=0.8)
    assert '"estimate_bits": 8' in text and '"estimate_fraction": "auto"' in text


def test_falling_back_weighs_a_quantized_estimate_by_its_own_time() -> None:
    """T = 0.9 s for the commit, 0.2 s for the estimate, 1.5 s of compute: 1.5 s an update, against 2.4 s waited for."""
    config = AccoConfig.from_dict({"estimate_bits": 8, "estimate_fraction": "auto", "fallback": "auto"})
    adviser = Adviser(config, 6)
    for number in range(40):
        assert adviser.mode(number).value == "acco"
        first = config.first_half_micro_batches(6, adviser.fraction(number))
        for report in halves(number, first, 6, 0.9, 0.2):
            adviser.add(report)
