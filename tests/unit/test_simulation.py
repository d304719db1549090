"""`megatron-acco plan --simulate` against the cost model, an event queue written the plain way, and measured runs."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from megatron_acco.cli.main import main
from megatron_acco.cli.simulate import NAMES, formula
from megatron_acco.cost_model import Costs, Link
from megatron_acco.report.runs import read_runs
from megatron_acco.simulation.compute_times import ComputeTimes, measured
from megatron_acco.simulation.links import Cluster
from megatron_acco.simulation.rounds import HALVES, METHODS, Setting, play
from megatron_acco.simulation.sizes import COLUMNS, SIZES, Assumptions, cell
from megatron_acco.timeline import Span, write_trace
from tests.unit.test_report import train, write_run

WAITING = [method for method in METHODS if method not in ("compute", "adaptive")]
OVERLAPPED = Costs(0.0, 1.5, 1.6, 0.8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("blocking", [False, True])
def test_equal_ranks_without_spread_take_the_time_of_the_cost_model(method: str, blocking: bool) -> None:
    """Also the batch that adaptive accumulation arrives at, with and without its limit."""
    for k in (1, 2, 5, 8):
        for exchange in (0.0, 0.1, 0.9, 1.0, 7.3, 40.0):
            if method in HALVES and k == 1:
                continue
            costs = Costs(1.0, exchange, 1.3 * exchange, 0.6 * exchange, blocking)
            nodes = {"per_node": 2, "inside": 0.7 * exchange}
            setting = Setting(4, k, ComputeTimes(1.0), costs, most_per_half=16, updates=4, **nodes)
            played = play(method, setting)
            assert played.seconds == pytest.approx(formula(method, setting)), (k, exchange)
            steps = costs.adaptive_steps(max(2, k), 16) if method == "adaptive" else k
            assert played.micro_batches == steps
            assert played.exposed == pytest.approx(formula(method, setting) - steps, abs=1e-9) and played.waiting < 1e-9


def queue(steps: int, halves: bool, adaptive: bool, rates: list[float], exchange: float, updates: int) -> list[float]:
    """When each exchange ended, by an event queue over single micro-batches: an oracle without vectors."""
    ranks = range(len(rates))
    least = [steps // 2, steps - steps // 2] if halves else [steps]
    events = [(rates[rank], rank) for rank in ranks]
    count, part, handed, ends = [0 for _ in ranks], [0 for _ in ranks], {}, [0.0]  # the 0th is "nothing in flight"
    waiting: dict[int, float] = {}

    def hand_over(rank: int, now: float) -> None:
        handed.setdefault(part[rank], []).append(now)
        part[rank], count[rank] = part[rank] + 1, 0
        heapq.heappush(events, (now + rates[rank], rank))
        if len(handed[part[rank] - 1]) == len(rates):
            ends.append(max(handed[part[rank] - 1]) + exchange)
            for other in [r for r in waiting if part[r] == len(ends) - 1]:
                hand_over(other, max(waiting.pop(other), ends[-1]))

    while len(ends) <= updates * len(least):
        now, rank = heapq.heappop(events)
        count[rank] += 1
        known = len(ends) > part[rank]
        if count[rank] < least[part[rank] % len(least)] or (adaptive and (not known or now < ends[part[rank]] - 1e-9)):
            heapq.heappush(events, (now + rates[rank], rank))
        elif known:
            hand_over(rank, max(now, ends[part[rank]]))
        else:
            waiting[rank] = now
    return ends[1:]


@pytest.mark.parametrize("exchange", [0.3, 2.0, 11.0])
@pytest.mark.parametrize("method", ["dpu", "acco", "adaptive"])
def test_ranks_of_unequal_speed_as_an_event_queue_has_them(method: str, exchange: float) -> None:
    rates = [1.0, 1.7, 0.6, 2.3]
    setting = Setting(4, 5, ComputeTimes(1.0, speeds=tuple(rates)), Costs(1.0, exchange), 10_000, updates=200)
    played = play(method, setting)
    ends = queue(5, method != "dpu", method == "adaptive", rates, exchange, 203)
    rounds = 1 if method == "dpu" else 2
    expected = (ends[-1] - ends[3 * rounds - 1]) / 200
    # The clock of an update is its exchange here and the ranks' mean there: a micro-batch apart at either end.
    assert played.seconds.mean() == pytest.approx(expected, rel=2e-3)


def rate(method: str, ranks: int = 16, **times: float) -> float:
    """Micro-batches per second and rank of k = 8, T = 1.5."""
    played = play(method, Setting(ranks, 8, ComputeTimes(1.0, **times), OVERLAPPED, updates=100))
    return played.rate / ranks


@pytest.mark.parametrize("method", WAITING)
def test_spread_stragglers_and_more_ranks_only_make_it_slower(method: str) -> None:
    """Of the rules where ranks wait for each other."""
    rates = [rate(method, spread=spread) for spread in (0.0, 0.05, 0.3)]
    assert rates[0] > rates[1] > rates[2]
    assert rate(method, ranks=64, spread=0.3) < rates[2]
    slow = [rate(method, slow_share=0.05, slow_factor=factor) for factor in (1.0, 1.5, 4.0)]
    assert slow[0] == pytest.approx(rates[0]) and slow[0] > slow[1] > slow[2]
    assert slow[2] < 1.05 / 4.0  # all go at the pace of the one slow rank
    assert rate(method, pause_every=50.0, pause=5.0) < rate("compute", pause_every=50.0, pause=5.0) < 1.0


def test_adaptive_hides_stragglers_and_pauses() -> None:
    for times in ({"slow_share": 0.2, "slow_factor": 3.0}, {"pause_every": 20.0, "pause": 8.0}, {"spread": 0.5}):
        alone = rate("compute", **times)
        assert rate("adaptive", **times) == pytest.approx(alone, rel=0.02)
        assert rate("acco", **times) < 0.9 * alone


def test_waiting_is_told_from_exposed_communication() -> None:
    """A rank of a third of the speed: nothing is exposed, and the others wait two thirds of the time."""
    times = ComputeTimes(1.0, slow_share=0.01, slow_factor=3.0)
    played = play("acco", Setting(64, 8, times, OVERLAPPED, updates=20))
    assert played.exposed == pytest.approx(0.0) and played.waiting == pytest.approx(16.0 * 63 / 64)
    played = play("sync", Setting(64, 8, times, OVERLAPPED, updates=20))
    assert played.exposed == pytest.approx(1.5) and played.waiting == pytest.approx(16.0 * 63 / 64)


def test_times_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    random = numpy.random.default_rng(0)
    times = ComputeTimes(2.0, spread=0.25)
    drawn = times.draw(times.means(100, random), 2000, random)
    assert drawn.shape == (100, 2000) and drawn.mean() == pytest.approx(2.0, rel=5e-3)
    assert drawn.std() == pytest.approx(0.5, rel=0.02)
    paused = ComputeTimes(2.0, pause_every=10.0, pause=3.0).draw(numpy.full(100, 2.0), 2000, random)
    assert paused.mean() == pytest.approx(2.0 * 1.3, rel=0.01)
    means = ComputeTimes(2.0, slow_share=0.1, slow_factor=4.0).means(10, random)
    assert list(means) == [2.0] * 9 + [8.0]


def test_compute_times_of_a_run(tmp_path: Path) -> None:
    """The log has rank 0 do 3 micro-batches of 25 ms in a round, rank 1 two of 40; the profile adds how they vary."""
    mean = (3 * 75.0 + 3 * 80.0) / 15  # three rounds: 9 and 6 micro-batches
    records = [train(i, micro_batches_by_rank=[9, 6], compute_ms_per_micro_batch=31.0) for i in (1, 2)]
    assert mean == 31.0
    folder = write_run(tmp_path / "run", records)
    times = measured(read_runs([str(folder)])[0])
    assert times.mean * numpy.array(times.speeds) == pytest.approx([0.025, 0.040]) and not times.factors
    spans = [Span(0, "compute", "first half", i, seconds, 0, "estimate") for i, seconds in enumerate((1.0, 3.0))]
    write_trace([*spans, Span(0, "lane", "optimizer", 0.0, 9.0, 0, "estimate")], folder / "rounds.json")
    times = measured(read_runs([str(folder)])[0])
    assert times.factors == (0.5, 1.5) and times.mean == pytest.approx(0.0325)
    random = numpy.random.default_rng(0)
    assert set(times.draw(numpy.ones(1), 50, random)[0]) == {0.5, 1.5}
    assert set(times.means(64, random).round(6)) == {0.025, 0.040}
    bare = write_run(tmp_path / "bare", [train(1, micro_batches_by_rank=[], compute_ms_by_rank=[])])
    with pytest.raises(ValueError, match="no compute times are recorded there"):
        measured(read_runs([str(bare)])[0])


# ---- links ----------------------------------------------------------------------------------------------------------

FAST, SLOW = Link(400e9, 3e-6), Link(12.5e9, 20e-6)


def test_a_rank_per_node_is_the_flat_link_of_the_cost_model() -> None:
    costs = Cluster(16, 1, FAST, SLOW).costs(1.3e9, 2, 4, 0.25)
    assert costs.exchange == pytest.approx(SLOW.exchange(1.3e9, 16, 2, 4))
    assert costs.reduction == pytest.approx(2 * SLOW.exchange(1.3e9, 16, 2, 0) - 30 * SLOW.latency)
    assert Cluster(1, 8, FAST, SLOW).costs(1e9, 2, 2, 1.0).exchange == 0.0


def test_nodes_share_their_network() -> None:
    """The bytes of a ring enter each node once, whatever the number of its ranks; by levels, a node's part of them."""
    ring = Cluster(64, 8, FAST, SLOW).one_pass(10e9)
    assert ring == pytest.approx(63 / 64 * 10e9 / 12.5e9 + 56 * 3e-6 + 7 * 20e-6)
    levels = Cluster(64, 8, FAST, SLOW, hierarchical=True).one_pass(10e9)
    assert levels == pytest.approx(7 / 8 * 10e9 / 400e9 + 7 * 3e-6 + 7 / 8 * 10e9 / 12.5e9 + 7 * 20e-6)
    many = [Cluster(4096, 8, FAST, SLOW, hierarchical).one_pass(1e3) for hierarchical in (False, True)]
    assert many == pytest.approx([3584 * 3e-6 + 511 * 20e-6, 7 * 3e-6 + 511 * 20e-6], rel=1e-4)  # messages only
    for hierarchical in (False, True):
        one_each = Cluster(16, 1, FAST, SLOW, hierarchical).one_pass(1e9)
        assert one_each == pytest.approx(15 / 16 * 1e9 / 12.5e9 + 15 * 20e-6)
    inside = Cluster(8, 8, FAST, SLOW).one_pass(1e9)
    assert inside == pytest.approx(7 / 8 * 1e9 / 400e9 + 7 * 3e-6)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8"):
        Cluster(12, 8, FAST, SLOW)


