"""What counts on a tensor-parallel rank: ranges of split parameters in a shard, the two kinds of replicated parameters.

Covers the arithmetic of CASES B14 (replicated parameters once) and B15 (partial gradients summed) without processes;
tests/distributed/test_tensor_parallel.py has the real groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_acco.training.replicated import HeadNorm, TorchNorm
from megatron_acco.zero.buffers import Slot
from megatron_acco.zero.parallel import TensorParallel, counted_ranges


def parameter(size: int, **marks: bool) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(size))
    for name, value in marks.items():
        setattr(result, name, value)
    return result


def slots(*sizes_and_split: tuple[int, bool]) -> list[Slot]:
    result, offset = [], 0
    for size, split in sizes_and_split:
        result.append(Slot(0, offset, parameter(size, tensor_model_parallel=split)))
        offset += size
    return result


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ((0, 20), [(0, 8), (11, 16)]),  # neighbours are one range
        ((0, 10), [(0, 8)]),  # ends inside a replicated parameter
        ((4, 13), [(0, 4), (7, 9)]),  # cuts split parameters at both ends
        ((8, 11), []),  # replicated only
        ((16, 20), []),  # padding only
    ],
)
def test_split_parameters_count_wherever_the_shard_is_cut(
    partition: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    flat = slots((5, True), (3, True), (3, False), (5, True))
    assert counted_ranges(flat, 0, partition) == expected
    assert counted_ranges(flat, 1, partition) == []


@pytest.fixture
def pretended_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A group of two ranks of which this is the second; the other has the same numbers."""
    group = SimpleNamespace(rank=1, reduced=[])

    def all_reduce(tensor: torch.Tensor, group: SimpleNamespace) -> None:
        group.reduced.append(tensor.numel())
        tensor.mul_(2.0)

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield group


def test_partial_gradients_are_summed_averages_averaged_the_rest_left_alone(pretended_group: SimpleNamespace) -> None:
    parameters = [
        parameter(2, tensor_model_parallel=True),
        parameter(3, sequence_parallel=True),
        parameter(1),
        parameter(2, average_gradients_across_tp_domain=True),
    ]
    flat = [Slot(0, offset, p) for offset, p in zip((0, 2, 5, 6), parameters, strict=True)]
    parallel = TensorParallel(pretended_group, flat, [(0, 8)])
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.arange(1.0, 9.0, dtype=dtype)]
        parallel.sum_partial_gradients(grads)
        assert grads[0].tolist() == [1, 2, 6, 8, 10, 6, 7, 8] and grads[0].dtype is dtype
    # One exchange per call for all of them.
    assert pretended_group.reduced == [5, 5]


def test_replicated_parameters_count_on_the_first_rank_only(pretended_group: SimpleNamespace) -> None:
    flat, shard = slots((2, True), (3, False)), [torch.full((5,), 2.0)]
    assert TensorParallel(pretended_group, flat, [(0, 5)]).square_sum(shard) == pytest.approx(8.0)
    pretended_group.rank = 0
    assert TensorParallel(pretended_group, flat, [(0, 5)]).square_sum(shard) == pytest.approx(20.0)


def test_a_single_rank_exchanges_nothing() -> None:
    flat, grads = [Slot(0, 0, parameter(2, sequence_parallel=True))], [torch.ones(2)]
    parallel = TensorParallel(None, flat, [(0, 2)])
    parallel.sum_partial_gradients(grads)
    assert grads[0].tolist() == [1, 1] and parallel.square_sum(grads) == pytest.approx(2.0)
    assert parallel.complete(3.0, [[1.0]], torch.device("cpu")) == (3.0, [[1.0]])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_norms_mark_what_is_partial(kind: str, size: int, sequence_parallel: bool) -> None:
    config = SimpleNamespace(normalization=kind, sequence_parallel=sequence_parallel, tensor_model_parallel_size=size)
    layer, head = (norm(config=config, hidden_size=4, eps=1e-6) for norm in (TorchNorm, HeadNorm))
    assert type(layer).__name__ == type(head).__name__ == kind and layer.eps == 1e-6
    assert all(p.sequence_parallel == sequence_parallel for p in layer.parameters())
    # A rank normalizes its own heads only, with or without sequence parallelism.
    assert all(p.sequence_parallel == (size > 1) for p in head.parameters())
