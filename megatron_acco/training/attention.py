"""Core attention on torch's scaled_dot_product_attention, for CPU and GPU.

megatron-core's own `DotProductAttention` allocates through a CUDA-only buffer, and Transformer Engine needs CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention


class SdpaCoreAttention(torch.nn.Module):
    """Causal or unmasked attention of one layer; takes the arguments megatron-core gives a core attention module.

    Heads are split over the tensor-parallel ranks by the projections around this module, so it works on whatever
    number of heads it is given. With grouped queries, key and value carry fewer heads than the query.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError("scaled-dot-product core attention needs context parallel size 1")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attention of `query` over `key` and `value`.

        Args:
            query: [sequence, batch, heads, head size].
            key, value: [sequence, batch, query groups, head size].
            attention_mask: True where a key is hidden, [batch or 1, 1, sequence, keys]; it says all there is to say, so
                a causal one hides what comes later. None: what the mask type says.

        Returns:
            [sequence, batch, heads * head size], the query's dtype.
        """
        assert packed_seq_params is None and attention_bias is None, "packed sequences and attention bias"
        causal = attention_mask is None and (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal
        # Megatron masks mark what is hidden; SDPA masks mark what is seen.
        seen = None if attention_mask is None else ~attention_mask
        dropout = self.dropout if self.training else 0.0
        with self._random_numbers(dropout):
            # [s, b, h, d] -> [b, h, s, d]
            context = scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=seen,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)

    def _random_numbers(self, dropout: float) -> AbstractContextManager[None]:
        """Each tensor-parallel rank has heads of its own, hence dropout of its own.

        Under sequence parallelism the transformer block as a whole draws from the ranks' own streams already.
        """
        if dropout == 0.0 or self.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()