# ---- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shaped:
    """Turns of benchmarks/compare: seconds of a micro-batch on every rank, of the collectives, tokens per second."""

    options: str
    steps: int
    compute: tuple[float, ...]
    collectives: tuple[float, float | None, float | None]
    tokens_per_second: dict[str, float]
    tokens: int = 2048


# Compute is that of the turns without communication, the collectives were measured alone (docs/PERFORMANCE.md).
SHAPED = (
    Shaped(
        "--r 0.45 --gas 4",
        4,
        (0.405, 0.406),
        (0.713, 0.713, 0.363),
        {"zero1": 5660, "zero1-overlap": 5712, "sync": 6998, "dpu": 9918, "acco": 9661, "adaptive": 9466},
    ),
    Shaped("--r 1 --gas 2 --cpu 1.0 0.5", 2, (0.398, 0.822), (0.801, 0.803, 0.404),
           {"sync": 3356, "acco": 4833, "adaptive": 7334}),
    Shaped("--hosts 4 --cpu 0.5 --r 0.6 --gas 2", 2, (0.874, 0.858, 0.865, 0.868), (0.595, 0.630, 0.338),
           {"zero1": 6341, "sync": 6759, "acco": 8215, "adaptive": 8631}),
    Shaped("--hosts 4 --cpu 0.5 --micro-batch-size 8 --r 0.6 --gas 2", 2, (1.739, 1.707, 1.737, 1.701),
           (3.011, 2.122, 0.996), {"sync": 5592, "acco": 6258}, 4096),
    # docs/RESULTS.md gives r and the tokens per second of compute; ZeRO-1's collectives are not in it.
    Shaped("RESULTS, --r 0.45", 4, (0.3813,) * 2, (0.534, None, None), {"sync": 7907, "dpu": 10543, "acco": 10072}),
    Shaped("RESULTS, --r 0.45", 4, (0.3807,) * 2, (0.883, None, None), {"acco": 10014}),
    Shaped("RESULTS, --r 2 --gas 2", 2, (0.3783,) * 2, (1.513, None, None), {"adaptive": 10130}),
    Shaped("RESULTS, --r 4 --gas 2", 2, (0.3838,) * 2, (2.833, None, None), {"adaptive": 10503}),
)  # fmt: skip


