"""Make the cluster, run the ranks on it, print and draw."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, ClusterError
from benchmarks.compare import figures, options, pictures


def main() -> int:
    """0: every method of every run was measured; 1: not so; 2: there can be no such cluster."""
    args = options.parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        return _one(args) if args.sweep is None else _several(args)
    except (ClusterError, ValueError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1


def _one(args: argparse.Namespace) -> int:
    result = run(args)
    lines = figures.report(result)
    print("\n" + "\n".join(lines))
    figures.save(args.out / "compare", lines, result)
    pictures.draw(result, args.out / "compare.png")
    return 1 if result["failed"] else 0


def _several(args: argparse.Namespace) -> int:
    name, values = args.sweep
    results: list[dict[str, Any] | None] = []
    for value in values:
        print(f"\n==== {name} = {value:g}", flush=True)
        try:
            result = run(options.at(args, value))
        except (ClusterError, RuntimeError) as error:
            print(f"ERROR: {error}", file=sys.stderr)
            results.append(None)
            continue
        results.append(result)
        print("\n" + "\n".join(figures.report(result)), flush=True)
    lines = figures.summary(name, values, results, args.methods)
    print("\n" + "\n".join(lines))
    stem = args.out / f"sweep-{name}"
    figures.save(stem, lines, {"parameter": name, "values": values, "runs": results})
    pictures.draw_sweep(name, values, results, args.methods, stem.with_suffix(".png"))
    return 1 if any(result is None or result["failed"] for result in results) else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks have measured (`rank.Rank.result`), with the figures of `figures.evaluate`.

    Raises:
        ClusterError, ValueError: there can be no such cluster.
        RuntimeError: the run as a whole failed.
    """
    cpu = args.cpu if len(args.cpu) > 1 else args.cpu[0]
    with (
        Cluster(args.hosts, args.rate, cpu, pin=not args.no_pin, ssh=False) as cluster,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(args))
        job = cluster.launch([sys.executable, "-m", "benchmarks.compare.rank", name], env={"OMP_NUM_THREADS": "1"})
        try:
            codes = job.wait(args.limit, poll=lambda: _set_rate(cluster, folder))
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the run did not end within {args.limit:g} s (--limit)") from error
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}; what the first of them said is above")
        return figures.evaluate(json.loads((folder / "result").read_text()))


def _set_rate(cluster: Cluster, folder: Path) -> None:
    """Set the rate that rank 0 asks for."""
    request = folder / "request"
    if not request.exists():
        return
    for host in range(len(cluster)):
        cluster.set_rate(host, request.read_text())
    request.rename(folder / "done")


if __name__ == "__main__":
    sys.exit(main())
