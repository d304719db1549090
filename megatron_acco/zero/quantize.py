"""Block quantization: a flat tensor as 16-, 8- or 4-bit integers with one fp32 scale per block. No allocation per call.

    scale_b = max|x_b| / L,   q = round(x / scale_b) in [-L, L],   x ~ q * scale_b        L = 32767, 127 or 7

(symmetric, absmax per block; Dettmers et al. 2022). Two 4-bit values share a byte: value i of a block and value
i + block / 2. With stochastic rounding q = floor(x / scale_b + u), u uniform in [0, 1), whose mean is x / scale_b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch import Tensor

# Elements handled at once: the working memory stays in cache on a CPU, and small beside the tensor on an accelerator.
CPU_CHUNK, CHUNK = 1 << 18, 1 << 24
# Keeps blocks of zeros from being divided by zero.
SMALLEST_SCALE = 2.0**-120


class BlockCodec:
    """Encodes flat tensors of any float dtype into bytes and decodes them into sums.

    Infinities and NaN of a block come out as values that are not finite, somewhere in that block.
    """

    def __init__(self, bits: int, block: int, stochastic: bool, device: torch.device) -> None:
        """
        Args:
            bits: 16, 8 or 4.
            block: elements per scale, a multiple of 8.
            stochastic: round up or down at random instead of to nearest.
            device: of the tensors.
        """
        self._bits, self._block = bits, block
        self._levels = float((1 << (bits - 1)) - 1)
        self._blocks = max(1, (CPU_CHUNK if device.type == "cpu" else CHUNK) // block)
        self._device = device
        self._values = self._noise = self._low = self._nibbles = torch.empty(0)
        self._generator = torch.Generator(device) if stochastic else None

    def payload_bytes(self, elements: int) -> int:
        """Length of the code of `elements` elements."""
        blocks = -(-elements // self._block)
        return blocks * (self._block * self._bits // 8 + 4)

    def seed(self, seed: int) -> None:
        """Start the random numbers of stochastic rounding anew."""
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def encode(self, source: Tensor, payload: Tensor, minus: Tensor | None = None) -> None:
        """Write the code of `source` (or of `source - minus`) [n], any float dtype, to `payload` [payload_bytes(n)]."""
        scales, codes = self._parts(payload)
        for first, values, part in self._chunks(source.numel()):
            rows = slice(first, first + len(values))
            flat = values.view(-1)[: part.stop - part.start]
            flat.copy_(source[part])
            if minus is not None:
                flat.sub_(minus[part])
            values.view(-1)[len(flat) :].zero_()
            scale, low = scales[rows], self._low[: len(values)]
            torch.amax(values, dim=1, out=scale)
            torch.amin(values, dim=1, out=low)
            torch.maximum(scale, low.neg_(), out=scale)
            scale.div_(self._levels).clamp_(min=SMALLEST_SCALE)
            values.div_(scale[:, None])
            self._round(values)
            if self._bits == 4:
                half = self._block // 2
                values, upper = values[:, :half], values[:, half:]
                values.add_(upper, alpha=16.0).add_(8.0 * 17.0)
            codes[rows].copy_(values)

    def decode(
        self,
        payload: Tensor,
        out: Tensor,
        *,
        plus: Tensor | None = None,
        accumulate: bool = False,
        factor: float = 1.0,
    ) -> None:
        """out <- plus + factor * decoded; `out` itself is `plus` if `accumulate`; without either, plus is 0.

        Args:
            payload: [payload_bytes(n)], written by `encode`.
            out: [n], any float dtype; computed in fp32 and rounded once (fp32 if `accumulate`).
            plus: [n], any float dtype.
        """
        scales, codes = self._parts(payload)
        for first, values, part in self._chunks(out.numel()):
            rows = slice(first, first + len(values))
            code = codes[rows]
            if self._bits == 4:
                half, nibbles = self._block // 2, self._nibbles[: code.numel()].view_as(code)
                values[:, half:].copy_(torch.bitwise_right_shift(code, 4, out=nibbles))
                values[:, :half].copy_(torch.bitwise_and(code, 15, out=nibbles))
                values.sub_(8.0)
            else:
                values.copy_(code)
            values.mul_(scales[rows, None])
            flat, target = values.view(-1)[: part.stop - part.start], out[part]
            if factor != 1.0:
                flat.mul_(factor)
            if accumulate:
                target.add_(flat)
            else:
                target.copy_(flat if plus is None else flat.add_(plus[part]))

    def _round(self, values: Tensor) -> None:
        if self._generator is None:
            values.round_()
            return
        noise = self._noise[: values.numel()].view_as(values)
        noise.uniform_(generator=self._generator)
        # max|x| / (max|x| / L) can be one rounding above L, which noise would carry over to the next integer.
        values.add_(noise).floor_().clamp_(-self._levels, self._levels)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [blocks] fp32, then codes [blocks, ...]: bytes of two values each, or signed integers."""
        width = self._block * self._bits // 8
        blocks = payload.numel() // (width + 4)
        dtype = {16: torch.int16, 8: torch.int8, 4: torch.uint8}[self._bits]
        return payload[: 4 * blocks].view(torch.float32), payload[4 * blocks :].view(dtype).view(blocks, -1)

    def _chunks(self, elements: int) -> Iterator[tuple[int, Tensor, slice]]:
        """(first block, working memory [blocks, block] fp32, the elements) of every chunk of a tensor."""
        total = -(-elements // self._block)
        most = min(total, self._blocks)
        if self._values.numel() < most * self._block:
            self._values = torch.empty(most * self._block, device=self._device)
            self._low = torch.empty(most, device=self._device)
            if self._generator is not None:
                self._noise = torch.empty_like(self._values)
            if self._bits == 4:
                self._nibbles = torch.empty(most * self._block // 2, dtype=torch.uint8, device=self._device)
        for first in range(0, total, self._blocks):
            blocks = min(self._blocks, total - first)
            start = first * self._block
            part = slice(start, min(elements, start + blocks * self._block))
            yield first, self._values[: blocks * self._block].view(blocks, self._block), part


def make_codec(bits: int, block: int, stochastic: bool, device: torch.device) -> BlockCodec:
    """The codec for tensors of `device` with the arguments of `BlockCodec`: one kernel per call where Triton runs.

    Which one a rank has makes no difference to the others: what decoding gives is the same in both.
    """
    if not get_accelerator().is_triton_supported():
        return BlockCodec(bits, block, stochastic, device)
    try:
        from megatron_acco.zero.quantize_triton import LARGEST_BLOCK, TritonCodec

        if block <= LARGEST_BLOCK:
            codec = TritonCodec(bits, block, stochastic, device)
            # Compiles, which needs a C compiler; better now than in the first estimate.
            values = torch.ones(block, device=device)
            payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8, device=device)
            codec.encode(values, payload)
            codec.decode(payload, values)
            return codec
    except Exception as error:  # of Triton, its compilers and drivers: many kinds
        logger.warning(f"estimates are quantized without Triton, which is slower: {type(error).__name__}: {error}")
    return BlockCodec(bits, block, stochastic, device)