@pytest.mark.parametrize("run", SHAPED, ids=lambda run: run.options)
def test_runs_on_shaped_links_are_met_within_15_percent(run: Shaped) -> None:
    mean = sum(run.compute) / len(run.compute)
    times = ComputeTimes(mean, speeds=tuple(seconds / mean for seconds in run.compute))
    setting = Setting(len(run.compute), run.steps, times, Costs(mean, *run.collectives, blocking=True), 256)
    for method, measured_rate in run.tokens_per_second.items():
        simulated = play(method, setting).rate * run.tokens
        assert simulated == pytest.approx(measured_rate, rel=0.15), method


# ---- the command ----------------------------------------------------------------------------------------------------

WORDS = (
    "plan --simulate --parameters 1.3e9 --ranks 16 --micro-batches 8 --compute-ms 250 --tokens 8192 "
    "--bandwidth-gbit 25 --updates 20"
).split()


def rows(output: str) -> dict[str, list[str]]:
    """The words of every line behind the first."""
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def test_the_command_prints_a_row_per_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--spread", "0"]) == 0
    output = capsys.readouterr().out
    assert "16 ranks, 8 micro-batches per rank and update of 250.0 ms (spread 0.0%)" in output and "r = 0.78" in output
    found = rows(output)
    names = [NAMES.get(method, method) for method in METHODS]
    assert set(found) >= set(names)
    for method in names:
        assert float(found[method][1]) == float(found[method][-1]), "without spread: the formula"
    assert main([*WORDS, "--ranks-per-node", "8", "--slow-share", "0.1", "--pause-every", "60", "--pause", "2"]) == 0
    slow = rows(capsys.readouterr().out)
    # One link for the eight ranks of a node, and two slow ranks.
    assert float(slow["sync"][1]) > 4.0 + 1.5 and float(slow["adaptive"][-2].rstrip("%")) < 3.0


