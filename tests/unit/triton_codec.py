"""What test_quantize.py runs where Triton is installed: the kernels, on the CPU, and what compilers make of them.

python -m tests.unit.triton_codec interpret     (with TRITON_INTERPRET=1) against the torch codec, bit by bit
python -m tests.unit.triton_codec compile       for GPUs, none of which need be there
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import torch

from megatron_acco.zero import quantize_triton
from megatron_acco.zero.quantize import BlockCodec
from megatron_acco.zero.quantize_triton import LARGEST_BLOCK, TritonCodec

CPU = torch.device("cpu")
CASES = [(8, 8), (16, 40), (8, 40), (4, 40), (8, 256), (4, 256), (4, 1000), (16, 1024), (8, 4096), (4, LARGEST_BLOCK)]
LENGTHS = (1, 7, 333, 20001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes(codec: BlockCodec, source: torch.Tensor, minus: torch.Tensor | None = None) -> torch.Tensor:
    payload = torch.full((codec.payload_bytes(source.numel()) + 8,), 255, dtype=torch.uint8)
    codec.encode(source, payload[4:-4], minus)
    assert (payload[:4] == 255).all() and (payload[-4:] == 255).all(), "written outside of the payload"
    return payload[4:-4]


def cut(values: torch.Tensor) -> torch.Tensor:
    """To bfloat16 as the interpreter does it, by leaving bits out; a GPU rounds."""
    return (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def like_torch(bits: int, block: int) -> None:
    torch_codec, codec = BlockCodec(bits, block, False, CPU), TritonCodec(bits, block, False, CPU)
    generator = torch.Generator().manual_seed(bits + block)
    for (turn, length), dtype in zip(enumerate(LENGTHS), itertools.cycle(DTYPES), strict=False):
        powers = 10.0 ** torch.randint(-4, 3, (length,), generator=generator)
        source = (torch.randn(length, generator=generator) * powers).to(dtype)
        source[length // 3 : length // 2] = 0.0
        source[length // 2 : length // 2 + 9] *= -0.0
        base = torch.randn(length, generator=generator).to(DTYPES[(turn + 1) % 3])
        for minus in (None, base):
            payload = codes(torch_codec, source, minus)
            assert torch.equal(payload, codes(codec, source, minus)), (length, dtype, minus is None)
        want, got = torch.randn(2, 1, generator=generator).expand(2, length).clone()
        got.copy_(want)
        for summed, one in ((want, torch_codec), (got, codec)):
            one.decode(payload, summed, accumulate=True, factor=0.3)
        assert torch.equal(want, got), "sum"
        torch_codec.decode(payload, want, plus=base)
        shown = torch.empty(length, dtype=dtype)
        codec.decode(payload, shown, plus=base)
        assert torch.equal(shown, cut(want) if dtype is torch.bfloat16 else want.to(dtype)), "plus"


def extremes(bits: int) -> None:
    codec, torch_codec = TritonCodec(bits, 8, False, CPU), BlockCodec(bits, 8, False, CPU)
    tiny = torch.tensor(
        [1e-45, -1e-45, 1e-40, -0.0, 0.0, 1e-38, -2e-38, 1e-36, *[1e-44] * 8, *[3e38, -3e38, 1e-38, 1.0] * 2]
    )
    assert torch.equal(codes(codec, tiny), codes(torch_codec, tiny))
    # (n + 1/2) steps: half to even.
    levels = 2 ** (bits - 1) - 1
    halves = torch.tensor([float(levels), 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5])
    assert torch.equal(codes(codec, halves), codes(torch_codec, halves))
    for wrong in (float("inf"), float("-inf"), float("nan")):
        source = torch.ones(24)
        source[10] = wrong
        out = torch.zeros(24)
        codec.decode(codes(codec, source), out)
        assert not out[8:16].isfinite().all() and torch.equal(out[[*range(8), *range(16, 24)]], torch.ones(16))


def stochastic(bits: int) -> None:
    codec, levels = TritonCodec(bits, 64, True, CPU), 2 ** (bits - 1) - 1
    source = torch.full((64 * 500,), 0.3 / levels)
    source[::64] = -1.0

    def decoded() -> torch.Tensor:
        out = torch.empty_like(source)
        codec.decode(codes(codec, source), out)
        return out

    codec.seed(5)
    first, second = decoded(), decoded()
    rows = (first.view(-1, 64)[:, 1:] * levels).round()
    assert set(rows.flatten().tolist()) == {0.0, 1.0} and bool((first[::64] == -1.0).all())
    assert abs(float(rows.mean()) - 0.3) < 0.01
    assert float(rows.mean(0).sub(0.3).abs().max()) < 0.1 and float(rows.mean(1).sub(0.3).abs().max()) < 0.3
    lower, upper = rows[:, :31], rows[:, 32:]
    assert abs(float(((lower - 0.3) * (upper - 0.3)).mean())) < 0.01, "the halves of a block share their noise"
    assert not torch.equal(first, second)
    codec.seed(5)
    assert torch.equal(decoded(), first) and torch.equal(decoded(), second)
    codec.seed(6)
    assert not torch.equal(decoded(), first)
    largest = torch.rand(64 * 64) + 0.01
    codec.decode(codes(codec, torch.cat([largest, -largest])), out := torch.empty(2 * len(largest)))
    assert bool((out[: len(largest)] >= 0).all()) and bool((out[len(largest) :] <= 0).all()), "overflow"


def compiled(codec: TritonCodec, kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> str:
    """PTX of a kernel whose tensors and sizes are aligned, which goes through the assembler, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or n == "elements"},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=codec._options).asm["ptx"]


def compile_all() -> None:
    for capability, (bits, code) in itertools.product((80, 90), ((8, "*i8"), (4, "*u8"))):
        codec = TritonCodec(bits, 256, False, CPU)
        counts = {"elements": "i32", "blocks": "i32"}
        encode = compiled(
            codec,
            quantize_triton._encode,
            {
                "source": "*bf16",
                "minus": "*fp32",
                "scales": "*fp32",
                "codes": code,
                **counts,
                "seed": "i32",
                "call": "i32",
            },
            {**codec._kind, "stochastic": bits == 4},
            capability,
        )
        decode = compiled(
            codec,
            quantize_triton._decode,
            {"scales": "*fp32", "codes": code, "plus": "*bf16", "out": "*bf16", **counts, "factor": "fp32"},
            codec._kind,
            capability,
        )
        assert "div.rn.f32" in encode and "div.full" not in encode and "div.approx" not in encode
        assert "cvt.rn.bf16" in decode
        for ptx in (encode, decode):
            assert "fma.rn.f32" not in ptx, "a fused multiply-add rounds otherwise"
            assert re.search(r"ld\.global\.v[24]", ptx), "loads are not wide"


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        for case in CASES:
            like_torch(*case)
        for width in (16, 8, 4):
            extremes(width)
        for width in (8, 4):
            stochastic(width)
