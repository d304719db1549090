"""The GPT model: megatron-core's GPTModel, GPT-2 style or Llama style, on CPU or GPU."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_acco.training.attention import SdpaCoreAttention
from megatron_acco.training.options import option
from megatron_acco.training.replicated import HeadNorm, TorchNorm
from megatron_acco.training.without_cuda import support_cpu

# megatron-core 0.19 announces it with each model that is built. Who runs this package can do nothing about it: its
# dependencies bound the versions.
logging.getLogger(GPTModel.__module__).addFilter(lambda record: "GPTModel IS DEPRECATED" not in record.getMessage())

# The others need Transformer Engine or layers that this model has not.
_RECOMPUTED_MODULES = ("core_attn", "mlp")


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
    openai_gelu: bool = option(False, "GELU by OpenAI's tanh formula, as in GPT-2's published weights.")
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
        None, "Recompute activations in backward instead of keeping them.", choices=("full", "selective")
    )
    recompute_method: str | None = option(
        None, "Layers to recompute with --recompute-granularity full.", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(
        None, "Layers per recomputed block (uniform), or number of layers that are recomputed (block)."
    )
    recompute_modules: list[str] | None = option(
        None, "Parts to recompute with --recompute-granularity selective: core_attn (default), mlp."
    )
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
        if self.swiglu and self.openai_gelu:
            raise ValueError("--swiglu and --openai-gelu contradict each other; give one")
        if self.num_query_groups is not None and not self.group_query_attention:
            raise ValueError("--num-query-groups needs --group-query-attention")
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        self._check_recomputation()
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"--{name.replace('_', '-')} must be in [0, 1), got {getattr(self, name)}")

    def _check_recomputation(self) -> None:
        full = {"--recompute-method": self.recompute_method, "--recompute-num-layers": self.recompute_num_layers}
        for flag, value in full.items():
            if value is None and self.recompute_granularity == "full":
                raise ValueError(f"--recompute-granularity full needs {flag}")
            if value is not None and self.recompute_granularity != "full":
                raise ValueError(f"{flag} needs --recompute-granularity full")
        if self.recompute_num_layers is not None and not 1 <= self.recompute_num_layers <= self.num_layers:
            raise ValueError(
                f"--recompute-num-layers must be between 1 and --num-layers {self.num_layers}, got "
                f"{self.recompute_num_layers}"
            )
        if self.recompute_method == "uniform" and self.num_layers % (self.recompute_num_layers or 1):
            raise ValueError(
                f"--recompute-method uniform: --num-layers {self.num_layers} is not a multiple of "
                f"--recompute-num-layers {self.recompute_num_layers}"
            )
        if self.recompute_modules is not None:
            if self.recompute_granularity != "selective":
                raise ValueError("--recompute-modules needs --recompute-granularity selective")
            unknown = [name for name in self.recompute_modules if name not in _RECOMPUTED_MODULES]
            if unknown:
                raise ValueError(f"--recompute-modules {unknown[0]}: choose from {', '.join(_RECOMPUTED_MODULES)}")

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a model that does not split into `size` equal parts.

        Raises:
            ValueError: naming both arguments.
        """
        split = {
            "--num-attention-heads": self.num_attention_heads,
            "--num-query-groups": self.query_groups,
            "the width of the MLP (--ffn-hidden-size)": self.mlp_width,
        }
        for name, value in split.items():
            if value % size:
                raise ValueError(f"{name} {value} is not a multiple of --tensor-model-parallel-size {size}")

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


def build_model(
    options: ModelOptions,
    padded_vocab_size: int,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
) -> GPTModel:
    """This tensor-parallel rank's part of the model with its initial weights, on the current device.

    Needs `parallel_state` initialized and the random seeds set.

    Args:
        options: shape of the model.
        padded_vocab_size: rows of the embedding, see `ModelOptions.padded_vocab_size`.
        dtype: of the weights.
        sequence_parallel: split activations between the linear layers by sequence over the tensor-parallel ranks.
    """
    support_cpu()
    model = GPTModel(
        config=transformer_config(options, dtype, sequence_parallel),
        transformer_layer_spec=block_spec(options),
        vocab_size=padded_vocab_size,
        max_sequence_length=options.max_position_embeddings,
        share_embeddings_and_output_weights=not options.untie_embeddings_and_output_weights,
        position_embedding_type=options.position_embedding_type,
        rotary_percent=options.rotary_percent,
        rotary_base=options.rotary_base,
    )
    if "mlp" in (options.recompute_modules or ()):
        for layer in model.decoder.layers:
            layer.mlp.register_forward_hook(_return_a_copy_of_the_bias)
    # DeepSpeed writes it into every checkpoint, and its ds_to_universal asks for it there.
    model.universal_checkpoint_info = universal_checkpoint_info(model)
    model.register_state_dict_post_hook(_drop_empty_entries)
    return model


def _drop_empty_entries(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """megatron-core's layers have an extra state for Transformer Engine, None here; ds_to_universal fails on None."""
    for name in [name for name, value in state.items() if value is None]:
        del state[name]


def universal_checkpoint_info(model: torch.nn.Module) -> dict[str, Any]:
    """How DeepSpeed's ds_to_universal puts the parts of the tensor-parallel ranks together, by parameter name.

    The embedding is not declared a vocabulary tensor: the converter would drop the rows that pad the vocabulary, which
    take part in the softmax. Hence its padded size must be the same before and after.
    """
    rows, pairs, copies = [], [], []
    for name, parameter in model.named_parameters():
        pattern = re.escape(name) + "$"
        if not getattr(parameter, "tensor_model_parallel", False):
            copies.append(pattern)
        elif getattr(parameter, "partition_dim", 0) == 1:
            rows.append(pattern)
        elif (
            getattr(parameter, "partition_stride", 1) == 2
        ):  # gate and up projection of a gated MLP, one after the other
            pairs.append(pattern)
    return {
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: pairs,
        TP_REPLICATED_PARAMETER_PATTERNS: copies,
    }


def _return_a_copy_of_the_bias(mlp: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    """megatron-core's MLP returns its last bias for a later fused addition.

    If a recomputed segment returned the parameter itself, autograd would make it an output of that segment, and the
    segment's backward, which recomputes it, would call itself without end.
    """
    hidden, bias = outputs
    return hidden, bias if bias is None else bias.clone()


def transformer_config(options: ModelOptions, dtype: torch.dtype, sequence_parallel: bool = False) -> TransformerConfig:
    """megatron-core's description of the model; fusions that need CUDA extensions stay off."""
    return TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=options.query_groups,
        kv_channels=options.kv_channels,
        ffn_hidden_size=options.mlp_width,
        gated_linear_unit=options.swiglu,
        activation_func=_activation(options),
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
        recompute_modules=options.recompute_modules,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=options.use_cpu_initialization or not torch.cuda.is_available(),
        # The weight gradient is accumulated by the engine in its own buffers.
        gradient_accumulation_fusion=False,
    )


def _activation(options: ModelOptions) -> Callable[[torch.Tensor], torch.Tensor]:
    if options.swiglu:
        return torch.nn.functional.silu
    if options.openai_gelu:
        return functools.partial(torch.nn.functional.gelu, approximate="tanh")
    return torch.nn.functional.gelu


def block_spec(options: ModelOptions) -> TransformerBlockSubmodules:
    """megatron-core's own layers, with core attention and norms exchanged for ours."""
    layer = get_gpt_layer_local_spec(qk_layernorm=options.qk_layernorm, normalization=options.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if options.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * options.num_layers, layer_norm=TorchNorm)


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
