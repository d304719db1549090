"""Parameters of which every tensor-parallel rank holds a copy, although each computes only a part of the gradient.

Under sequence parallelism a rank sees its part of the sequence outside the linear layers, and norms of queries and keys
see only the rank's own heads. Megatron marks such parameters with `sequence_parallel`; the rounds sum their gradients
over the tensor-parallel ranks once per half (`megatron_acco.zero.parallel`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """torch's LayerNorm or RMSNorm for megatron-core's layer specs, whose own wrapper refuses sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """A norm over the last `hidden_size` elements, its parameters marked."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = cls.sees_a_part(config)  # type: ignore[attr-defined]
        return norm

    @staticmethod
    def sees_a_part(config: TransformerConfig) -> bool:
        """Whether a rank's input is a part of the activations only."""
        return bool(config.sequence_parallel)


class HeadNorm(TorchNorm):
    """The same for queries and keys: the heads are split over the ranks."""

    @staticmethod
    def sees_a_part(config: TransformerConfig) -> bool:
        """See `TorchNorm`."""
        return bool(config.tensor_model_parallel_size > 1)


def sum_partial_gradients_in_backward(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of marked parameters over `group` in every backward.

    For DeepSpeed's own ZeRO-1, which reduces gradients as they are made and knows no marks.
    """

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.float()
        total = total.clone() if total is gradient else total
        dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    for parameter in module.parameters():
        if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(summed)