def test_compute_times_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [train(1, micro_batches_by_rank=[9, 6], compute_ms_per_micro_batch=31.0)])
    words = [word for word in WORDS if word not in ("--compute-ms", "250")] + ["--compute-from", str(folder)]
    assert main(words) == 0 and "of 32.5 ms (spread 3.0%)" in capsys.readouterr().out
    assert main([*words, "--spread", "0.2"]) == 0 and "of 32.5 ms (spread 20.0%)" in capsys.readouterr().out
    assert main([*words, "--compute-ms", "5"]) == 2
    assert "--compute-from gives the compute times; leave out --compute-ms" in capsys.readouterr().err


def test_estimates_inside_nodes_wait_for_a_nodes_ranks_only() -> None:
    times, costs = ComputeTimes(1.0, spread=0.8), Costs(1.0, 0.5)
    rates = [play("acco-node", Setting(32, 2, times, costs, per_node=n, inside=0.2)).rate for n in (2, 8, 32)]
    assert rates[0] > rates[1] > rates[2]


def test_the_table_of_model_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", "--table"]) == 0
    output = capsys.readouterr().out
    assert "4096 tokens per GPU and micro-batch" in output and "395 TFLOP/s" in output
    table = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 8 * 4 and {len(line) for line in table} == {15}
    # A slower network never helps, and adaptive accumulation keeps compute busy on all of them.
    for size in SIZES:
        cells = [cell(size, rate, Assumptions(updates=5)) for rate in (10.0, 25.0, 100.0, 400.0)]
        assert all(made.share["adaptive"] > 0.98 for made in cells)
        for slower, faster in itertools.pairwise(cells):
            assert slower.growth >= faster.growth >= 1.0 and slower.r > faster.r
            assert all(slower.share[method] <= faster.share[method] + 0.01 for method in COLUMNS)
    # 70 B parameters as eight parts, each with a rank on every one of 64 nodes: 140 GB out of a node, twice.
    last = cell(SIZES[-1], 400.0, Assumptions(updates=5))
    exchange = 2 * 63 / 64 * 140e9 / 50e9 + 2 * 63 * 20e-6
    assert last.r == pytest.approx(exchange / (2 * 6 * 70e9 * 4096 / 395e12))


