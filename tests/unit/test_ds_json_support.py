"""What goes together with an `acco` section, optimizers, schedulers, precision, and JSONs as people have them.

Covers: every field of zero_optimization and every top-level key of DeepSpeed; optimizer and scheduler names and
arguments; real-world JSONs, which must pass unharmed. No processes, no model.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from megatron_acco.ds_json import (
    ArgumentValue,
    check_acco_support,
    check_device,
    load_json,
    reconcile,
    validate,
)
from megatron_acco.ds_json.optimizers import check_acco_optimizer_object
from megatron_acco.ds_json.schema import deepspeed_schema
from tests.unit.ds_json_cases import MICRO, Json, acco, base, refusal, unsupported

# ---- what does not go together with acco ----------------------------------------------------------------------------


def test_acco_without_zero_stage_1_is_refused() -> None:
    for zero in (None, {}, {"stage": 0}, {"stage": 2}, {"stage": 3}, {"overlap_comm": True}, False):
        message = unsupported(acco(zero_optimization=zero))
        assert '"zero_optimization.stage" must be 1' in message
    without = acco()
    del without["zero_optimization"]
    assert "absent, which means 0" in unsupported(without)
    check_acco_support(acco(zero_optimization=True))  # DeepSpeed reads it as stage 1


ZERO_REFUSED: list[tuple[Json, str]] = [
    ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "offload_optimizer"),
    ({"offload_param": {"device": "cpu"}}, "offload_param"),
    ({"cpu_offload": True}, "cpu_offload"),
    ({"cpu_offload_param": True}, "cpu_offload_param"),
    ({"zenflow": {}}, "zenflow"),
    ({"zenflow": {"topk_ratio": 0.1}}, "zenflow"),
    ({"compute_grad_norm": False}, "compute_grad_norm"),
    ({"round_robin_gradients": True}, "round_robin_gradients"),
    ({"parameter_alignment": True}, "parameter_alignment"),
    ({"elastic_checkpoint": True}, "elastic_checkpoint"),
    ({"load_from_fp32_weights": False}, "load_from_fp32_weights"),
    ({"legacy_stage1": True}, "legacy_stage1"),
    ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
    ({"zero_quantized_weights": True}, "zero_quantized_weights"),
    ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
    ({"zero_quantized_gradients": True}, "zero_quantized_gradients"),
]


@pytest.mark.parametrize(("zero", "key"), ZERO_REFUSED)
def test_acco_with_an_unsupported_zero_field_is_refused(zero: Json, key: str) -> None:
    message = unsupported(acco(zero_optimization={"stage": 1, **zero}))
    assert f'"zero_optimization.{key}"' in message
    assert "enabled" in message


def test_acco_every_zero_field_is_refused_or_known_to_have_no_effect() -> None:
    """A field that a later DeepSpeed adds is refused when it is set, until somebody has looked at it."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from megatron_acco.ds_json.support import _ZERO_NO_EFFECT, _ZERO_WHY

    decided = {*_ZERO_NO_EFFECT, *_ZERO_WHY, "stage", "offload_optimizer", "offload_param"}
    undecided = {
        key for key in DeepSpeedZeroConfig.model_fields if key not in decided and not key.startswith("stage3_")
    }
    assert undecided == set()
    refused = {key for _, key in ZERO_REFUSED}
    assert set(_ZERO_WHY) <= refused


