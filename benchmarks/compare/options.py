"""The command line, and what a sweep changes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.compare
from benchmarks import common
from benchmarks.cluster import LEAST_CPU, MOST_HOSTS, bits_per_second
from benchmarks.compare.methods import DEFAULT, METHODS

# Parameter of a sweep: what it is called in tables, and the options that a value of it stands for.
SWEEPS: dict[str, tuple[str, Callable[[argparse.Namespace, float], dict[str, Any]]]] = {
    "r": ("exchange over compute of an update", lambda args, value: {"r": value}),
    "gas": ("micro-batches per rank and update", lambda args, value: {"gas": int(value)}),
    "hosts": ("ranks", lambda args, value: {"hosts": int(value)}),
    "slow": ("slow-down of the last host", lambda args, value: {"cpu": [1.0] * (args.hosts - 1) + [1.0 / value]}),
    "hidden-size": ("hidden size of the model", lambda args, value: {"hidden_size": int(value)}),
}

# Links that `tc` can shape, and on which a run ends.
LEAST_R, MOST_R = 1e-3, 1e3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=benchmarks.compare.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--rate", help='rate of every host\'s link, such as "300mbit"')
    link.add_argument("--r", type=float, help="exchange over compute of an update; chooses the rate")
    parser.add_argument("--gas", type=int, default=4, help="micro-batches per rank and update (k)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cpu", nargs="+", type=float, default=[1.0], help="CPUs per host: one for all, or one each")
    parser.add_argument("--no-pin", action="store_true", help="do not bind host i to CPU i")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--block", type=int, default=2, help="timed updates a turn")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory of each method")
    parser.add_argument("--sweep", nargs="+", metavar="VALUE", help=f"a parameter ({', '.join(SWEEPS)}) and its values")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run is given up")
    common.add_model_arguments(parser, seq_length=512, hidden_size=128, num_layers=4)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of tables, JSON and pictures")
    args = parser.parse_args(arguments)
    args.methods = list(dict.fromkeys(args.methods))  # turns of a method are counted by its name
    try:
        bits_per_second(args.rate)
        args.sweep = _sweep(args)
    except ValueError as error:
        parser.error(str(error))
    # Every run of a sweep, before the first of them.
    for value in (None,) if args.sweep is None else args.sweep[1]:
        where = "" if value is None else f"--sweep {args.sweep[0]} {value:g}: "
        for message, wrong in _problems(args if value is None else at(args, value)).items():
            if wrong:
                parser.error(where + message)
    return args


def _problems(args: argparse.Namespace) -> dict[str, bool]:
    whole = ("gas", "turns", "block", *common.SIZES)
    pytorch = [name for name in ("ddp", "fsdp2") if name in args.methods]
    return {
        "--hosts must be 2 or more": args.hosts < 2,
        f"--hosts must be {MOST_HOSTS} or less": args.hosts > MOST_HOSTS,
        "--cpu takes one number for all hosts, or one for each": len(args.cpu) not in (1, args.hosts),
        f"--cpu must be {LEAST_CPU} or more": not all(LEAST_CPU <= cpu < math.inf for cpu in args.cpu),
        f"--r must be {LEAST_R:g} to {MOST_R:g}": args.r is not None and not LEAST_R <= args.r <= MOST_R,
        "--limit must be above 0": not args.limit > 0,
        **{f"--{name.replace('_', '-')} must be 1 or more": getattr(args, name) < 1 for name in whole},
        f"--bf16: {' and '.join(pytorch)} would train without fp32 masters; leave them out": args.bf16
        and bool(pytorch),
    }


def _sweep(args: argparse.Namespace) -> tuple[str, list[float]] | None:
    """(parameter, values).

    Raises:
        ValueError: not a sweep.
    """
    if args.sweep is None:
        return None
    name, *values = args.sweep
    if name not in SWEEPS or not values:
        raise ValueError(f"--sweep takes a parameter ({', '.join(SWEEPS)}) and its values, got {' '.join(args.sweep)}")
    if name == "r" and args.rate is not None:
        raise ValueError("--sweep r chooses the rate; leave out --rate")
    if name == "slow" and args.cpu != [1.0]:
        raise ValueError("--sweep slow chooses the CPUs; leave out --cpu")
    numbers = list(dict.fromkeys(map(float, values)))
    least = {"r": LEAST_R, "hosts": 2.0}.get(name, 1.0)
    if not all(least <= number < 1e6 for number in numbers):
        raise ValueError(f"--sweep {name}: values must be {least:g} or more, got {' '.join(values)}")
    if name not in ("r", "slow") and not all(number.is_integer() for number in numbers):
        raise ValueError(f"--sweep {name}: values must be whole numbers, got {' '.join(values)}")
    return name, numbers


def at(args: argparse.Namespace, value: float) -> argparse.Namespace:
    """The run at one value of the sweep."""
    changed = SWEEPS[args.sweep[0]][1](args, value)
    return argparse.Namespace(**{**vars(args), **changed, "sweep": None})
