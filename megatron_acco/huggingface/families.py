"""The GPT-2 and Llama families: options, configurations and weights of both sides.

Whatever one side cannot express is refused by name. Tensors are rearranged, never computed with: there and back again
is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_acco.training.model import ModelOptions

State = dict[str, torch.Tensor]
FAMILIES = ("gpt2", "llama")

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


# ---- which family ---------------------------------------------------------------------------------------------------


def family_of(options: ModelOptions) -> str:
    """`gpt2` or `llama`, whichever can express the model.

    Raises:
        ValueError: neither; the message says what stands against each.
    """
    against = {"GPT-2": _against_gpt2(options), "Llama": _against_llama(options)}
    for family, reasons in zip(FAMILIES, against.values(), strict=True):
        if not reasons:
            return family
    told = "; ".join(f"{name} knows no {', no '.join(reasons)}" for name, reasons in against.items())
    raise ValueError(f"this model belongs to no family that can be exported: {told}")


def _against_gpt2(options: ModelOptions) -> list[str]:
    width = options.num_attention_heads * (options.kv_channels or 0)
    return _present(
        {
            f"--position-embedding-type {options.position_embedding_type}": (
                options.position_embedding_type != "learned_absolute"
            ),
            f"--normalization {options.normalization}": options.normalization != "LayerNorm",
            "--swiglu": options.swiglu,
            "grouped queries": options.query_groups != options.num_attention_heads,
            "--disable-bias-linear": options.disable_bias_linear,
            "--qk-layernorm": options.qk_layernorm,
            f"--kv-channels {options.kv_channels}": options.kv_channels is not None and width != options.hidden_size,
        }
    )


def _against_llama(options: ModelOptions) -> list[str]:
    return _present(
        {
            f"--position-embedding-type {options.position_embedding_type}": options.position_embedding_type != "rope",
            f"--normalization {options.normalization}": options.normalization != "RMSNorm",
            "MLP without --swiglu": not options.swiglu,
            f"--rotary-percent {options.rotary_percent:g}": options.rotary_percent != 1.0,
            "--qk-layernorm": options.qk_layernorm,
            "--add-qkv-bias beside --disable-bias-linear": options.add_qkv_bias and options.disable_bias_linear,
            "--hidden-size that is no multiple of the heads": bool(options.hidden_size % options.num_attention_heads),
        }
    )


def _present(reasons: Mapping[str, bool]) -> list[str]:
    return [reason for reason, present in reasons.items() if present]


# ---- options <-> configuration --------------------------------------------------------------------------------------


def configuration(options: ModelOptions, vocab_size: int, ids: Mapping[str, Any]) -> Any:
    """The transformers configuration of a model with `vocab_size` rows.

    Args:
        options: of the model.
        vocab_size: rows of its embedding.
        ids: special ids, such as `eos_token_id`.

    Raises:
        ValueError: see `family_of`.
    """
    if family_of(options) == "gpt2":
        from transformers import GPT2Config

        return GPT2Config(
            **ids,
            vocab_size=vocab_size,
            n_positions=options.max_position_embeddings,
            n_embd=options.hidden_size,
            n_layer=options.num_layers,
            n_head=options.num_attention_heads,
            n_inner=options.ffn_hidden_size,
            activation_function="gelu_new" if options.openai_gelu else "gelu",
            resid_pdrop=options.hidden_dropout,
            embd_pdrop=options.hidden_dropout,
            attn_pdrop=options.attention_dropout,
            layer_norm_epsilon=options.norm_epsilon,
            initializer_range=options.init_method_std,
            tie_word_embeddings=not options.untie_embeddings_and_output_weights,
        )
    from transformers import LlamaConfig

    return LlamaConfig(
        **ids,
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.mlp_width,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_attention_heads,
        num_key_value_heads=options.query_groups,
        head_dim=options.kv_channels or options.hidden_size // options.num_attention_heads,
        hidden_act="silu",
        max_position_embeddings=options.max_position_embeddings,
        initializer_range=options.init_method_std,
        rms_norm_eps=options.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(options.rotary_base)},
        attention_bias=not options.disable_bias_linear,
        mlp_bias=not options.disable_bias_linear,
        attention_dropout=options.attention_dropout,
        tie_word_embeddings=not options.untie_embeddings_and_output_weights,
    )


def model_options(config: Any, where: str) -> ModelOptions:
    """The options of the model that a transformers configuration describes.

    Args:
        config: the configuration.
        where: its folder, for messages.

    Raises:
        ValueError: another architecture, or a setting that this model cannot express.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(f"{where} holds a model of type {kind}; {' and '.join(FAMILIES)} can be imported")
    refused = _refused_gpt2(config) if kind == "gpt2" else _refused_llama(config)
    if refused:
        raise ValueError(f"{where} cannot be imported: this model has no {', no '.join(refused)}")
    return _gpt2_options(config) if kind == "gpt2" else _llama_options(config)