def test_acco_zero_defaults_written_out_pass() -> None:
    """Every field at DeepSpeed's own default, as tools write it."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    dumped = json.loads(json.dumps(DeepSpeedZeroConfig(stage=1).model_dump(by_alias=True), default=str))
    check_acco_support(acco(zero_optimization=dumped))
    none = {"device": "none"}
    check_acco_support(acco(zero_optimization={"stage": 1, "offload_optimizer": none, "offload_param": none}))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ["fp16_master_weights_and_grads", "fp32"]),
        ({"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}}, ["fp16_master_weights_and_grads"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ["bf16_master_weights_and_grads"]),
        ({"bfloat16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16_optimizer_states"]),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, ["torch_autocast", "bf16"]),
        ({"amp": {"enabled": True}}, ["amp"]),
        ({"communication_data_type": "fp16"}, ["communication_data_type", "bf16 or fp32"]),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, ["data_types.grad_accum_dtype"]),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ["data_types.grad_accum_dtype", "fp32"]),
        (
            {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            ["data_types.grad_accum_dtype", "fp16 or fp32"],
        ),
        ({"fp16": {"enabled": True}, "communication_data_type": "bf16"}, ["communication_data_type", "fp16 or fp32"]),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, ["communication_data_type", "bf16 or fp32"]),
        ({"managed_gradient_accumulation": False}, ["managed_gradient_accumulation"]),
        ({"prescale_gradients": True}, ["prescale_gradients"]),
        ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op"]),
        ({"sparse_gradients": True}, ["sparse_gradients"]),
        ({"disable_allgather": True}, ["disable_allgather"]),
        ({"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        ({"compression_training": {"weight_quantization": {}}}, ["compression_training"]),
        ({"elasticity": {"enabled": True}}, ["elasticity"]),
        ({"curriculum_learning": {"enabled": True}}, ["curriculum_learning"]),
        ({"data_efficiency": {"enabled": True}}, ["data_efficiency"]),
        ({"progressive_layer_drop": {"enabled": True}}, ["progressive_layer_drop"]),
        ({"eigenvalue": {"enabled": True}}, ["eigenvalue"]),
        ({"autotuning": {"enabled": True}}, ["autotuning"]),
        ({"nebula": {"enabled": True}}, ["nebula"]),
        ({"datastates_ckpt": {"host_cache_size": 1}}, ["datastates_ckpt"]),
        ({"datastates_ckpt": {"enabled": False}}, ["datastates_ckpt"]),
        ({"weight_quantization": {"num_bits": 8}}, ["weight_quantization"]),
        ({"weight_quantization": {}}, ["weight_quantization"]),
        ({"compile": {"deepcompile": True}}, ["deepcompile"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel", "--tensor-model-parallel-size"]),
        ({"tensor_parallel": {"autotp_size": 1}}, ["tensor_parallel"]),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, ["tensor_parallel"]),
        ({"tensor_parallel": {"tp": 2}}, ["tensor_parallel"]),
        ({"pipeline": {"stages": 2}}, ["pipeline"]),
        ({"expert_parallel": {"enabled": True}}, ["expert_parallel", "mixture-of-experts"]),
        ({"use_data_before_expert_parallelism": True}, ["use_data_before_expert_parallelism"]),
        ({"sequence_parallel_size": 2}, ["sequence_parallel_size"]),
        ({"data_parallel_size": 2}, ["data_parallel_size"]),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, ["checkpoint.writer"]),
        ({"checkpoint": {"writer": {}}}, ["checkpoint.writer"]),
    ],
)
def test_acco_with_an_unsupported_feature_is_refused(changes: Json, fragments: list[str]) -> None:
    message = unsupported(acco(**changes))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    "changes",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "auto_cast": True}},
        {"fp16": {"enabled": True}},
        {"fp16": {"enabled": True, "loss_scale": 128.0}, "data_types": {"grad_accum_dtype": "fp16"}},
        {"fp16": {"enabled": True, "hysteresis": 1}, "communication_data_type": "fp32"},
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}, "data_types": {"grad_accum_dtype": "bfloat16"}},
        {"bf16": {"enabled": False}, "communication_data_type": "bf16"},
        {"data_types": {"grad_accum_dtype": "float32"}, "communication_data_type": "FP32"},
        {"torch_autocast": {"enabled": False}},
        {"hybrid_engine": {"enabled": False}, "data_efficiency": {"enabled": False}, "autotuning": {"enabled": False}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"managed_gradient_accumulation": True, "disable_allgather": False, "sequence_parallel_size": 1},
        {"compile": {"deepcompile": False}, "tensor_parallel": {"autotp_size": 0}, "pipeline": {}},
        {"checkpoint": {"tag_validation": "Warn", "use_node_local_storage": False, "writer": None}},
        {"checkpoint": {"load_universal": True}},
        {"torch_autocast": {}, "expert_parallel": {}, "datastates_ckpt": False, "sparse_gradients": False},
    ],
)
def test_acco_with_what_is_switched_off_or_supported_passes(changes: Json) -> None:
    check_acco_support(acco(**changes))


def test_acco_every_top_level_key_of_deepspeed_is_decided() -> None:
    """Set to something that is not its off value, each key passes because it is listed, or is refused."""
    from megatron_acco.ds_json.support import _CHECKED_BY, _OWN_CHECK, _PLAIN, _WORKS

    listed = {*_WORKS, *_OWN_CHECK, *_PLAIN, *_CHECKED_BY}
    for key in deepspeed_schema().keys:
        if key not in listed:
            with pytest.raises(ValueError, match=key):
                check_acco_support(acco(**{key: {"enabled": True}}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Lamb", "whole layers"),
        ("OneBitAdam", "compressed"),
        ("ZeroOneAdam", "compressed"),
        ("OneBitLamb", "compressed"),
        ("MuAdam", "does not work"),
        ("MuAdamW", "does not work"),
        ("MuSGD", "does not work"),
        ("Adafactor", "matrices"),
        ("SparseAdam", "sparse"),
        ("LBFGS", "inside its step"),
    ],
)
def test_acco_with_an_unsupported_optimizer_is_refused_with_those_that_work(name: str, reason: str) -> None:
    message = unsupported(acco(optimizer={"type": name, "params": {"lr": 1e-3}}))
    assert f'"optimizer.type": "{name}"' in message
    assert reason in message
    for works in ("Adam,", "AdamW", "SGD", "Lion", "Adagrad"):
        assert works in message


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "adamw", "ADAM", "Adagrad", "Lion", "lion", "Muon", "SGD", "RMSprop", "NAdam"]
)
def test_acco_with_an_elementwise_optimizer_passes(name: str, fused_lion: None) -> None:
    config = acco(optimizer={"type": name, "params": {"lr": 1e-3}}, zero_allow_untested_optimizer=True)
    check_acco_support(config)
    validate(config, 2)


@pytest.fixture
def fused_lion(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that has DeepSpeed's fused Lion."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "get_op_builder", lambda self, name: name)


def test_lion_on_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "get_op_builder", lambda self, name: None)
    assert "has no Lion for the device" in refusal(base(optimizer={"type": "Lion", "params": {"lr": 1e-4}}))


def test_acco_optimizer_built_by_the_script_is_refused_too() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(2, 2))]
    for works in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Rprop):
        check_acco_optimizer_object(works(parameter, lr=1e-3))
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        with pytest.raises(ValueError, match=kind.__name__):
            check_acco_optimizer_object(kind(parameter, lr=1e-3))


# ---- names of optimizers and schedulers (B59) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ns_method": "newton"}, "one of gram, standard"),
        ({"momentum": 1}, "from 0 up to but not 1"),
        ({"muon_Ir": 0.1}, 'did you mean "muon_lr"'),
        ({"adam_lr": -1}, "0 or more"),
    ],
)
def test_arguments_of_muon_are_checked(params: dict[str, object], message: str) -> None:
    """DeepSpeed leaves out what it does not know, and says the rest after the model is built."""
    assert message in refusal(base(optimizer={"type": "Muon", "params": {"lr": 0.01, **params}}))


@pytest.mark.parametrize(("name", "close"), [("AdmW", "AdamW"), ("sgd", "SGD"), ("rmsprop", "RMSprop")])
def test_unknown_optimizer_is_refused_with_the_right_name(name: str, close: str) -> None:
    assert f'did you mean "{close}"' in refusal(base(optimizer={"type": name, "params": {}}))


def test_optimizer_without_type_or_not_allowed_is_refused() -> None:
    assert '"optimizer.type" is missing' in refusal(base(optimizer={"params": {"lr": 1e-3}}))
    message = refusal(base(optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    assert '"zero_allow_untested_optimizer": true' in message
    plain = base(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_optimization={"stage": 0})
    validate(plain, 2)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}},
        {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "amsgrad": True}},
        {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False, "foreach": False}},
        {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": False}},
        {"type": "AdamW"},
        None,
    ],
)
def test_optimizer_variants_pass(optimizer: Json | None) -> None:
    config = acco(optimizer=optimizer) if optimizer else {k: v for k, v in acco().items() if k != "optimizer"}
    validate(config, 2)


@pytest.mark.parametrize(
    ("scheduler", "fragment"),
    [
        ({"type": "WarmupDecayLr", "params": {}}, 'did you mean "WarmupDecayLR"'),
        ({"type": "WarmupDecayLR"}, '"scheduler.params" is missing'),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}},
            '"scheduler.params.total_num_steps" is missing',
        ),
        ({"type": "WarmupLR", "params": {"warmup_steps": 10}}, 'did you mean "warmup_num_steps"'),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "1e-3"}}, "without the quotes"),
        ({"type": "CosineAnnealingLR", "params": {"T_max": 10}}, "does not accept a ZeRO optimizer"),
        ({"params": {}}, '"scheduler.type" is missing'),
        ({"type": "math", "params": {}}, "knows no scheduler"),
    ],
)
def test_wrong_scheduler_is_refused(scheduler: Json, fragment: str) -> None:
    assert fragment in refusal(base(scheduler=scheduler))


# ---- precision and device (B59) ------------------------------------------------------------------------------------


def test_precision_sections_that_contradict_are_refused() -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "both true" in refusal(base(**both))
    assert '"bfloat16"' in refusal(base(bf16={"enabled": True}, bfloat16={"enabled": False}))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"data_types": {"param_dtype": "bf16"}}, '"data_types.param_dtype": "bf16" contradicts'),
        ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "contradicts the precision of the run"),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, '"data_types.grad_accum_dtype" must be fp32, bf16 or fp16'),
        ({"data_types": {"buffer_dtype": "int8"}}, '"data_types.buffer_dtype"'),
    ],
)
def test_data_types_that_deepspeed_refuses_later_are_refused(changes: Json, fragment: str) -> None:
    assert fragment in refusal(base(**changes))


def test_data_types_that_agree_pass() -> None:
    types = {"param_dtype": "bfloat16", "buffer_dtype": "fp32", "grad_accum_dtype": "torch.float32"}
    validate(acco(data_types=types, bf16={"enabled": True}), 2)


def test_fp16_on_a_device_without_it_suggests_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match=r'cannot train in fp16; use "bf16"'):
        check_device({"fp16": {"enabled": True}})
    assert "cannot train in fp16" in refusal(base(fp16={"enabled": True}))
    monkeypatch.setattr(type(get_accelerator()), "is_bf16_supported", lambda self: False)
    with pytest.raises(ValueError, match="cannot train in bf16; use fp32"):
        check_device({"bf16": {"enabled": True}})
    with pytest.raises(ValueError, match="use fp32"):
        check_device({"fp16": {"enabled": True}})
    check_device({"fp16": {"enabled": False}})


def test_removed_deepspeed_feature_is_refused_with_deepspeeds_reason() -> None:
    message = refusal(base(progressive_layer_drop={"enabled": True}))
    assert "DeepSpeed refuses" in message
    assert "Progressive" in message


# ---- JSONs as people have them -------------------------------------------------------------------------------------

MONITORED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 6e-4, "warmup_num_steps": 2000, "total_num_steps": 100000},
    },
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensorboard": {"enabled": True, "output_path": "runs/tb", "job_name": "gpt"},
    "wandb": {"enabled": False, "team": "t", "group": "g", "project": "p"},
    "csv_monitor": {"enabled": True, "output_path": "runs/csv", "job_name": "gpt"},
    "comet": {"enabled": False, "project": "p"},
    "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1, "top_modules": 1, "detailed": True,
                       "output_file": None},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
                   "parallel_write": {"pipeline_stage": False}},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None,
                                 "contiguous_memory_optimization": False, "synchronize_checkpoint_boundary": False,
                                 "profile": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "zero_allow_untested_optimizer": True,
    "dataloader_drop_last": True,
    "vocabulary_size": 50304,
}  # fmt: skip

TRAINER = {  # as a Hugging Face trainer hands it over once its "auto" values are filled in
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 500}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "nvme_path": None},
                          "offload_param": {"device": "none"}, "stage3_gather_16bit_weights_on_model_save": False},
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}  # fmt: skip


@pytest.mark.parametrize(("config", "dp"), [(MONITORED, 8), (TRAINER, 2), (base(), 2)])
@pytest.mark.parametrize("section", [None, {}, {"mode": "dpu", "warmup_updates": 10}, {"enabled": False}])
def test_real_world_json_passes_unharmed(config: Json, dp: int, section: Json | None) -> None:
    given = copy.deepcopy(config) if section is None else {**copy.deepcopy(config), "acco": section}
    before = copy.deepcopy(given)
    resolved = validate(given, dp)
    assert given == before
    assert {key: resolved[key] for key in before} == before
    assert set(resolved) == {*before, "train_batch_size", MICRO, "gradient_accumulation_steps"}


@pytest.mark.parametrize(
    "config",
    [
        base(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}),
        base(zero_optimization={"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9}),
        base(zero_optimization={"stage": 0}),
        {k: v for k, v in base().items() if k not in ("zero_optimization", "optimizer")},
        base(optimizer={"type": "Lamb", "params": {"lr": 1e-3}}, zero_optimization={"stage": 0}),
        base(zero_optimization={"stage": 1, "round_robin_gradients": True}),
        base(gradient_allreduce_op="sum", prescale_gradients=True),
        base(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    ],
)
def test_plain_deepspeed_json_is_not_held_to_accos_limits(config: Json) -> None:
    validate(config, 2)


def test_ready_configs_of_the_repository_pass() -> None:
    """With the values that the entry script fills in."""
    filled = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer.params.lr": 1e-3,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.1,
    }
    values = [ArgumentValue(path, f"--{path}", value, False) for path, value in filled.items()]
    files = sorted((Path(__file__).parents[2] / "deepspeed_configs").glob("*.json"))
    for file in files:
        resolved = validate(reconcile(load_json(file), values), 2)
        assert resolved["train_batch_size"] == 16, file
