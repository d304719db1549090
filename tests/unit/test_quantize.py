"""Block quantization against the same arithmetic written for one block at a time in numpy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_acco.zero.quantize as quantize
from megatron_acco.zero.quantize import BlockCodec, make_codec

CPU = torch.device("cpu")


def decoded(values: np.ndarray, bits: int, block: int) -> np.ndarray:
    """What comes out: to the nearest of 2^bits - 1 steps between -max and max of each block."""
    levels, out = np.float32(2 ** (bits - 1) - 1), np.zeros(len(values), dtype=np.float32)
    for start in range(0, len(values), block):
        x = values[start : start + block].astype(np.float32)
        scale = np.abs(x).max() / levels
        out[start : start + block] = np.rint(x / scale) * scale if scale > 0 else 0.0
    return out


def code(codec: BlockCodec, source: torch.Tensor, minus: torch.Tensor | None = None) -> torch.Tensor:
    payload = torch.full((codec.payload_bytes(source.numel()),), 255, dtype=torch.uint8)
    codec.encode(source, payload, minus)
    return payload


def there_and_back(codec: BlockCodec, source: torch.Tensor) -> torch.Tensor:
    out = torch.full((source.numel(),), torch.nan)
    codec.decode(code(codec, source), out)
    return out


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tensor of a few hundred elements is many chunks."""
    monkeypatch.setattr(quantize, "CPU_CHUNK", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.usefixtures("small_chunks")
def test_every_block_is_rounded_to_its_own_steps(bits: int, block: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits + block)
    codec = BlockCodec(bits, block, False, CPU)
    for elements in (1, 7, 64, 65, 333):
        source = (torch.randn(elements, generator=generator) * 10.0 ** torch.randint(-4, 3, (elements,))).to(dtype)
        want = decoded(source.float().numpy(), bits, block)
        assert np.allclose(there_and_back(codec, source).numpy(), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("bits", "bytes_"), [(16, 528), (8, 272), (4, 144)])
def test_length_of_the_code(bits: int, bytes_: int) -> None:
    """256 values and one fp32 scale, twice: 2 x (256 b / 8 + 4) / 2 bytes each."""
    codec = BlockCodec(bits, 256, False, CPU)
    assert codec.payload_bytes(512) == 2 * (32 * bits + 4)
    assert codec.payload_bytes(1) == codec.payload_bytes(256) == {528: 516, 272: 260, 144: 132}[bytes_]
    assert codec.payload_bytes(0) == 0


def test_all_values_of_four_bits_share_bytes() -> None:
    codec = BlockCodec(4, 16, False, CPU)
    source = torch.tensor([float(v) for v in range(-7, 8)] + [7.0])
    assert torch.equal(there_and_back(codec, source), source)
    assert torch.equal(there_and_back(codec, source.flip(0)), source.flip(0))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_sums_and_differences(bits: int) -> None:
    codec = BlockCodec(bits, 8, False, CPU)
    a, b, base = torch.randn(21), torch.randn(21), torch.randn(21).bfloat16()
    of_a, of_b = there_and_back(codec, a), there_and_back(codec, b)
    total = torch.empty(21)
    codec.decode(code(codec, a), total, factor=0.5)
    codec.decode(code(codec, b), total, accumulate=True, factor=0.5)
    assert torch.allclose(total, (of_a + of_b) / 2, atol=1e-7)
    difference, shown = code(codec, a, minus=base), torch.empty(21, dtype=torch.bfloat16)
    codec.decode(difference, shown, plus=base)
    want = base.float() + there_and_back(codec, a - base.float())
    assert torch.equal(shown, want.bfloat16()), "rounded once"


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_zeros_tiny_values_and_what_is_not_finite(bits: int) -> None:
    codec = BlockCodec(bits, 8, False, CPU)
    assert torch.equal(there_and_back(codec, torch.zeros(16)), torch.zeros(16))
    assert there_and_back(codec, torch.full((16,), 1e-44)).abs().max() <= 1e-44
    for wrong in (float("inf"), float("-inf"), float("nan")):
        source = torch.ones(24)
        source[10] = wrong
        out = there_and_back(codec, source)
        assert not out[8:16].isfinite().all() and torch.equal(out[[*range(8), *range(16, 24)]], torch.ones(16))


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_right_on_average_and_follows_its_seed(bits: int) -> None:
    codec, levels = BlockCodec(bits, 64, True, CPU), 2 ** (bits - 1) - 1
    source = torch.full((64 * 500,), 0.3 * 1.0 / levels)
    source[::64] = -1.0
    codec.seed(5)
    first = there_and_back(codec, source)
    inner = torch.ones(len(source), dtype=torch.bool)
    inner[::64] = False
    assert set((first[inner] * levels).round().tolist()) == {0.0, 1.0}
    assert first[inner].mean() == pytest.approx(0.3 / levels, rel=0.05)
    assert torch.equal(first[~inner], source[~inner]), "the largest of a block has a step of its own"
    assert not torch.equal(there_and_back(codec, source), first)
    codec.seed(5)
    assert torch.equal(there_and_back(codec, source), first)


def test_the_largest_value_never_overflows() -> None:
    """max / (max / L) may come out one rounding above L."""
    for bits in (16, 8, 4):
        codec = BlockCodec(bits, 8, True, CPU)
        source = torch.rand(8 * 4096) + 0.01
        out = there_and_back(codec, torch.cat([source, -source]))
        assert (out[: len(source)] >= 0).all() and (out[len(source) :] <= 0).all()


TRITON = "megatron_acco.zero.quantize_triton"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator on which Triton runs."""
    monkeypatch.setattr(quantize, "get_accelerator", lambda: SimpleNamespace(is_triton_supported=lambda: True))


def triton_codec(monkeypatch: pytest.MonkeyPatch, encode: object) -> type[BlockCodec]:
    kernels = ModuleType(TRITON)
    kernels.LARGEST_BLOCK, kernels.TritonCodec = 64, type("TritonCodec", (BlockCodec,), {"encode": encode})
    monkeypatch.setitem(sys.modules, TRITON, kernels)
    return kernels.TritonCodec


def test_kernels_are_taken_where_they_run_and_can(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = triton_codec(monkeypatch, BlockCodec.encode)
    assert type(make_codec(8, 64, True, CPU)) is BlockCodec, "on a CPU"
    monkeypatch.setattr(quantize, "get_accelerator", lambda: SimpleNamespace(is_triton_supported=lambda: True))
    assert type(make_codec(8, 64, True, CPU)) is kind
    assert type(make_codec(8, 72, True, CPU)) is BlockCodec


@pytest.mark.usefixtures("accelerator")
def test_without_triton_or_its_compiler_torch_quantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(quantize.logger, "warning", said.append)

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    triton_codec(monkeypatch, fail)
    assert type(make_codec(8, 64, False, CPU)) is BlockCodec
    monkeypatch.setitem(sys.modules, TRITON, None)
    assert type(make_codec(8, 64, False, CPU)) is BlockCodec
    assert "Failed to find C compiler" in said[0] and "ModuleNotFoundError" in said[1]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (part of torch for CUDA)"
)
@pytest.mark.parametrize("what", ["interpret", "compile"])
def test_triton_kernels(what: str) -> None:
    """Bit by bit what the torch codec gives, and for GPUs the instructions that this takes."""
    env = {**os.environ, "TRITON_INTERPRET": "1" if what == "interpret" else "0"}
    command = [sys.executable, "-m", "tests.unit.triton_codec", what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
