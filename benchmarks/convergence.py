"""Validation loss at theta_t of several methods at equal tokens, on the embedded corpus; same seed, same clipping.

    .venv/bin/python benchmarks/convergence.py --methods zero1 acco --updates 240 --out runs/convergence

Runs the quickstart once per method into one folder (a finished run is reused), then prints the validation curves side
by side, the last loss of each relative to ZeRO-1's, and draws them. Exit code 1 if acco's last loss is further than
`--tolerance` from ZeRO-1's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "zero1"


def main() -> int:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["zero1", "acco"], choices=["zero1", "acco", "dpu", "wp"])
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "convergence")
    parser.add_argument("--tolerance", type=float, default=0.002, help="relative difference allowed to acco")
    args = parser.parse_args()
    out = args.out.resolve()
    for method in args.methods:
        command = ["bash", str(ROOT / "quickstart.sh"), "--method", method, "--updates", str(args.updates)]
        subprocess.run([*command, "--out", str(out)], check=True)
    curves = {method: validation_curve(out / method / "metrics.jsonl") for method in args.methods}
    print_curves(curves)
    draw(out, args.methods)
    return check(curves, args.tolerance)


def validation_curve(path: Path) -> dict[int, float]:
    """Validation loss by number of updates."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {r["iteration"]: r["lm_loss"] for r in records if r["kind"] == "validation"}


def print_curves(curves: dict[str, dict[int, float]]) -> None:
    """One line per evaluation, one column per method, with the difference to ZeRO-1 in percent."""
    methods = list(curves)
    print("updates  " + "  ".join(f"{method:>18}" for method in methods))
    for updates in sorted(set.intersection(*(set(curve) for curve in curves.values()))):
        cells = [_cell(curves[method][updates], curves.get(BASELINE, {}).get(updates)) for method in methods]
        print(f"{updates:7}  " + "  ".join(cells))


def _cell(loss: float, base: float | None) -> str:
    return f"{loss:18.4f}" if base is None else f"{loss:9.4f} {100 * (loss / base - 1):+7.3f}%"


def draw(out: Path, methods: list[str]) -> None:
    """All curves in one picture."""
    runs = [f"{method}={out / method / 'metrics.jsonl'}" for method in methods]
    command = [str(ROOT / ".venv" / "bin" / "megatron-acco"), "plot", *runs, "--out", str(out / "convergence.png")]
    subprocess.run(command, check=True)


def check(curves: dict[str, dict[int, float]], tolerance: float) -> int:
    """Whether acco ends where ZeRO-1 ends."""
    if BASELINE not in curves or "acco" not in curves:
        return 0
    last = max(set(curves[BASELINE]) & set(curves["acco"]))
    difference = curves["acco"][last] / curves[BASELINE][last] - 1
    print(f"acco against {BASELINE} after {last} updates: {100 * difference:+.3f} % (allowed {100 * tolerance:.1f} %)")
    return int(abs(difference) > tolerance)


if __name__ == "__main__":
    sys.exit(main())
