"""The GPT model: megatron-core's GPTModel, GPT-2 style or Llama style, on CPU or GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_acco.training.attention import SdpaCoreAttention
from megatron_acco.training.options import option


@dataclass(frozen=True)
class ModelOptions:
    """Shape of the model, in Megatron's argument names."""

    num_layers: int = option(doc="Number of transformer layers.")
    hidden_size: int = option(doc="Width of the residual stream.")
    num_attention_heads: int = option(doc="Number of attention heads.")
    max_position_embeddings: int = option(doc="Longest sequence that the model takes.")
    ffn_hidden_size: int | None = option(
        None, "Width of the MLP (4 * hidden size; with --swiglu two thirds of that, rounded to a multiple of 64)."
    )
    kv_channels: int | None = option(None, "Size of an attention head (hidden size / number of heads).")
    group_query_attention: bool = option(False, "Share keys and values between groups of heads.")
    num_query_groups: int | None = option(None, "Number of key/value heads with --group-query-attention.")
    swiglu: bool = option(False, "SwiGLU instead of GELU in the MLP.")
    normalization: str = option("LayerNorm", "Normalization layer.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = option(1e-5, "Epsilon of the normalization layers.")
    position_embedding_type: str = option(
        "learned_absolute", "Position embedding.", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = option(10000, "Base of the rotary embedding.")
    rotary_percent: float = option(1.0, "Share of a head that the rotary embedding turns.")
    untie_embeddings_and_output_weights: bool = option(False, "Own weights for the output layer.")
    disable_bias_linear: bool = option(False, "No biases in the linear layers.")
    add_qkv_bias: bool = option(False, "Biases in the query/key/value projection despite --disable-bias-linear.")
    qk_layernorm: bool = option(False, "Normalize queries and keys.")
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.")
    hidden_dropout: float = option(0.1, "Dropout of the residual branches.")
    attention_dropout: float = option(0.1, "Dropout of the attention weights.")
    make_vocab_size_divisible_by: int = option(128, "The vocabulary is padded to a multiple of this.")
    recompute_granularity: str | None = option(
        None, "Recompute activations in backward instead of keeping them (CUDA only).", choices=("full", "selective")
    )
    recompute_method: str | None = option(
        None, "Layers to recompute with --recompute-granularity full.", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(None, "Layers per recomputed block.")
    use_cpu_initialization: bool = option(False, "Draw the initial weights on the CPU (always so without CUDA).")

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(self, name)}")
        for name in (
            "ffn_hidden_size", "kv_channels", "num_query_groups", "make_vocab_size_divisible_by", "rotary_base",
            "norm_epsilon", "init_method_std", "recompute_num_layers",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ValueError(f"--rotary-percent must be above 0 and at most 1, got {self.rotary_percent}")
        if self.position_embedding_type == "rope" and (self.kv_channels or self.hidden_size) % 2:
            raise ValueError("--position-embedding-type rope turns pairs: the head size must be even")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}"
            )
        if self.num_query_groups is not None and not self.group_query_attention:
            raise ValueError("--num-query-groups needs --group-query-attention")
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.recompute_granularity is not None and not torch.cuda.is_available():
            raise ValueError("--recompute-granularity needs CUDA: megatron-core's checkpointing keeps CUDA generators")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"--{name.replace('_', '-')} must be in [0, 1), got {getattr(self, name)}")

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, defaults resolved as Megatron does."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 or 64 if self.swiglu else 4 * self.hidden_size

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int = 1) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` ids."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple


def build_model(options: ModelOptions, padded_vocab_size: int, dtype: torch.dtype = torch.float32) -> GPTModel:
    """The model with its initial weights, on the current device.

    Needs `parallel_state` initialized and the random seeds set.

    Args:
        options: shape of the model.
        padded_vocab_size: rows of the embedding, see `ModelOptions.padded_vocab_size`.
        dtype: of the weights.
    """
    model = GPTModel(
        config=transformer_config(options, dtype),
        transformer_layer_spec=layer_spec(options),
        vocab_size=padded_vocab_size,
        max_sequence_length=options.max_position_embeddings,
        share_embeddings_and_output_weights=not options.untie_embeddings_and_output_weights,
        position_embedding_type=options.position_embedding_type,
        rotary_percent=options.rotary_percent,
        rotary_base=options.rotary_base,
    )
    if options.position_embedding_type == "rope" and not torch.cuda.is_available():
        model.rotary_pos_emb = RotaryEmbeddingOnCpu(
            kv_channels=model.config.kv_channels,
            rotary_percent=options.rotary_percent,
            rotary_base=options.rotary_base,
            use_cpu_initialization=True,
        )
    return model


class RotaryEmbeddingOnCpu(RotaryEmbedding):
    """megatron-core's rotary embedding without its move of the frequencies to a CUDA device."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of every position, [sequence, 1, 1, turned part of the head], fp32."""
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]


def transformer_config(options: ModelOptions, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's description of the model; fusions that need CUDA extensions stay off."""
    return TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=options.query_groups,
        kv_channels=options.kv_channels,
        ffn_hidden_size=options.mlp_width,
        gated_linear_unit=options.swiglu,
        activation_func=torch.nn.functional.silu if options.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not options.disable_bias_linear,
        add_qkv_bias=options.add_qkv_bias,
        qk_layernorm=options.qk_layernorm,
        normalization=options.normalization,
        layernorm_epsilon=options.norm_epsilon,
        init_method_std=options.init_method_std,
        hidden_dropout=options.hidden_dropout,
        attention_dropout=options.attention_dropout,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=options.use_cpu_initialization or not torch.cuda.is_available(),
        # The weight gradient is accumulated by the engine in its own buffers.
        gradient_accumulation_fusion=False,
    )


def layer_spec(options: ModelOptions) -> ModuleSpec:
    """megatron-core's own layer, with the core attention exchanged for `SdpaCoreAttention`."""
    spec = get_gpt_layer_local_spec(qk_layernorm=options.qk_layernorm, normalization=options.normalization)
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    return spec


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups by Megatron's rule: biases and norm weights (one-dimensional) take no weight decay.

    `wd_mult` is read by Megatron's parameter scheduler, `weight_decay` by schedulers that leave it alone.
    """
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if name.endswith(".bias") or parameter.ndim == 1 else decayed).append(parameter)
    groups = [
        {"name": "decay", "params": decayed, "wd_mult": 1.0},
        {"name": "no_decay", "params": plain, "wd_mult": 0.0, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