def _refused_gpt2(config: Any) -> list[str]:
    return _present(
        {
            f"activation_function {config.activation_function}": config.activation_function
            not in ("gelu", *_TANH_GELU),
            "scale_attn_weights false": not config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
            "add_cross_attention": config.add_cross_attention,
            "quantized weights": getattr(config, "quantization_config", None) is not None,
        }
    )


def _refused_llama(config: Any) -> list[str]:
    rope = dict(config.rope_parameters or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.pop("rope_type", "default")
    return _present(
        {
            f"rope scaling of type {kind}": kind != "default",
            f"rope setting {', '.join(sorted(rope))}": kind == "default" and bool(rope),
            f"rope_theta {theta}, which is no whole number": float(theta) != int(theta),
            f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
            f"attention_bias {config.attention_bias} beside mlp_bias {config.mlp_bias}": (
                bool(config.attention_bias) != bool(config.mlp_bias)
            ),
            "quantized weights": getattr(config, "quantization_config", None) is not None,
        }
    )


def _gpt2_options(config: Any) -> ModelOptions:
    inner = config.n_inner
    return ModelOptions(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        ffn_hidden_size=None if inner == 4 * config.n_embd else inner,
        openai_gelu=config.activation_function in _TANH_GELU,
        norm_epsilon=config.layer_norm_epsilon,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        init_method_std=config.initializer_range,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
    )


def _llama_options(config: Any) -> ModelOptions:
    grouped = config.num_key_value_heads != config.num_attention_heads
    usual = config.hidden_size // config.num_attention_heads
    return ModelOptions(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        ffn_hidden_size=config.intermediate_size,
        kv_channels=None if config.head_dim in (None, usual) else config.head_dim,
        group_query_attention=grouped,
        num_query_groups=config.num_key_value_heads if grouped else None,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        position_embedding_type="rope",
        rotary_base=int((config.rope_parameters or {}).get("rope_theta", 10000)),
        hidden_dropout=0.0,
        attention_dropout=float(config.attention_dropout or 0.0),
        init_method_std=config.initializer_range,
        disable_bias_linear=not config.mlp_bias,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
    )


# ---- weights --------------------------------------------------------------------------------------------------------

_EMBEDDING, _POSITIONS, _OUTPUT = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)
# Ours to theirs, once per model and once per layer; `.weight` and `.bias` follow. GPT-2 keeps the transpose of the
# matrices of its layers.
_ENDS = {
    "gpt2": {"decoder.final_layernorm": "transformer.ln_f"},
    "llama": {"decoder.final_layernorm": "model.norm"},
}
_LAYER = {"gpt2": "transformer.h.{}.", "llama": "model.layers.{}."}
_NAMES = {
    "gpt2": {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
    "llama": {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc2": "mlp.down_proj",
    },
}
_LLAMA_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_LLAMA_GATED = ("mlp.gate_proj", "mlp.up_proj")
_TABLES = {
    "gpt2": {_EMBEDDING: "transformer.wte.weight", _POSITIONS: "transformer.wpe.weight"},
    "llama": {_EMBEDDING: "model.embed_tokens.weight"},
}


def to_transformers(state: State, options: ModelOptions) -> State:
    """Our weights by transformers' names and in its layouts; a tied output layer is the embedding itself."""
    family = family_of(options)
    result = {theirs: state[ours] for ours, theirs in _TABLES[family].items()}
    result["lm_head.weight"] = state[_OUTPUT if options.untie_embeddings_and_output_weights else _EMBEDDING]
    for ours, theirs in _ENDS[family].items():
        result.update({f"{theirs}.{kind}": state[f"{ours}.{kind}"] for kind in _kinds(state, ours)})
    for number in range(options.num_layers):
        own, other = f"decoder.layers.{number}.", _LAYER[family].format(number)
        for ours, theirs in _NAMES[family].items():
            for kind in _kinds(state, own + ours):
                value = state[f"{own}{ours}.{kind}"]
                if ours.endswith("linear_qkv"):
                    value = torch.cat(_split_qkv(value, options))
                result[f"{other}{theirs}.{kind}"] = value.t().contiguous() if _turned(family, value) else value
        if family == "llama":
            for kind in _kinds(state, own + "mlp.linear_fc1"):
                parts = _split_qkv(state[f"{own}self_attention.linear_qkv.{kind}"], options)
                result.update({f"{other}{n}.{kind}": p for n, p in zip(_LLAMA_QKV, parts, strict=True)})
                gated = [half.contiguous() for half in state[f"{own}mlp.linear_fc1.{kind}"].chunk(2)]
                result.update({f"{other}{n}.{kind}": p for n, p in zip(_LLAMA_GATED, gated, strict=True)})
    return result


def from_transformers(state: State, options: ModelOptions) -> State:
    """The inverse of `to_transformers`."""
    family = family_of(options)
    result = {ours: state[theirs] for ours, theirs in _TABLES[family].items()}
    if options.untie_embeddings_and_output_weights:
        result[_OUTPUT] = state["lm_head.weight"]
    for ours, theirs in _ENDS[family].items():
        result.update({f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in _kinds(state, theirs)})
    for number in range(options.num_layers):
        own, other = f"decoder.layers.{number}.", _LAYER[family].format(number)
        for ours, theirs in _NAMES[family].items():
            for kind in _kinds(state, other + theirs):
                value = state[f"{other}{theirs}.{kind}"]
                value = value.t().contiguous() if _turned(family, value) else value
                if ours.endswith("linear_qkv"):
                    value = _fuse_qkv(value.chunk(3), options)
                result[f"{own}{ours}.{kind}"] = value
        if family == "llama":
            for kind in _kinds(state, other + _LLAMA_GATED[0]):
                parts = [state[f"{other}{name}.{kind}"] for name in _LLAMA_QKV]
                result[f"{own}self_attention.linear_qkv.{kind}"] = _fuse_qkv(parts, options)
                gated = [state[f"{other}{name}.{kind}"] for name in _LLAMA_GATED]
                result[f"{own}mlp.linear_fc1.{kind}"] = torch.cat(gated)
    return result


def _kinds(state: State, name: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{name}.{kind}" in state]


def _turned(family: str, value: torch.Tensor) -> bool:
    """GPT-2's layers are transformers' Conv1D, which keeps [in, out]."""
    return family == "gpt2" and value.ndim == 2


def _split_qkv(fused: torch.Tensor, options: ModelOptions) -> list[torch.Tensor]:
    """Queries, keys and values of all heads, from Megatron's order: the queries of a group, its key, its value."""
    groups, heads = options.query_groups, options.num_attention_heads
    size = options.kv_channels or options.hidden_size // heads
    by_group = fused.reshape(groups, heads // groups + 2, size, *fused.shape[1:])
    parts = by_group.split([heads // groups, 1, 1], dim=1)
    return [part.reshape(-1, *fused.shape[1:]).contiguous() for part in parts]


def _fuse_qkv(parts: Any, options: ModelOptions) -> torch.Tensor:
    """The inverse of `_split_qkv`."""
    groups, heads = options.query_groups, options.num_attention_heads
    size = options.kv_channels or options.hidden_size // heads
    by_group = [part.reshape(groups, -1, size, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(-1, *parts[0].shape[1:])