def test_many_ranks_take_seconds() -> None:
    """4,096 ranks; the time is printed by pytest --durations, and 20 updates of two methods are a twentieth of 200."""
    for method in ("acco", "adaptive"):
        times = ComputeTimes(0.25, 0.05, slow_share=0.01, pause_every=600.0, pause=5.0)
        played = play(method, Setting(4096, 8, times, Costs(0.25, 1.5), updates=20))
        assert played.seconds.shape == (20,) and played.rate > 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--updates", "0"], "--updates must be 1 to 100000"),
        (["--spread", "-1"], "--spread must be 0 to 3"),
        (["--table", "--seed", "3"], "--table has models, ranks and links of its own; leave out --parameters, --ranks"),
        (["--spread", "nan"], "--spread must be 0 to 3"),
        (["--slow-share", "1.5"], "--slow-share must be 0 to 1"),
        (["--slow-factor", "0.5"], "--slow-factor must be 1 or more"),
        (["--pause", "5"], "--pause-every and --pause go together"),
        (["--pause-every", "-1", "--pause", "1"], "--pause-every and --pause must be 0 or more"),
        (["--ranks-per-node", "0"], "--ranks-per-node must be 1 or more"),
        (["--ranks-per-node", "3"], "16 ranks do not fill nodes of 3"),
        (["--ranks", "8192"], "a simulation has 4096 ranks at most"),
        (["--inside-gbit", "0"], "--inside-gbit must be above 0"),
        (["--plot", "x.png"], "--plot draws the formulas"),
        (["--seed", "-1"], "--seed must be 0 or more"),
    ],
)
def test_bad_numbers_are_named(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *change]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_what_only_a_simulation_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in WORDS if word != "--simulate"]
    assert main([*words, "--slow-share", "0.1"]) == 2
    assert "--updates, --slow-share: only with --simulate" in capsys.readouterr().err
    assert main(["plan"]) == 2 and "give --parameters and --micro-batches" in capsys.readouterr().err
