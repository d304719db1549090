"""First-loss differences of resumed runs: across numbers of ranks, between ACCO and ZeRO-1, directly or universal.

    .venv/bin/python benchmarks/resume.py

A tiny GPT (megatron-core, 2 layers) trains for some updates under DeepSpeed's own ZeRO-1 and under ACCO, on 1, 2 and 4
gloo ranks with the same samples, and saves. Each checkpoint is then resumed by both, on 1, 2 and 4 ranks, as it is and
through DeepSpeed's `ds_to_universal`. Printed is, for the first micro-batches after the resume, the difference of the
mean loss to that of the run that saved, and how far the runs are apart some updates later, against a run of the same
method that was never interrupted (nothing where the method changes). ACCO has two losses at a checkpoint: at the
estimate, which compute is shown next, and at the committed weights, which other methods and the universal form start
from. The exit code is 1 if a first loss differs by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.distributed import gpt  # noqa: E402
from tests.distributed.harness import RankPool  # noqa: E402

METHODS = {"ZeRO-1": None, "ACCO": "acco"}
RANKS = (1, 2, 4)
PER_UPDATE = gpt.GAS * gpt.REPLICAS  # micro-batches, over all ranks
FIRST_HALF = PER_UPDATE // 2
UPDATES, LATER = 6, 4
REFUSED = "refused"


@dataclass
class Losses:
    """What a rank saw: losses by update and number of the micro-batch, and those at the committed weights."""

    by_update: dict[int, dict[int, float]]
    at_theta: dict[int, float]


def train(case: gpt.Case, updates: range, folder: str, save: bool, load: str | None) -> Losses | str:
    """Job: some updates; `load` is None, "direct" or "universal"; saves before the last `LATER` updates."""
    import torch

    with gpt.parallel(1):
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        universal = {"checkpoint": {"load_universal": True}} if load == "universal" else {}
        model = gpt.build(case)
        engine = gpt.engine_of(case, model, PER_UPDATE // ranks, **universal)
        try:
            if load is not None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                try:
                    engine.load_checkpoint(folder, tag="saved")
                except Exception as error:
                    if "world size" in str(error):  # DeepSpeed's own refusal
                        return REFUSED
                    raise
            result = Losses({}, {})
            for update in updates:
                if save and update == updates.stop - LATER:
                    engine.save_checkpoint(folder, tag="saved")
                    with torch.no_grad():
                        engine.eval()  # which shows the committed weights
                        for number in range(FIRST_HALF):
                            result.at_theta[number] = _loss(engine, update, number).item()
                        engine.train()
                result.by_update[update] = {}
                for micro in range(PER_UPDATE // ranks):
                    number = micro * ranks + rank  # each half has the same samples on any number of ranks
                    loss = _loss(engine, update, number)
                    engine.backward(loss)
                    engine.step()
                    result.by_update[update][number] = loss.item()
            return result
        finally:
            engine.destroy()


def _loss(model: Any, update: int, number: int) -> Any:
    import torch

    tokens, labels = gpt.batch(update, number // gpt.REPLICAS, number % gpt.REPLICAS)
    return model(tokens, torch.arange(gpt.LENGTH).expand(2, -1), None, labels=labels).float().mean()


def mean_loss(results: list[Losses], update: int, at_theta: bool = False) -> float:
    """Mean over the first half of an update, over all ranks."""
    if at_theta:
        return sum(results[0].at_theta.values()) / FIRST_HALF
    losses = {number: loss for r in results for number, loss in r.by_update[update].items() if number < FIRST_HALF}
    assert len(losses) == FIRST_HALF
    return sum(losses[number] for number in sorted(losses)) / FIRST_HALF


def convert(folder: str, out: str) -> None:
    """DeepSpeed's converter on the checkpoint of `folder`."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        to_universal(
            argparse.Namespace(
                input_folder=f"{folder}/saved", output_folder=f"{out}/saved", inject_missing_state=False, **options
            )
        )


def study(pools: dict[int, RankPool], bf16: bool, scratch: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(saved by, resumed by, form) -> "ranks→ranks" -> differences of the first loss and of the loss later, or refused.

    The later one is None where the method changed: no uninterrupted run is its counterpart.
    """
    start, last = UPDATES, UPDATES + LATER - 1
    cases = {name: gpt.Case(mode=mode, bf16=bf16) for name, mode in METHODS.items()}
    runs = {}
    for (name, case), n in itertools.product(cases.items(), RANKS):
        folder = str(scratch / f"{name}-{n}")
        runs[name, n] = folder, pools[n].run(train, case, range(UPDATES + LATER), folder, True, None)
        convert(folder, f"{folder}-universal")
    table: dict[tuple[str, str, str], dict[str, Any]] = {}
    for saver, resumer, form in itertools.product(METHODS, METHODS, ("direct", "universal")):
        row = table[saver, resumer, form] = {}
        for n, m in itertools.product(RANKS, RANKS):
            folder, saved = runs[saver, n]
            source = folder if form == "direct" else f"{folder}-universal"
            resumed = pools[m].run(train, cases[resumer], range(start, start + LATER), source, False, form)
            if REFUSED in resumed:
                row[f"{n}→{m}"] = REFUSED
                continue
            estimate = form == "direct" and saver == resumer == "ACCO"
            first = mean_loss(resumed, start) - mean_loss(saved, start, at_theta=not estimate)
            later = mean_loss(resumed, last) - mean_loss(saved, last) if saver == resumer else None
            row[f"{n}→{m}"] = first, later
    return table


def print_table(table: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Markdown; a cell is: first loss / loss `LATER` updates on."""
    columns = list(next(iter(table.values())))
    print("| saved by | resumed by | form | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 3) + "|")
    for (saver, resumer, form), row in table.items():
        cells = [cell if cell == REFUSED else " / ".join(map(_short, cell)) for cell in row.values()]
        print(f"| {saver} | {resumer} | {form} | " + " | ".join(cells) + " |")


def _short(difference: float | None) -> str:
    if difference is None:
        return "–"
    return "0" if difference == 0.0 else f"{difference:.0e}"


def versions() -> str:
    """What the figures were made with."""
    import deepspeed
    import megatron.core
    import torch

    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, deepspeed {deepspeed.__version__}, "
        f"megatron-core {megatron.core.__version__}"
    )


def main() -> int:
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--tolerance", type=float, default=1e-6, help="difference allowed to a first loss")
    args = parser.parse_args()
    pools = {n: RankPool(n) for n in RANKS}
    worst = 0.0
    try:
        for dtype in args.dtype:
            with tempfile.TemporaryDirectory() as scratch:
                table = study(pools, dtype == "bf16", Path(scratch))
            print(f"\n{dtype}, {UPDATES} updates before the save, first loss / loss {LATER} updates on:\n")
            print_table(table)
            cells = [cell for row in table.values() for cell in row.values() if cell != REFUSED]
            worst = max(worst, *(abs(first) for first, _ in cells))
    finally:
        for pool in pools.values():
            pool.close()
    print(f"\n{versions()}; largest difference of a first loss: {worst:.1e} (allowed {args.tolerance:.0e})")
    return int(worst > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
