"""Make the cluster, run the ranks on it, print and draw."""

from __future__ import annotations

import argparse
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.cluster import Cluster, ClusterError
from benchmarks.compare import figures, options, pictures


def main() -> int:
    """0: every method of every run was measured; 1: not so; 2: there can be no such cluster, or no such folder."""
    args = options.parse_arguments()
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(128 + signal.SIGTERM))
    try:
        common.check_folder(args.out)
        return _one(args) if args.sweep is None else _several(args)
    except KeyboardInterrupt:
        print("ERROR: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ClusterError, ValueError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
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
    stem = args.out / f"sweep-{name}"
    results: list[dict[str, Any] | None] = []
    lines: list[str] = []
    for value in values:
        print(f"\n==== {name} = {value:g}", flush=True)
        try:
            results.append(run(options.at(args, value)))
            print("\n" + "\n".join(figures.report(results[-1])), flush=True)
        except (ClusterError, RuntimeError) as error:
            print(f"ERROR: {error}", file=sys.stderr)
            results.append(None)
        # What there is so far: an end before the last value does not take the others along.
        done = values[: len(results)]
        lines = figures.summary(name, done, results, args.methods)
        figures.save(stem, lines, {"parameter": name, "values": done, "runs": results})
        pictures.draw_sweep(name, done, results, args.methods, stem.with_suffix(".png"))
    print("\n" + "\n".join(lines))
    return 1 if any(result is None or result["failed"] for result in results) else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks have measured (`rank.Rank.result`), with the figures of `figures.evaluate`.

    Raises:
        ClusterError, ValueError: there can be no such cluster.
        RuntimeError: the run as a whole failed.
    """
    cpu = args.cpu if len(args.cpu) > 1 else args.cpu[0]
    with Cluster(args.hosts, args.rate, cpu, pin=not args.no_pin, ssh=False) as cluster:
        folder = cluster.folder  # the next cluster removes it should this process be killed
        (folder / "arguments").write_bytes(pickle.dumps(args))
        command = [sys.executable, "-m", "benchmarks.compare.rank", str(folder)]
        job = cluster.launch(command, env={"OMP_NUM_THREADS": "1"})
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
