"""Validation loss at theta_t of several methods over seeds, at equal tokens, on the embedded corpus.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --module benchmarks.convergence --methods zero1 acco acco-8-bit

Every method trains the same megatron-core GPT from the same weights on the same windows of text in the same order (they
follow from seed, update, rank and micro-batch), with one optimizer, the same clipping, warm-up and cosine: what differs
is the rule. For each of `--gas` (micro-batches per rank and update) and `--lr`, prints the last validation loss of each
method (mean and range over seeds), and its difference to ZeRO-1's of the same seed.

`--micro-batches` gives every batch size the same tokens; warm-ups may be fractions of the updates then. The last column
is how many updates the mean curve takes to ZeRO-1's loss at its last validation but one, over ZeRO-1's (straight lines
between validations): divided by a method's speed relative to ZeRO-1's it is the time to that loss.

Finished runs are lines of `OUT/results.jsonl`: a second start goes on where the first one stopped, and adds methods,
seeds, batch sizes and learning rates. Where matplotlib is installed, `OUT/convergence.png` has the curves, and
`OUT/learning-rates.png` the last losses over several rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_acco
from benchmarks import common, turns
from megatron_acco.corpus import CorpusSettings, load_corpus, prepare_corpus, standard_library

UNEQUAL = 0.8
METHODS: dict[str, dict[str, Any] | None] = {
    "zero1": None,
    "dpu": {"mode": "dpu"},
    "wp": {"mode": "wp"},
    "acco": {},
    "acco-unequal": {"estimate_fraction": UNEQUAL},
    **{f"acco-{bits}-bit": {"estimate_bits": bits} for bits in (8, 4)},
    **{f"acco-{bits}-bit-unequal": {"estimate_bits": bits, "estimate_fraction": UNEQUAL} for bits in (8, 4)},
    # Estimates by groups of ranks.
    "acco-alone": {"estimate_group": 1},
    "acco-alone-unequal": {"estimate_group": 1, "estimate_fraction": UNEQUAL},
    "acco-pairs": {"estimate_group": 2},
    "acco-4-bit-stochastic": {"estimate_bits": 4, "estimate_stochastic_rounding": True},
}
BASELINE = "zero1"
RESULTS = "results.jsonl"
Curve = list[tuple[int, float]]
"""(updates, validation loss at theta_t)"""


@dataclass(frozen=True)
class Run:
    """What decides a trajectory."""

    method: str
    seed: int
    gas: int
    lr: float
    updates: int
    ranks: int
    lr_warmup: int
    sync_updates: int
    clip: float
    micro_batch_size: int
    seq_length: int
    hidden_size: int
    num_layers: int
    bf16: bool
    optimizer: str = "AdamW"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["zero1", "acco", "dpu", "wp"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--gas", nargs="+", type=int, default=[4], help="micro-batches per rank and update")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3], help="peak learning rate")
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW", help="Muon's own rate is 10 x --lr")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--updates", type=int, default=200)
    length.add_argument("--micro-batches", type=int, help="of each rank, instead of --updates")
    parser.add_argument("--lr-warmup", type=float, default=20, help="updates, or a fraction of them")
    parser.add_argument(
        "--sync-updates", type=float, default=40, help='"warmup_updates" of overlapped methods, as above'
    )
    parser.add_argument("--clip", type=float, default=1.0, help="0 switches clipping off")
    parser.add_argument("--validations", type=int, default=8, help="in a run, evenly spread")
    turns.add_model_arguments(parser, seq_length=128, hidden_size=128, num_layers=2)
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(arguments)
    for name in ("methods", "seeds", "gas", "lr"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    for message, wrong in _problems(args).items():
        if wrong:
            parser.error(message)
    try:
        common.check_folder(args.out)
    except ValueError as error:
        parser.error(str(error))
    return args


def _problems(args: argparse.Namespace) -> dict[str, bool]:
    whole = ("updates", "validations", *common.SIZES)
    sections = {name: METHODS[name] for name in args.methods}
    halves = [name for name, acco in sections.items() if acco is not None and acco.get("mode", "acco") == "acco"]
    return {
        **{f"--{name.replace('_', '-')} must be 1 or more": getattr(args, name) < 1 for name in whole},
        "--gas must be 1 or more": min(args.gas) < 1,
        f"--gas 1: an update of {', '.join(halves)} has two halves, and so 2 micro-batches or more": min(args.gas) < 2
        and bool(halves),
        "--micro-batches must be enough for an update of every --gas": args.micro_batches is not None
        and args.micro_batches < max(args.gas),
        "--lr must be above 0 and finite": not all(0 < lr < math.inf for lr in args.lr),
        **{
            f"--{name.replace('_', '-')} must be 0 or more": not 0 <= getattr(args, name) < math.inf
            for name in ("lr_warmup", "sync_updates", "clip")
        },
    }


def main() -> None:
    """Train what is not there yet, report on rank 0."""
    args = parse_arguments()
    path: Path = args.out / RESULTS
    try:
        known = read(path)  # before the ranks meet: none of them appends to it yet
    except ValueError as error:
        raise SystemExit(f"ERROR: {error}") from error
    turns.start()
    corpus = Text(args)
    grid = itertools.product(args.gas, args.lr, args.seeds, args.methods)
    fixed = {name: getattr(args, name) for name in Run.__dataclass_fields__ if hasattr(args, name)}
    runs = []
    for gas, lr, seed, method in grid:
        updates = args.updates if args.micro_batches is None else args.micro_batches // gas
        lengths = {name: in_updates(getattr(args, name), updates) for name in ("lr_warmup", "sync_updates")}
        cell = {
            "method": method,
            "seed": seed,
            "gas": gas,
            "lr": lr,
            "updates": updates,
            "ranks": dist.get_world_size(),
        }
        runs.append(Run(**{**fixed, **cell, **lengths}))
    for run in runs:
        if run in known:
            continue
        start = time.perf_counter()
        known[run] = curve = train(run, args, corpus)
        if dist.get_rank() == 0:
            print(f"{run.method:24} seed {run.seed} gas {run.gas} lr {run.lr:g}: {curve[-1][1]:.4f}", flush=True)
            line = {**asdict(run), "curve": curve, "seconds": round(time.perf_counter() - start, 1)}
            append(path, json.dumps(line))
    if dist.get_rank() == 0:
        report(runs, known)
        draw(runs, known, args.out / "convergence.png")
        draw_rates(runs, known, args.out / "learning-rates.png")
    dist.barrier()
    dist.destroy_process_group()


def in_updates(length: float, updates: int) -> int:
    """A number of updates that may be given as a fraction of all."""
    return round(length * updates) if length < 1 else int(length)


class Text:
    """Windows of the embedded corpus."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        folder = args.out / "corpus"
        if dist.get_rank() == 0:
            prepare_corpus(folder, CorpusSettings(str(standard_library()), turns.VOCABULARY), log=lambda line: None)
        dist.barrier()
        corpus = load_corpus(folder)
        assert corpus is not None
        self._shape = (args.micro_batch_size, args.seq_length + 1)
        self._tokens: dict[str, Tensor] = {}
        for split in ("train", "valid"):
            documents = IndexedDataset(str(corpus.prefix(split)))
            parts = [torch.from_numpy(documents[index].astype("int64")) for index in range(len(documents))]
            self._tokens[split] = torch.cat(parts)

    def micro_batch(self, split: str, *key: int) -> Tensor:
        """Tokens [micro-batch, sequence + 1] that follow from `key`."""
        number = 0
        for part in key:
            number = (number * 1_000_003 + part + 1) % 2**61
        generator = torch.Generator().manual_seed(number)
        tokens, (size, length) = self._tokens[split], self._shape
        starts = torch.randint(len(tokens) - length, (size,), generator=generator)
        return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def train(run: Run, args: argparse.Namespace, text: Text) -> Curve:
    """One training."""
    acco = METHODS[run.method]
    if acco is not None:
        acco = {"mode": "acco", "warmup_updates": run.sync_updates, **acco}
    params = {"lr": run.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if run.optimizer == "Muon":
        params["muon_lr"] = 10 * run.lr
    config = {
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.gas,
        "gradient_clipping": run.clip,
        "optimizer": {"type": run.optimizer, "params": params},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": run.bf16},
        **({"acco": acco} if acco is not None else {}),
    }
    model = turns.new_model(args, seed=run.seed)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor(n, run.lr_warmup, run.updates))

    engine, *_ = megatron_acco.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, lr_scheduler=schedule
    )
    rank, curve = dist.get_rank(), []
    for update in range(run.updates):
        for micro in range(run.gas):
            tokens = text.micro_batch("train", run.seed, update, rank, micro)
            turns.train_micro_batch(engine, turns.split(tokens))
        if (update + 1) * args.validations // run.updates > update * args.validations // run.updates:
            curve.append((update + 1, validate(engine, text)))
    engine.destroy()
    return curve


