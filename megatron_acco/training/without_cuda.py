"""What megatron-core needs to run without CUDA: random-number streams, recomputation and device names on the CPU.

megatron-core keeps two streams of random numbers per rank. The default stream is equal on all ranks of a
tensor-parallel group (dropout of activations that every rank holds); the model-parallel stream differs per rank
(dropout of attention heads, and of everything between the linear layers under sequence parallelism). It keeps both in
CUDA generators; here both are states of torch's CPU generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

_MODEL_PARALLEL = "model-parallel-rng"


class CpuRngTracker(CudaRNGStatesTracker):
    """megatron-core's tracker of named streams, on torch's CPU generator."""

    def add(self, name: str, seed: int) -> None:
        """Start the stream `name` at `seed`."""
        assert name not in self.states_, name
        self._is_initialized = True
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """While inside, torch draws from the stream `name`. Forks of one stream must not be nested."""
        if name not in self.states_:
            raise RuntimeError(f"no random-number stream {name}; call seed_everything() before the model runs")
        default = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(default)


def support_cpu() -> None:
    """Make megatron-core's layers run on this machine's CPUs; nothing where there is CUDA. Idempotent.

    Three things are exchanged, each of which could only fail without CUDA: the tracker, the state of "the CUDA
    generator" that a recomputed segment restores beside torch's own (there is none), and the device on which the
    buffers of tensor-parallel collectives are allocated.
    """
    if torch.cuda.is_available() or isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, CpuRngTracker):
        return
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_cuda_rng_state = _no_state
    megatron_random._set_cuda_rng_state = _no_state
    torch.cuda.current_device = _cpu  # type: ignore[assignment]


def _no_state(*args: Any, **kwargs: Any) -> None:
    """The state of a generator that does not exist."""


def _cpu() -> str:
    return "cpu"
