"""What may stand in a DeepSpeed JSON beside an enabled `acco` section.

Closed by default: a key is either known to work (or to have no effect) with ACCO, or has a condition here, or must
have the value that switches it off. So a feature that a later DeepSpeed adds is refused until it has been looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_acco.config import SECTION, acco_config
from megatron_acco.ds_json.batch import MICRO, STEPS, TRAIN
from megatron_acco.ds_json.check import check_keys, check_resolved, describe
from megatron_acco.ds_json.optimizers import check_acco_optimizer
from megatron_acco.ds_json.precision import check_acco_precision

_SWITCH_BACK = 'or set "acco": {"enabled": false} to train with DeepSpeed\'s own ZeRO'

# Top-level keys that ACCO honours, and those that do not touch what it does (logging, profiling, data loading).
_WORKS = frozenset(
    {
        SECTION, TRAIN, MICRO, STEPS, "gradient_clipping", "scheduler", "steps_per_print", "log_level", "dump_state",
        "disable_python_gc", "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger",
        "tensorboard", "wandb", "csv_monitor", "comet", "timers", "activation_checkpointing", "aio",
        "dataloader_drop_last", "vocabulary_size", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "seq_parallel_communication_data_type", "allgather_size",
    }
)  # fmt: skip

# Fields of zero_optimization that only steer DeepSpeed's own exchange of stages 1 and 2 (ACCO's lane has its own),
# that act in stage 3 only, or that tune offloading, which is refused.
_ZERO_NO_EFFECT = frozenset(
    {
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "ignore_unused_parameters", "sub_group_size",
        "cpu_offload_use_pin_memory", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
        "allgather_sequential", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    }
)  # fmt: skip

# Why a field of zero_optimization must keep its default.
_ZERO_WHY = {
    "compute_grad_norm": "ACCO's rounds need the norm for clipping and for the log; leave it true",
    "zenflow": "ZenFlow replaces the ZeRO optimizer that ACCO extends; remove it",
    "cpu_offload": "optimizer offload is not supported; remove it",
    "cpu_offload_param": "parameter offload is not supported; remove it",
    "round_robin_gradients": "it serves offloading, and has not been tried with ACCO; leave it false",
    "parameter_alignment": "it has not been tried with ACCO; leave it false",
    "elastic_checkpoint": "ACCO resumes on any number of ranks without it; leave it false",
    "load_from_fp32_weights": "ACCO resumes from the fp32 masters; leave it true",
    "legacy_stage1": "DeepSpeed has removed it; leave it out",
    "zero_hpz_partition_size": "it acts in ZeRO stage 3 only; leave it out",
    "zero_quantized_weights": "it acts in ZeRO stage 3 only; leave it out",
    "zero_quantized_nontrainable_weights": "it acts in ZeRO stage 3 only; leave it out",
    "zero_quantized_gradients": "ACCO's rounds do not quantize; leave it out",
}

# What to do about sections that are refused when switched on.
_SECTION_WHY = {
    "torch_autocast": 'autocast is not supported; use "bf16": {"enabled": true}',
    "amp": 'Apex AMP is not supported; use "bf16": {"enabled": true}',
    "hybrid_engine": "it replaces the engine that ACCO extends; remove it",
    "elasticity": "the batch triple must be fixed; remove it and set the batch sizes",
    "expert_parallel": "mixture-of-experts is not supported; remove it",
    "autotuning": "run the autotuner without ACCO, then add the section; remove it",
    "data_efficiency": "its curriculum and routing have not been tried with ACCO; remove it",
    "curriculum_learning": "it has not been tried with ACCO; remove it",
    "progressive_layer_drop": "it has not been tried with ACCO; remove it",
    "eigenvalue": "it needs gradients that ACCO does not keep; remove it",
    "nebula": "its asynchronous saving has not been tried with ACCO; remove it",
    "weight_quantization": "quantized weights are not supported; remove it",
    "datastates_ckpt": "its asynchronous saving has not been tried with ACCO; remove it",
}

# Sections that DeepSpeed acts on however little is in them.
_ON_WHEN_PRESENT = frozenset({"weight_quantization", "datastates_ckpt"})

# Plain keys that must keep the value given here, and why.
_PLAIN: dict[str, tuple[Any, str]] = {
    "managed_gradient_accumulation": (True, "ACCO needs DeepSpeed to count the micro-batches; leave it true"),
    "prescale_gradients": (False, "ACCO divides once, by the number of micro-batches; leave it false"),
    "gradient_predivide_factor": (1, "ACCO divides once, by the number of micro-batches; leave it 1.0"),
    "gradient_allreduce_op": ("mean", 'ACCO averages over the micro-batches of all ranks; leave it "mean"'),
    "sparse_gradients": (False, "sparse gradients are not supported; leave it false"),
    "disable_allgather": (False, "ACCO gathers the weights in its rounds; leave it false"),
    "use_data_before_expert_parallelism": (False, "mixture-of-experts is not supported; leave it false"),
    "graph_harvesting": (False, "it is not supported; leave it false"),
    "sequence_parallel_size": (1, "sequence parallelism is not supported; leave it out"),
}


def check_acco_support(config: Mapping[str, Any]) -> None:
    """Refuse everything that does not work, or has not been tried, together with an enabled `acco` section.

    Needs no process group: takes the JSON as parsed (or the dictionary given to initialize). Does nothing if the
    section is absent or disabled.

    Raises:
        ValueError: naming the key, and what to do instead.
    """
    acco = acco_config(config)
    if acco is None:
        return
    check_keys(config)
    # DeepSpeed drops an "auto" of its stage 3 fields, which have no effect here; others would reach the optimizer.
    check_resolved(config, ignore=("zero_optimization.stage3_",))
    _check_zero(config.get("zero_optimization"))
    check_acco_precision(config)
    for key, value in config.items():
        if key in _CHECKED_BY:
            _CHECKED_BY[key](value)
        elif key in _PLAIN:
            _check_plain(key, value)
        elif key not in _WORKS and key not in _OWN_CHECK and not _is_off(key, value):
            why = _SECTION_WHY.get(key, "it is not supported; remove it")
            raise ValueError(f'"{key}" together with "acco": {why}, {_SWITCH_BACK}')
    check_acco_optimizer(config)
    steps = _steps(config)
    if steps is not None:
        acco.check_accumulation_steps(steps)


def _steps(config: Mapping[str, Any]) -> int | None:
    """gradient_accumulation_steps, where the JSON alone tells it."""
    steps = config.get(STEPS)
    if steps is None and (config.get(MICRO) is None) != (config.get(TRAIN) is None):
        return 1  # DeepSpeed's rule when one of the two is given alone
    return steps if isinstance(steps, int) else None


def _check_plain(key: str, value: Any) -> None:
    accepted, why = _PLAIN[key]
    found = value.lower() if isinstance(value, str) else value
    if found != accepted:
        raise ValueError(f'"{key}" must be {describe(accepted)} together with "acco", got {describe(value)}: {why}')


def _is_off(key: str, value: Any) -> bool:
    """A section or flag that switches nothing on."""
    if key in _ON_WHEN_PRESENT:
        return value is False
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value is False


# ---- zero_optimization -------------------------------------------------------------------------------------------


def zero_stage(zero: Any) -> int:
    """The ZeRO stage of a `zero_optimization` value: an object, absent, or the boolean of old."""
    if isinstance(zero, Mapping):
        stage = zero.get("stage", 0)
        return stage if isinstance(stage, int) else -1
    return 1 if zero is True else 0


def _check_zero(zero: Any) -> None:
    stage = zero_stage(zero)
    if stage != 1:
        absent = not isinstance(zero, Mapping) or "stage" not in zero
        found = "absent, which means 0" if absent else describe(zero["stage"])
        raise ValueError(
            f'"zero_optimization.stage" must be 1 together with "acco", got {found}; set it to 1, {_SWITCH_BACK}'
        )
    if not isinstance(zero, Mapping):
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {alias: (name, info) for name, info in DeepSpeedZeroConfig.model_fields.items()
              for alias in (name, info.alias) if alias}  # fmt: skip
    for key, value in zero.items():
        path = f"zero_optimization.{key}"
        if key in ("offload_optimizer", "offload_param"):
            _check_offload(path, value)
        elif key == "stage" or key not in fields:
            continue  # an unknown key: DeepSpeed refuses it
        else:
            name, info = fields[key]
            if name in _ZERO_NO_EFFECT or key.startswith("stage3_"):
                continue
            default = info.default
            if value != default and not (not default and value in (None, False)):
                why = _ZERO_WHY.get(name, "it has not been tried with ACCO; leave it out")
                raise ValueError(f'"{path}": {describe(value)} does not work with "acco": {why}, {_SWITCH_BACK}')


def _check_offload(path: str, value: Any) -> None:
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    if device is not None and device != "none":
        raise ValueError(
            f'"{path}": offloading (device {describe(device)}) is not supported together with "acco"; remove it, '
            f"{_SWITCH_BACK}"
        )


# ---- other sections ----------------------------------------------------------------------------------------------


def _check_checkpoint(section: Any) -> None:
    if not isinstance(section, Mapping):
        return
    if section.get("writer") is not None:  # {} already selects another writer
        raise ValueError('"checkpoint.writer": other checkpoint writers have not been tried with "acco"; remove it')


def _check_compile(section: Any) -> None:
    if isinstance(section, Mapping) and section.get("deepcompile"):
        raise ValueError('"compile.deepcompile" schedules its own reductions and does not work with "acco"; remove it')


def _check_tensor_parallel(section: Any) -> None:
    if not isinstance(section, Mapping):
        return
    inner = section.get("tensor_parallel", section.get("tp")) or {}
    if section.get("autotp_size", 0) != 0 or not isinstance(inner, Mapping) or inner.get("tp_size", 1) != 1:
        raise ValueError(
            '"tensor_parallel": DeepSpeed\'s automatic tensor parallelism is not supported together with "acco"; '
            "remove it (Megatron's --tensor-model-parallel-size is the supported way)"
        )


def _check_pipeline(section: Any) -> None:
    if section:
        raise ValueError('"pipeline": pipeline parallelism is not supported together with "acco"; remove the section')


_CHECKED_BY: dict[str, Callable[[Any], None]] = {
    "checkpoint": _check_checkpoint,
    "compile": _check_compile,
    "tensor_parallel": _check_tensor_parallel,
    "pipeline": _check_pipeline,
}
# Checked as a whole by the functions that check_acco_support calls.
_OWN_CHECK = frozenset(
    {"zero_optimization", "fp16", "bf16", "bfloat16", "data_types", "communication_data_type", "optimizer"}
)