def factor(update: int, warmup: int, updates: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if update < warmup:
        return (update + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (update - warmup) / max(1, updates - warmup))


@torch.no_grad()
def validate(engine: Any, text: Text, batches: int = 16) -> float:
    """Mean loss on held-out text at theta_t, the same windows always, shared by the ranks."""
    mine = range(dist.get_rank(), batches * dist.get_world_size(), dist.get_world_size())
    with megatron_acco.real_parameters(engine):
        engine.eval()
        total = torch.zeros(1, dtype=torch.float64)
        for index in mine:
            tokens, positions, labels = turns.split(text.micro_batch("valid", index))
            total += engine(tokens, positions, None, labels=labels).double().mean().cpu()
        engine.train()
    dist.all_reduce(total)
    return float(total) / (batches * dist.get_world_size())


def read(path: Path) -> dict[Run, Curve]:
    """Finished runs. A last line without its end was cut off while it was written, and does not count.

    Raises:
        ValueError: another line is damaged.
    """
    known = {}
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            run = Run(**{name: record[name] for name in Run.__dataclass_fields__ if name in record})
            curve = [(int(update), float(loss)) for update, loss in record["curve"]]
            if not curve:
                raise ValueError("its curve is empty")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a finished run: {error}; remove that line") from error
        known[run] = curve
    return known


def append(path: Path, line: str) -> None:
    """Add a line, in the place of one that was cut off."""
    with path.open("ab+") as file:
        file.seek(0)
        before = file.read()
        if not before.endswith(b"\n"):
            file.truncate(before.rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def report(runs: Sequence[Run], known: dict[Run, Curve]) -> None:
    """A table for each batch size and learning rate."""
    versions = f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    print(f"\n{versions}; {runs[0].optimizer}, validation loss at theta_t")
    for (gas, lr), group in itertools.groupby(runs, key=lambda run: (run.gas, run.lr)):
        cell = list(group)
        first = cell[0]
        tokens = first.updates * gas * first.ranks * first.micro_batch_size * first.seq_length
        size = f"{first.micro_batch_size} x {first.seq_length}"
        print(f"\n{first.ranks} ranks x {gas} micro-batches of {size}, lr {lr:g},")
        print(f"{first.updates} updates ({first.sync_updates} sync), {tokens / 1e6:.2f} M tokens, clip {first.clip:g}")
        print(f"{'method':24}{'mean':>9}{'min':>9}{'max':>9}{'to zero1':>11}{'min':>9}{'max':>9}{'updates':>9}")
        of = {(run.method, run.seed): known[run][-1][1] for run in cell}
        for method in dict.fromkeys(run.method for run in cell):
            losses = [loss for (name, _), loss in of.items() if name == method]
            line = f"{method:24}" + "".join(f"{value:9.4f}" for value in spread(losses))
            if any(run.method == BASELINE for run in cell):
                base = [of[BASELINE, seed] for name, seed in of if name == method]
                off = [100 * (loss / other - 1) for loss, other in zip(losses, base, strict=True)]
                middle, low, high = spread(off)
                line += f"{middle:+10.3f}%{low:+8.3f}%{high:+8.3f}%"
                share = updates_to_loss(mean_curve(method, cell, known), mean_curve(BASELINE, cell, known))
                line += f"{'-':>9}" if share is None else f"{share:9.3f}"
            diverged = sum(not math.isfinite(loss) for loss in losses)
            print(line + (f"  {diverged} of {len(losses)} diverged" if diverged else ""))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, smallest and largest; what is not a number is larger than all numbers."""
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    return statistics.mean(values), ordered[0], ordered[-1]


def mean_curve(method: str, cell: Sequence[Run], known: dict[Run, Curve]) -> Curve:
    """Over the seeds, where all of them were validated: earlier starts may have had other --validations."""
    curves = [dict(known[run]) for run in cell if run.method == method]
    shared = [update for update in curves[0] if all(update in curve for curve in curves)]
    return [(update, statistics.mean(curve[update] for curve in curves)) for update in shared]


def updates_to_loss(curve: Curve, base: Curve) -> float | None:
    """Updates that `curve` takes to the loss of `base` at its last validation but one, over those of `base`."""
    if len(base) < 2:
        return None
    updates, loss = base[-2]
    reached = reaches(curve, loss)
    return None if reached is None else reached / updates


def reaches(curve: Curve, loss: float) -> float | None:
    """Updates after which `curve` is at `loss` for the first time; None: never."""
    for (start, before), (end, after) in itertools.pairwise([curve[0], *curve]):
        if after <= loss:
            return start + (end - start) * (before - loss) / (before - after) if before > loss else float(end)
    return None


def draw(runs: Sequence[Run], known: dict[Run, Curve], path: Path) -> None:
    """The mean curves, one picture for each batch size and learning rate side by side."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {key: list(group) for key, group in itertools.groupby(runs, key=lambda run: (run.gas, run.lr))}
    figure = Figure(figsize=(5.5 * len(cells), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, ((gas, lr), cell) in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells.items(), strict=True):
        for method in dict.fromkeys(run.method for run in cell):
            axes.plot(*zip(*mean_curve(method, cell, known), strict=True), label=method, marker=".")
        axes.set(title=f"gas {gas}, lr {lr:g}", xlabel="updates", ylabel="validation loss at theta_t")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def draw_rates(runs: Sequence[Run], known: dict[Run, Curve], path: Path) -> None:
    """The last losses over several learning rates, mean and range over the seeds, one picture for each batch size."""
    if importlib.util.find_spec("matplotlib") is None or len({run.lr for run in runs}) < 2:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = sorted({run.gas for run in runs})
    figure = Figure(figsize=(5.5 * len(sizes), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, gas in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for method in dict.fromkeys(run.method for run in runs):
            of = {lr: [known[r][-1][1] for r in runs if (r.method, r.gas, r.lr) == (method, gas, lr)]
                  for lr in sorted({run.lr for run in runs})}  # fmt: skip
            middle, low, high = zip(*map(spread, of.values()), strict=True)
            errors = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]  # noqa: B905
            axes.errorbar(list(of), middle, yerr=errors, label=method, marker=".", capsize=3)
        axes.set(title=f"gas {gas}", xscale="log", xlabel="peak learning rate", ylabel="last validation loss")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
