"""The torture run of benchmarks/torture.py, with one kill (CASES B35, B43)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.torture import torture


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    figures = torture(tmp_path, kills=1, updates=100, save_interval=5, seed=25)
    assert figures.good and sum(figures.kills.values()) == 1 and figures.starts == 2
