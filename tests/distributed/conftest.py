"""Ranks shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.harness import RankPool, load_kernels


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable]:
    """`ranks(n)`: the pool of n gloo ranks of all tests here (started at first use, closed at the end)."""
    pools: dict[int, RankPool] = {1: RankPool(1)}
    # DeepSpeed compiles its CPU kernels at first use on a machine: not within the time limit of some test.
    pools[1].run(load_kernels, timeout=600.0)

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def doomed() -> Iterator[Any]:
    """Two ranks of which one will fail (a RankPool)."""
    pool = RankPool(2)
    yield pool
    pool.close()
