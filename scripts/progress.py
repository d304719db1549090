"""A training run's progress, one line per evaluation or log record, followed in its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics.jsonl; a last line that is still being written is left out."""
    records = []
    if path.exists():
        for line in path.read_text().split("\n")[:-1]:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records


def validation_curve(path: Path) -> list[tuple[int, float]]:
    """(updates, validation loss) in the order of updates; of a repeated update the last record counts."""
    losses = {
        int(record["iteration"]): float(record["lm_loss"])
        for record in read_records(path)
        if record["kind"] == "validation" and record["lm_loss"] is not None
    }
    return sorted(losses.items())


class Progress:
    """Prints what has been added to a metrics.jsonl since the last look.

    Args:
        path: the file; it need not exist yet.
        updates: number of updates at the end of the run.
        start: number of updates that were there at the start; older records are not shown.
    """

    def __init__(self, path: Path, updates: int, start: int) -> None:
        self.path = path
        self.updates = updates
        self.start = start
        self.shown: set[tuple[str, int]] = set()
        self._size = -1

    def show_new(self) -> None:
        """Print the new records."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._size:
            return
        self._size = size
        for record in read_records(self.path):
            key = (record["kind"], record["iteration"])
            # The launcher cuts records past the checkpoint off before it writes the first new one.
            old = record["iteration"] <= self.start and self.start > 0
            if key not in self.shown and not old:
                print(self._line(record), flush=True)
            self.shown.add(key)

    def _line(self, record: dict[str, Any]) -> str:
        done = int(record["iteration"])
        head = f"  update {done:>{len(str(self.updates))}}/{self.updates}"
        loss = "n/a" if record["lm_loss"] is None else f"{record['lm_loss']:.3f}"
        if record["kind"] != "train":
            return f"{head}   {record['kind']} loss {loss}"
        parts = [head, f"training loss {loss}", f"{record['tokens_per_second']:,.0f} tokens/s"]
        hidden = record.get("communication_hidden_percent")
        if hidden is not None:
            parts.append(f"{hidden:.0f} % of communication hidden")
        if self.updates > done > self.start:
            parts.append(_duration((self.updates - done) * record["elapsed_ms_per_iteration"] / 1000.0) + " left")
        return "   ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min"
