"""`BlockCodec` as one Triton kernel per call, for accelerators: every value is read once and written once.

The codes and sums are those of the torch codec, bit for bit (IEEE division, rounding half to even, no fused
multiply-add); with stochastic rounding the random numbers are others, Philox words that follow from seed, call, block
and column. The kernels run on the current stream, allocate nothing and never wait for the device.
"""

# Arguments of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_acco.zero.quantize import SMALLEST_SCALE, BlockCodec

# A block lies in the registers of one program: one of 16,384 values in those of 512 threads.
LARGEST_BLOCK = 1 << 14
# Values per program, if blocks are shorter than that.
TILE = 1 << 12

# fp32: one more or less at this size is the last bit, so that adding and taking away rounds half to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _magnitude(x):
    """|x| as an integer of the same order: a maximum of such keeps infinities and NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _integers(x, scale, noise, levels: tl.constexpr, stochastic: tl.constexpr):
    """x / scale rounded to int32; 0 for NaN, whose scale is not finite either."""
    x = tl.div_rn(x, scale)
    if stochastic:
        # Not below 0 nor at 1; the sum may be rounded up to the next integer, from which the largest is kept away.
        uniform = (noise >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        x = tl.minimum(tl.maximum(tl.floor(x + uniform), -levels), levels)
    else:
        x = (x + _ROUNDER) - _ROUNDER
    return tl.where(x == x, x, 0.0).to(tl.int32)


@triton.jit
def _load(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["seed", "call"])
def _encode(
    source,
    minus,
    scales,
    codes,
    elements,
    blocks,
    seed,
    call,
    bits: tl.constexpr,
    block: tl.constexpr,
    stochastic: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """`rows` blocks of two halves, the second `block / 2` values behind the first; `columns` >= block / 2."""
    half: tl.constexpr = block // 2
    levels: tl.constexpr = (1 << (bits - 1)) - 1.0
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = (row < blocks)[:, None] & (column < half)[None, :]
    lower = row[:, None] * block + column[None, :]
    upper = lower + half
    in_lower, in_upper = inside & (lower < elements), inside & (upper < elements)
    a, b = _load(source, lower, in_lower), _load(source, upper, in_upper)
    if minus is not None:
        a -= _load(minus, lower, in_lower)
        b -= _load(minus, upper, in_upper)
    largest = tl.max(tl.maximum(_magnitude(a), _magnitude(b)), axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, levels)
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
    tl.store(scales + row, scale, mask=row < blocks)
    noise = 0
    more = 0
    if stochastic:
        # Two of the four words that a counter gives: one for each half of a block.
        place = tl.broadcast_to(column[None, :], [rows, columns])
        which = tl.broadcast_to(row.to(tl.int32)[:, None], [rows, columns])
        noise, more, _, _ = tl.philox(seed, place, which, place * 0 + call, place * 0)
    a = _integers(a, scale[:, None], noise, levels, stochastic)
    b = _integers(b, scale[:, None], more, levels, stochastic)
    if bits == 4:
        packed = (a + 8) | ((b + 8) << 4)
        tl.store(codes + row[:, None] * half + column[None, :], packed.to(tl.uint8), mask=inside)
    else:
        kind: tl.constexpr = codes.dtype.element_ty
        tl.store(codes + lower, a.to(kind), mask=inside)
        tl.store(codes + upper, b.to(kind), mask=inside)


@triton.jit
def _decode(
    scales,
    codes,
    plus,
    out,
    elements,
    blocks,
    factor,
    bits: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """The halves of blocks as in `_encode`; `plus` may be `out`."""
    half: tl.constexpr = block // 2
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = (row < blocks)[:, None] & (column < half)[None, :]
    lower = row[:, None] * block + column[None, :]
    upper = lower + half
    in_lower, in_upper = inside & (lower < elements), inside & (upper < elements)
    scale = tl.load(scales + row, mask=row < blocks, other=0.0)[:, None]
    if bits == 4:
        packed = tl.load(codes + row[:, None] * half + column[None, :], mask=inside, other=0).to(tl.int32)
        a, b = (packed & 15) - 8, (packed >> 4) - 8
    else:
        a = tl.load(codes + lower, mask=inside, other=0)
        b = tl.load(codes + upper, mask=inside, other=0)
    a = a.to(tl.float32) * scale * factor
    b = b.to(tl.float32) * scale * factor
    if plus is not None:
        a += _load(plus, lower, in_lower)
        b += _load(plus, upper, in_upper)
    tl.store(out + lower, a.to(out.dtype.element_ty), mask=in_lower)
    tl.store(out + upper, b.to(out.dtype.element_ty), mask=in_upper)


class TritonCodec(BlockCodec):
    """As its base, which see; blocks of at most LARGEST_BLOCK values."""

    def __init__(self, bits: int, block: int, stochastic: bool, device: torch.device) -> None:
        super().__init__(bits, block, False, device)
        self._stochastic = stochastic
        self._seed = self._calls = 0
        columns = triton.next_power_of_2(block // 2)
        self._rows = max(1, TILE // (2 * columns))
        self._kind = {"bits": bits, "block": block, "rows": self._rows, "columns": columns}
        # A fused multiply-add would round sums differently from the torch codec.
        self._options = {"num_warps": max(4, columns // 512), "enable_fp_fusion": False}

    def seed(self, seed: int) -> None:
        self._seed, self._calls = seed, 0

    def encode(self, source: Tensor, payload: Tensor, minus: Tensor | None = None) -> None:
        scales, codes = self._parts(payload)
        if len(scales) == 0:
            return
        self._calls += 1
        tensors = (source, minus, scales, codes)
        counts = (source.numel(), len(scales), self._seed, self._calls)
        _encode[self._grid(scales)](*tensors, *counts, stochastic=self._stochastic, **self._kind, **self._options)

    def decode(
        self,
        payload: Tensor,
        out: Tensor,
        *,
        plus: Tensor | None = None,
        accumulate: bool = False,
        factor: float = 1.0,
    ) -> None:
        scales, codes = self._parts(payload)
        if len(scales) == 0:
            return
        tensors = (scales, codes, out if accumulate else plus, out)
        _decode[self._grid(scales)](*tensors, out.numel(), len(scales), factor, **self._kind, **self._options)

    def _grid(self, scales: Tensor) -> tuple[int]:
        return (triton.cdiv(len(scales), self._rows),)
