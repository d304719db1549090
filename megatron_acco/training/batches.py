"""Which samples go into which micro-batch on which rank, as a function of the samples consumed so far."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from megatron_acco.training.control import STOP_SIGNALS

Batch = dict[str, torch.Tensor]


class ConsumedSampleSampler(Sampler[list[int]]):
    """Micro-batches of one data-parallel rank, from `consumed` samples on.

    Samples are dealt in order: micro-batch k of the job takes `micro_batch_size * ranks` consecutive samples, and
    rank r the r-th slice of them. The order depends on nothing but the number of samples consumed, so a resumed
    run sees what the uninterrupted one would have seen.
    """

    def __init__(self, total: int, consumed: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self.total = total
        self.consumed = consumed
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.ranks
        offset = self.rank * self.micro_batch_size
        for start in range(self.consumed, self.total - stride + 1, stride):
            yield list(range(start + offset, start + offset + self.micro_batch_size))

    def __len__(self) -> int:
        return max(0, self.total - self.consumed) // (self.micro_batch_size * self.ranks)


class OwnStreamSampler(Sampler[list[int]]):
    """Micro-batches of one data-parallel rank that goes at its own speed, without end.

    Micro-batch k of rank r takes the samples that it would take if all ranks were equally fast; a rank that is faster
    than the others is further ahead in its own stream, which no other rank reads. Past the end of the samples, which
    only a rank much faster than the others can reach, its stream begins again.
    """

    def __init__(self, total: int, position: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        """
        Args:
            total: samples that there are.
            position: micro-batches that this rank has done before.
        """
        self.stride = micro_batch_size * ranks
        self.length = total // self.stride
        self.position = position
        self.micro_batch_size = micro_batch_size
        self.offset = rank * micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for index in itertools.count(self.position):
            start = index % self.length * self.stride + self.offset
            yield list(range(start, start + self.micro_batch_size))


class EvaluationSampler(Sampler[list[int]]):
    """This rank's share of a fixed set of samples: every `ranks`-th, the same at every evaluation."""

    def __init__(self, total: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self.own = range(rank, total, ranks)
        self.micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.own), self.micro_batch_size):
            yield list(self.own[start : start + self.micro_batch_size])

    def __len__(self) -> int:
        return -(-len(self.own) // self.micro_batch_size)


class _Collate:
    """Stack samples; refuse token ids that the embedding does not have, which would be a crash far from its cause."""

    def __init__(self, vocab_size: int, trim_multiple: int | None = None) -> None:
        """
        Args:
            vocab_size: ids that there are.
            trim_multiple: cut columns without loss off the end, down to a multiple of this; None: cut nothing.
        """
        self.vocab_size = vocab_size
        self.trim_multiple = trim_multiple

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        batch: Batch = default_collate(samples)
        for name in ("tokens", "labels"):
            low, high = (int(bound) for bound in torch.aminmax(batch[name]))
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"token id {high if high >= self.vocab_size else low} in the data is beyond the vocabulary of "
                    f"{self.vocab_size} ids; was the data written with another tokenizer?"
                )
        return batch if self.trim_multiple is None else self._trimmed(batch, self.trim_multiple)

    @staticmethod
    def _trimmed(batch: Batch, multiple: int) -> Batch:
        """What stands behind the last token with loss of any row changes nothing: attention looks back only."""
        with_loss = batch["loss_mask"].any(dim=0).nonzero()
        length = int(with_loss[-1]) + 1 if len(with_loss) else 1
        length = -(-length // multiple) * multiple
        return {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}


def _leave_signals_to_the_rank(worker: int) -> None:
    """The launcher sends signals to loader processes too; the rank still needs its data to finish the update."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def build_loader(
    dataset: Any,
    sampler: Sampler[list[int]],
    vocab_size: int,
    num_workers: int,
    seed: int,
    trim_multiple: int | None = None,
) -> DataLoader[Batch]:
    """A loader of micro-batches `{tokens, labels, loss_mask, position_ids}`, each [micro-batch, sequence].

    Args:
        dataset: of samples.
        sampler: which of them make up each micro-batch.
        vocab_size: ids that there are.
        num_workers: loader processes.
        seed: of the loader.
        trim_multiple: cut columns without loss off the end of a micro-batch, down to a multiple of this; None: none.

    It draws from a random generator of its own: creating one must not move the ranks' generators.
    """
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_Collate(vocab_size, trim_multiple),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_rank,
        generator=torch.Generator().manual_seed(seed),
        # The processes end with the iterator, whoever still holds the loader. At its exit Python would wait for those
        # that are left, and they ignore the signal by which it ends them.
        persistent_workers=False,
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, copied beside compute where memory is pinned."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
