"""From what the ranks saw to figures, tables and JSON. Pure arithmetic."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.compare.methods import BASELINES, METHODS
from megatron_acco.cost_model import Costs, update
from megatron_acco.simulation import rounds
from megatron_acco.simulation.compute_times import ComputeTimes

Result = dict[str, Any]
Ranks = list[dict[str, Any]]  # `rank.Turn` of every rank


def evaluate(result: Result) -> Result:
    """`rank.Rank.result` with "best_zero1" and, for each method that has been measured, its "figures".

    `tokens_per_second`, `ratio_to_zero1` (the faster one) and `ratio_to_compute` are lists over turns, everything else
    is a number or None.
    """
    measured = {name: all_ for name, all_ in result["turns"].items() if all_ and name not in result["failed"]}
    tokens = result["arguments"]["micro_batch_size"] * result["arguments"]["seq_length"]
    rates = {name: [tokens_per_second(name, ranks, tokens) for ranks in all_] for name, all_ in measured.items()}
    best = max((n for n in BASELINES if n in rates), key=lambda n: statistics.median(rates[n]), default=None)
    result["best_zero1"] = best
    result["figures"] = {}
    for name, all_ in measured.items():
        figures: dict[str, Any] = {"tokens_per_second": rates[name]}
        for key, base in (("ratio_to_zero1", best), ("ratio_to_compute", "compute")):
            figures[key] = common.ratios(rates[name], rates[base]) if base in rates else None
        figures |= _of_updates(name, all_) | round_figures(all_)
        if figures["ratio_to_compute"] and figures["seconds_per_update"]:
            figures["exposed_share"] = 1.0 - statistics.median(figures["ratio_to_compute"])
        peaks = [rank[name] for rank in result["peaks"] if rank.get(name) is not None]
        figures["peak_bytes"] = max(peaks, default=None)
        rate = predicted(name, result)
        figures["predicted"] = None if rate is None else rate * tokens
        result["figures"][name] = figures
    return result


def tokens_per_second(name: str, ranks: Ranks, tokens: int) -> float:
    """Of all ranks in one turn, `tokens` a micro-batch; for `compute` the sum of their own rates.

    Adaptive ranks end the same update up to a micro-batch apart, early or late in turn: the mean of their windows.
    """
    if name == "compute":
        return sum(turn["micro_batches"] * tokens / turn["seconds"] for turn in ranks)
    return ranks[0]["micro_batches"] * tokens / statistics.mean(turn["seconds"] for turn in ranks)


def _of_updates(name: str, all_turns: list[Ranks]) -> dict[str, float | None]:
    ranks = [turn for turns_of_ranks in all_turns for turn in turns_of_ranks]
    updates = sum(turn["updates"] for turn in ranks)
    if not updates:
        return dict.fromkeys(("seconds_per_update", "micro_batches_per_update", "bytes_per_update", "exposed_share"))
    return {
        "seconds_per_update": statistics.median(turn["seconds"] / turn["updates"] for turn in ranks),
        "micro_batches_per_update": sum(turn["micro_batches"] for turn in ranks) / updates,
        "bytes_per_update": sum(turn["sent"] for turn in ranks) / updates,
        "exposed_share": None,
    }


def round_figures(all_turns: list[Ranks]) -> dict[str, float | None]:
    """Of ACCO's engine, over all turns and ranks; None for others.

    Round and wait are the mean of a round, in seconds; CPU shares are of compute.
    """
    ranks = [turn for turns_of_ranks in all_turns for turn in turns_of_ranks]
    number = sum(len(turn["rounds"]) for turn in ranks)
    compute = sum(turn["compute_seconds"] for turn in ranks)
    return {
        "round_seconds": sum(sum(turn["rounds"]) for turn in ranks) / number if number else None,
        "wait_seconds": sum(sum(turn["waits"]) for turn in ranks) / number if number else None,
        "halves_share": sum(turn["halves"] for turn in ranks) / number if number else None,
        "lane_cpu_share": sum(turn["lane_cpu"] for turn in ranks) / compute if compute else None,
        "all_cpu_share": sum(turn["other_cpu"] for turn in ranks) / compute if compute else None,
    }


def compute_by_rank(result: Result) -> list[float]:
    """Seconds of a micro-batch on each rank: in the turns without communication, or else at the start."""
    if not result["turns"].get("compute"):
        return result["measured"]["compute_by_rank"]
    by_rank = zip(*result["turns"]["compute"], strict=True)
    return [statistics.median(turn["seconds"] / turn["micro_batches"] for turn in mine) for mine in by_rank]


def predicted(name: str, result: Result) -> float | None:
    """Micro-batches per second of all ranks: by the cost model, as `megatron-acco plan` has them, or simulated where
    hosts differ. None: there is no formula, or it is what the formulas are fed with."""
    method, args = METHODS[name], result["arguments"]
    if name == "compute" and result["turns"].get("compute"):
        return None
    compute, steps = compute_by_rank(result), args["gas"]
    mean = statistics.mean(compute)
    costs = replace(Costs(**result["measured"]["costs"]), compute=mean)
    if method.estimate_bits is not None:
        costs = costs.with_estimate_of(method.estimate_bits, 2 if args["bf16"] else 4)
    if method.local_estimates:
        costs = replace(costs, estimate=0.0)
    if len(set(args["cpu"])) == 1:
        count, seconds = update(method.rule, costs, steps, method.most_per_half)
        return len(compute) * count / seconds
    if method.rule not in rounds.METHODS:
        return None
    times = ComputeTimes(mean, speeds=tuple(seconds / mean for seconds in compute))
    setting = rounds.Setting(len(compute), steps, times, costs, method.most_per_half, updates=50)
    return rounds.play(method.rule, setting).rate


# ---- tables ---------------------------------------------------------------------------------------------------------

_COLUMNS = (
    ("s/update", "seconds_per_update", "{:.3f}"),
    ("mb/upd", "micro_batches_per_update", "{:.1f}"),
    ("exposed", "exposed_share", "{:.1%}"),
    ("MB/upd", "bytes_per_update", "{:.2f}"),
    ("peak MB", "peak_bytes", "{:.0f}"),
    ("halves", "halves_share", "{:.0%}"),
    ("lane cpu", "lane_cpu_share", "{:.1%}"),
    ("all cpu", "all_cpu_share", "{:.1%}"),
)


def report(result: Result) -> list[str]:
    """The table of one run, as lines."""
    args, measured = result["arguments"], result["measured"]
    costs, k, compute = Costs(**measured["costs"]), args["gas"], statistics.mean(compute_by_rank(result))
    rate = "unshaped" if measured["rate"] is None else f"{measured['rate'] / 1e6:.1f} Mbit/s"
    best = result["best_zero1"]
    lines = [
        f"{measured['parameters'] / 1e6:.2f} M parameters, {args['hosts']} hosts, CPUs {args['cpu']}, link {rate}, "
        f"k = {k}, micro-batch {args['micro_batch_size']} x {args['seq_length']}",
        f"compute of a micro-batch {compute:.3f} s, an exchange with nothing beside it {costs.exchange:.3f} s: "
        f"r = {costs.exchange / (k * compute):.2f}; all-reduce {costs.reduction:.3f} s, all-gather "
        f"{costs.gathering:.3f} s",
        f"{args['turns']} turns of {args['block']} updates, one thread per rank, "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        *_notes(result),
        "",
    ]
    heads = ["tokens/s", "min", "max", f"/{best or 'zero1'}", "min", "max", "/compute", "min", "max"]
    heads += [head for head, *_ in _COLUMNS] + ["model"]
    widths = [max(8, len(head) + 1) for head in heads]
    lines.append(f"{'method':14}" + _cells(heads, widths))
    for name in args["methods"]:
        figures = result["figures"].get(name)
        if figures is None:
            lines.append(f"{name:14}  FAILED: {result['failed'].get(name, 'no turn was measured')}")
        else:
            lines.append(f"{name:14}" + _cells(_row(figures), widths))
    return [*lines, "", *_verdicts(result)]


def _notes(result: Result) -> list[str]:
    hosts, cores = result["arguments"]["hosts"], result["measured"]["cores"]
    return [f"{hosts} hosts share {cores} cores: compute is that of ranks beside each other"] if hosts > cores else []


def _cells(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def _row(figures: dict[str, Any]) -> list[str]:
    row = [f"{value:.0f}" for value in common.spread(figures["tokens_per_second"])]
    for key in ("ratio_to_zero1", "ratio_to_compute"):
        row += [f"{value:.3f}" for value in common.spread(figures[key])] if figures[key] else ["-"] * 3
    for _, key, form in _COLUMNS:
        value = figures[key]
        row.append("-" if value is None else form.format(value / 1e6 if "bytes" in key else value))
    off = figures["predicted"] and figures["predicted"] / statistics.median(figures["tokens_per_second"]) - 1.0
    return [*row, "-" if off is None else f"{off:+.1%}"]


def _verdicts(result: Result) -> list[str]:
    """The methods that are not exact against the fastest that is, turn by turn."""
    rates = {name: figures["tokens_per_second"] for name, figures in result["figures"].items()}
    exact = [name for name in rates if METHODS[name].exact]
    if not exact:
        return []
    best = max(exact, key=lambda name: statistics.median(rates[name]))
    lines = []
    for name in rates:
        if METHODS[name].acco is not None and not METHODS[name].exact:
            middle, low, high = common.spread(common.ratios(rates[name], rates[best]))
            lines.append(
                f"{name} is {middle:.3f} ({low:.3f} to {high:.3f}) times as fast as {best}, the best exact rival"
            )
    return lines


def summary(name: str, values: Sequence[float], results: Sequence[Result | None], methods: Sequence[str]) -> list[str]:
    """The table of a sweep, as lines: tokens per second, and their ratio to the faster ZeRO-1 and to compute."""
    lines = [f"median over turns, against {name}"]
    for title, key, form in (
        ("tokens/s", "tokens_per_second", "{:.0f}"),
        ("to the faster ZeRO-1", "ratio_to_zero1", "{:.3f}"),
        ("to compute alone", "ratio_to_compute", "{:.3f}"),
    ):
        lines += ["", f"{title:22}" + "".join(f"{value:>10g}" for value in values)]
        for method in methods:
            cells = [median(result, method, key) for result in results]
            texts = [text if isinstance(text, str) else form.format(text) for text in cells]
            lines.append(f"{method:22}" + "".join(f"{text:>10}" for text in texts))
    return lines


def median(result: Result | None, method: str, key: str) -> float | str:
    """Of a figure over turns; "FAILED", or "-" where there is nothing to compare with."""
    if result is None or method not in result["figures"]:
        return "FAILED"
    values = result["figures"][method][key]
    return statistics.median(values) if values else "-"


def save(stem: Path, lines: Sequence[str], data: Any) -> None:
    """Write STEM.txt and STEM.json."""
    stem.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1))
