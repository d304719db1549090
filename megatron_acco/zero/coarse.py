"""The quantized exchange of a coarse estimate. Runs in the lane.

A rank's local gradient sum travels as one code per owner; each owner adds its own sum as it is to what it decodes, in
fp32, in the order of the ranks. What comes back is the code of the difference between the estimate and the weights
that every rank shows already (theta_t): all ranks, the owner too, add the same decoded difference, so that the
replicas stay bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_acco.config import AccoConfig
from megatron_acco.zero.collectives import Exchange
from megatron_acco.zero.quantize import make_codec


class CoarseExchange:
    """Quantized reduce-scatter and all-gather over the ranks of an `Exchange`; nothing is quantized on one rank."""

    def __init__(self, exchange: Exchange, acco: AccoConfig, device: torch.device) -> None:
        """Quantize on tensors of `device` as the estimate_* options of `acco` say."""
        self._exchange = exchange
        self._codec = make_codec(
            acco.estimate_bits, acco.estimate_block_size, acco.estimate_stochastic_rounding, device
        )
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def scratch_bytes(self, elements: int) -> int:
        """Memory that the exchange of a flat buffer of `elements` needs beside it."""
        ranks = self._exchange.world_size
        return 2 * ranks * self._codec.payload_bytes(elements // ranks) if ranks > 1 else 0

    def seed(self, update: int) -> None:
        """The random numbers of stochastic rounding, those of a resumed run too, follow from update and rank."""
        self._codec.seed(update * self._exchange.world_size + self._exchange.rank)

    def reduce_scatter(self, flat: Tensor, shard: Tensor, factor: float) -> int:
        """shard <- factor * the sum over the ranks of this rank's slice of `flat`.

        Args:
            flat: [n], gradient dtype.
            shard: [n / world_size], fp32; overwritten.

        Returns:
            Bytes sent by this rank.
        """
        exchange = self._exchange
        parts = flat.chunk(exchange.world_size)
        if exchange.world_size == 1:
            shard.copy_(flat).mul_(factor)
            return 0
        codes, received = self._rows(shard)
        for rank, part in enumerate(parts):
            if rank != exchange.rank:
                self._codec.encode(part, codes[rank])
        sent = exchange.all_to_all(codes, received)
        for rank in range(exchange.world_size):
            if rank == exchange.rank:
                own = parts[rank]
                shard.add_(own, alpha=factor) if rank else shard.copy_(own).mul_(factor)
            else:
                self._codec.decode(received[rank], shard, accumulate=rank > 0, factor=factor)
        return sent

    def gather_differences(self, estimate: Tensor, base: Tensor, weights: Tensor) -> int:
        """weights <- base + the decoded difference between the estimates of all ranks and `base`.

        Args:
            estimate: this rank's slice of theta~, [n / world_size] fp32.
            base: theta_t as all ranks show it, [n], parameter dtype; the same bits on all ranks.
            weights: [n], parameter dtype; overwritten.

        Returns:
            Bytes sent by this rank.
        """
        exchange = self._exchange
        if exchange.world_size == 1:
            weights.copy_(estimate)
            return 0
        codes, _ = self._rows(estimate)
        self._codec.encode(estimate, codes[exchange.rank], minus=exchange.own_slice(base))
        sent = exchange.all_gather(codes.view(-1))
        of_ranks: Sequence[tuple[Tensor, ...]] = (weights.chunk(exchange.world_size), base.chunk(exchange.world_size))
        for code, out, plus in zip(codes, *of_ranks, strict=True):
            self._codec.decode(code, out, plus=plus)
        return sent

    def _rows(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Codes to send and codes received, [world_size, bytes] each; one buffer for all parameter groups."""
        length = self._codec.payload_bytes(shard.numel())
        size = 2 * self._exchange.world_size * length
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=shard.device)
        rows = self._buffer[:size].view(2, self._exchange.world_size, length)
        return rows[0], rows[1]
