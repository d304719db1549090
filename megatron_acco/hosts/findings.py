"""What a check of hosts has found, one line each."""

from __future__ import annotations


class Findings:
    """Findings in the order in which they were made, printed at once."""

    def __init__(self) -> None:
        self.problems = 0

    def ok(self, text: str) -> None:
        """Nothing to do."""
        print(f"ok       {text}", flush=True)

    def warning(self, text: str) -> None:
        """A run can start, but."""
        print(f"WARNING  {text}", flush=True)

    def problem(self, text: str) -> None:
        """A run cannot start."""
        self.problems += 1
        print(f"PROBLEM  {text}", flush=True)

    def end(self) -> int:
        """Say the result; the exit code."""
        if self.problems:
            print(f"a run cannot start: {self.problems} problem{'s' if self.problems > 1 else ''}", flush=True)
            return 1
        print("a run can start", flush=True)
        return 0
