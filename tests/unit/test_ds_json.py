"""Reading and checking DeepSpeed JSONs. Every refusal is one line that names the key path and says what to do.

Covers: reading the file; unknown and misspelt keys, in every section; wrong types; "auto" left over; command line
against JSON; the batch triple. No processes, no model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_acco.config import AccoConfig
from megatron_acco.ds_json import (
    ArgumentValue,
    check_acco_support,
    check_keys,
    describe_batch,
    load_json,
    look_up,
    reconcile,
    resolve_batch,
    validate,
)
from megatron_acco.ds_json.check import check_resolved, check_types
from megatron_acco.ds_json.schema import Section, deepspeed_schema, quiet_deepspeed
from tests.unit.ds_json_cases import MICRO, Json, acco, base, refusal

# ---- reading the file ------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_json_is_read_as_written(tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", '\ufeff{"a": {"b": [1, 2.5e-3, {"c": null}]}, "d": true}')
    assert load_json(str(file)) == {"a": {"b": [1, 2.5e-3, {"c": None}]}, "d": True}


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ('{"a": 1,}', ["not valid JSON", "line 1", "column"]),
        ('{\n  "a": 1\n  "b": 2\n}', ["line 3, column 3"]),
        ("", ["not valid JSON", "line 1, column 1"]),
        ("[1, 2]", ["top level"]),
        ('"text"', ["top level"]),
        ('{"a": 1, "b": 2, "a": 3}', ['"a" is given twice']),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', ['"zero_optimization.stage" is given twice']),
        ('{"a": [{"b": 1, "b": 1}]}', ['"a[0].b" is given twice']),
        ('{"optimizer": {"params": {"lr": NaN}}}', ['"optimizer.params.lr"', "finite", "NaN"]),
        ('{"a": [1, -Infinity]}', ['"a[1]"', "-Infinity"]),
        ('{"a": 1e999}', ['"a"', "1e999"]),
    ],
)
def test_json_syntax_duplicates_and_nan_are_refused(tmp_path: Path, text: str, fragments: list[str]) -> None:
    file = write(tmp_path / "config.json", text)
    with pytest.raises(ValueError) as caught:
        load_json(file)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in ["config.json", *fragments]:
        assert fragment in message


def test_json_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_json(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ValueError, match="UTF-8"):
        load_json(tmp_path / "latin.json")


def test_json_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "deep.json", '{"a": ' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json(file)


# ---- unknown and misspelt keys (B57) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("aco", "acco"),
        ("ACCO", "acco"),
        ("train_micro_batch_size_per_gpus", "train_micro_batch_size_per_gpu"),
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("bf_16", "bf16"),
        ("optimiser", "optimizer"),
    ],
)
def test_misspelt_top_level_key_is_refused_with_the_right_name(wrong: str, right: str) -> None:
    message = refusal(base(**{wrong: {}}))
    assert f'unknown key "{wrong}"' in message
    assert f'did you mean "{right}"' in message


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("zero_optimization", "stag", "zero_optimization.stage"),
        ("zero_optimization", "reduce_bucketsize", "zero_optimization.reduce_bucket_size"),
        ("bf16", "enable", "bf16.enabled"),
        ("fp16", "loss_scal", "fp16.loss_scale"),
        ("optimizer", "parms", "optimizer.params"),
        ("scheduler", "parameters", "scheduler.params"),
        ("data_types", "grad_accum_type", "data_types.grad_accum_dtype"),
        ("checkpoint", "load_universel", "checkpoint.load_universal"),
        ("activation_checkpointing", "partitioned_activations", "activation_checkpointing.partition_activations"),
        ("flops_profiler", "profile_steps", "flops_profiler.profile_step"),
        ("tensorboard", "jobname", "tensorboard.job_name"),
        ("aio", "blocksize", "aio.block_size"),
        ("torch_autocast", "dtypes", "torch_autocast.dtype"),
        ("data_efficiency", "sed", "data_efficiency.seed"),
        ("comms_logger", "prof_al", "comms_logger.prof_all"),
    ],
)
def test_misspelt_key_in_a_section_is_refused_with_the_right_path(section: str, key: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_keys({section: {key: 1}})
    assert str(caught.value) == f'unknown key "{section}.{key}"; did you mean "{hint}"?'


def test_key_in_the_wrong_section_is_refused_with_its_place() -> None:
    assert 'did you mean "zero_optimization.overlap_comm"' in refusal(base(overlap_comm=True))
    assert 'did you mean "optimizer.params.lr"' in refusal(base(lr=1e-3))
    nested = refusal(base(zero_optimization={"stage": 1, "gradient_clipping": 1.0}))
    assert 'did you mean "gradient_clipping"' in nested


def test_key_unlike_any_other_is_refused() -> None:
    assert refusal(base(xyzzy=1)) == 'unknown key "xyzzy": neither DeepSpeed nor megatron-acco reads it; remove it'
    assert "known keys: bf16_master_weights_and_grads" in refusal(base(bf16={"xyzzy": 1}))


def test_misspelt_key_in_the_acco_section_is_refused() -> None:
    assert 'unknown key "acco.enabeld"; did you mean "enabled"' in refusal(base(acco={"enabeld": True}))


def test_misspelt_key_is_refused_by_the_engine_as_well() -> None:
    for config in (acco(gradient_acumulation_steps=4), acco(optimizer={"type": "Adam", "parms": {}})):
        with pytest.raises(ValueError, match="did you mean"):
            check_acco_support(config)


def test_every_section_deepspeed_has_refuses_unknown_keys() -> None:
    """Also the sections in which DeepSpeed itself ignores them; only argument lists of others are free."""
    free = []

    def visit(section: Section, path: tuple[str, ...]) -> None:
        for key, child in section.keys.items():
            if not isinstance(child, Section):
                continue
            config: Json = {"no_such_key": 1}
            for part in reversed((*path, key)):
                config = {part: config}
            try:
                check_keys(config)
            except ValueError as error:
                assert "no_such_key" in str(error)
            else:
                free.append(".".join((*path, key)))
            visit(child, (*path, key))

    visit(deepspeed_schema(), ())
    assert sorted(free) == [
        "acco",
        "data_efficiency.data_routing.random_ltd",
        "data_efficiency.data_sampling.curriculum_learning",
        "data_efficiency.data_sampling.dynamic_batching",
        "datastates_ckpt",
        "optimizer.params",
        "scheduler.params",
    ]


def test_known_keys_come_from_the_installed_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    schema = deepspeed_schema()
    zero = schema.keys["zero_optimization"]
    assert isinstance(zero, Section)
    assert set(DeepSpeedZeroConfig.model_fields) <= set(zero.keys)
    assert "stage3_max_live_parameters" in zero.keys
    for key in (
        "train_batch_size",
        "wall_clock_breakdown",
        "comms_logger",
        "csv_monitor",
        "managed_gradient_accumulation",
    ):
        assert key in schema.keys


# ---- wrong types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (base(gradient_accumulation_steps=2.5), ['"gradient_accumulation_steps"', "whole number", "2.5"]),
        (base(gradient_accumulation_steps="4"), ['"gradient_accumulation_steps"', '"4"', "without the quotes"]),
        (base(train_micro_batch_size_per_gpu=True), ['"train_micro_batch_size_per_gpu"', "true"]),
        (base(train_batch_size=16.0), ['"train_batch_size"', "whole number"]),
        (base(gradient_clipping="1.0"), ['"gradient_clipping"', "a number", "without the quotes"]),
        (base(gradient_clipping=True), ['"gradient_clipping"', "a number", "true"]),
        (base(gradient_clipping=None), ['"gradient_clipping"', "null"]),
        (base(gradient_clipping=-1), ['"gradient_clipping"', "0 (no clipping)"]),
        (base(gradient_clipping=float("nan")), ['"gradient_clipping"', "finite", "nan"]),
        (base(steps_per_print=float("inf")), ['"steps_per_print"', "finite"]),
        (base(wall_clock_breakdown="true"), ['"wall_clock_breakdown"', "true or false", '"true"']),
        (base(wall_clock_breakdown=1), ['"wall_clock_breakdown"', "true or false"]),
        (base(bf16={"enabled": "yes"}), ['"bf16.enabled"', "true or false", '"yes"']),
        (base(bf16=True), ['"bf16"', "an object"]),
        (base(optimizer="AdamW"), ['"optimizer"', "an object"]),
        (base(zero_optimization={"stage": "one"}), ['"zero_optimization.stage"']),
        (base(zero_optimization={"stage": 7}), ['"zero_optimization.stage" must be 0, 1, 2 or 3, got 7']),
        (base(zero_optimization={"stage": True}), ['"zero_optimization.stage"', "true"]),
        (base(zero_optimization={"stage": 1.5}), ['"zero_optimization.stage"', "1.5"]),
        (base(zero_optimization={"stage": 1, "reduce_bucket_size": "5e8"}), ["reduce_bucket_size", "without the"]),
        (base(zero_optimization={"stage": 1, "reduce_bucket_size": 0.5}), ["reduce_bucket_size", "whole number"]),
        (
            base(zero_optimization={"stage": 1, "allgather_bucket_size": -1}),
            ['"zero_optimization.allgather_bucket_size": Input', "-1"],
        ),
        (base(zero_optimization={"stage": 1, "overlap_comm": 1}), ["overlap_comm", "true or false"]),
        (base(zero_optimization={"offload_optimizer": {"device": "gpu"}}), ["offload_optimizer.device", "gpu"]),
        (base(flops_profiler={"enabled": True, "profile_step": "1"}), ['"flops_profiler.profile_step"']),
        (base(tensorboard={"enabled": True, "output_path": 3}), ['"tensorboard.output_path"', "a string"]),
        (base(checkpoint={"tag_validation": "maybe"}), ["DeepSpeed refuses", "tag_validation"]),
        (base(communication_data_type="fp8"), ["communication_data_type", "fp8"]),
        (base(communication_data_type=32), ['"communication_data_type"', "a string"]),
    ],
)
def test_wrong_type_is_refused(config: Json, fragments: list[str]) -> None:
    message = refusal(config)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("params", "fragments"),
    [
        ({"lr": "1e-3"}, ['"optimizer.params.lr"', '"1e-3"', "without the quotes"]),
        ({"lr": True}, ['"optimizer.params.lr"', "true"]),
        ({"lr": -1e-3}, ['"optimizer.params.lr"', "0 or more"]),
        ({"lr": float("nan")}, ['"optimizer.params.lr"', "finite"]),
        ({"lr": None}, ['"optimizer.params.lr"', "null"]),
        ({"betas": [0.9]}, ['"optimizer.params.betas"', "two numbers"]),
        ({"betas": [0.9, 1.0]}, ['"optimizer.params.betas"']),
        ({"betas": 0.9}, ['"optimizer.params.betas"']),
        ({"learning_rate": 1e-3}, ['"optimizer.params.learning_rate"', '"AdamW"', "lr"]),
        ({"weight_dacay": 0.1}, ["weight_dacay", 'did you mean "weight_decay"']),
        ({"max_grad_norm": 1.0}, ["max_grad_norm", '"gradient_clipping"']),
        ({"adam_w_mode": False}, ["adam_w_mode", "ignored", '"Adam"']),
        ({"amsgrad": True}, ["amsgrad", "torch_adam"]),
        ({"torch_adam": True, "bias_correction": False}, ["bias_correction"]),
    ],
)
def test_wrong_optimizer_argument_is_refused(params: Json, fragments: list[str]) -> None:
    message = refusal(base(optimizer={"type": "AdamW", "params": params}))
    for fragment in fragments:
        assert fragment in message


def test_numbers_json_writes_differently_pass() -> None:
    zero = {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 200000000}
    validate(base(gradient_clipping=1, zero_optimization=zero, optimizer={"type": "Adam", "params": {"lr": 1}}), 2)


# ---- "auto" (B56) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.type",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage",
        "scheduler.params.warmup_num_steps",
    ],
)
def test_auto_left_over_is_refused_by_its_path(path: str) -> None:
    config = base()
    node = config
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = "auto"
    assert f'"{path}" is "auto"' in refusal(config)
    with pytest.raises(ValueError, match=f'"{path}" is "auto"'):
        check_acco_support({**config, "acco": {}})


@pytest.mark.parametrize("key", ["train_batch_size", MICRO, "gradient_accumulation_steps"])
def test_auto_batch_size_follows_from_the_other_two_or_is_refused(key: str) -> None:
    resolved = validate(base(**{key: "auto"}), 2)
    assert {name: resolved[name] for name in base()} == base()
    for other in {"train_batch_size", MICRO, "gradient_accumulation_steps"} - {key}:
        assert 'is "auto"' in refusal(base(**{key: "auto", other: "auto"}))
        assert f'"{key}" is "auto"' in refusal({name: v for name, v in base(**{key: "auto"}).items() if name != other})
    with pytest.raises(ValueError, match=f'"{key}" is "auto"'):
        check_acco_support(acco(**{key: "auto"}))


def test_auto_in_a_list_or_the_acco_section_is_refused() -> None:
    message = refusal(base(optimizer={"type": "Adam", "params": {"betas": [0.9, "auto"]}}))
    assert '"optimizer.params.betas[1]" is "auto"' in message
    assert '"acco.mode" is "auto"' in refusal(base(acco={"mode": "auto"}))


def test_auto_that_is_deepspeeds_own_default_passes() -> None:
    check_resolved({"data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}})
    validate(base(data_types={"keep_in_fp32_modules": "auto"}), 2)


def test_auto_of_a_stage_3_field_does_not_stop_the_engine() -> None:
    """Trainers that fill in "auto" leave those of other stages alone, and DeepSpeed drops them."""
    zero = {"stage": 1, "stage3_prefetch_bucket_size": "auto"}
    check_acco_support(acco(zero_optimization=zero))
    assert "stage3_prefetch_bucket_size" in refusal(acco(zero_optimization=zero))


# ---- command line against JSON (B57) ---------------------------------------------------------------------------------


def flag(value: Any, given: bool, path: str = MICRO, name: str = "--micro-batch-size") -> ArgumentValue:
    return ArgumentValue(path, name, value, given)


@pytest.mark.parametrize(
    ("present", "argument", "result"),
    [
        ({MICRO: "auto"}, flag(4, True), {MICRO: 4}),
        ({MICRO: "auto"}, flag(1, False), {MICRO: 1}),
        ({MICRO: "auto"}, flag(None, False), {MICRO: "auto"}),
        ({}, flag(4, True), {MICRO: 4}),
        ({}, flag(1, False), {}),
        ({MICRO: 8}, flag(1, False), {MICRO: 8}),
        ({MICRO: 8}, flag(8, True), {MICRO: 8}),
        ({}, flag(1e-3, True, "optimizer.params.lr", "--lr"), {"optimizer": {"params": {"lr": 1e-3}}}),
        ({"gradient_clipping": 1}, flag(1.0, True, "gradient_clipping"), {"gradient_clipping": 1}),
        ({"betas": [0.9, 0.95]}, flag((0.9, 0.95), True, "betas"), {"betas": [0.9, 0.95]}),
    ],
)
def test_reconcile_fills_auto_and_keeps_what_agrees(present: Json, argument: ArgumentValue, result: Json) -> None:
    before = copy.deepcopy(present)
    assert reconcile(present, [argument]) == result
    assert present == before


def test_reconcile_does_not_touch_nested_input() -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    out = reconcile(config, [flag(1e-3, False, "optimizer.params.lr", "--lr")])
    assert look_up(out, "optimizer.params.lr") == 1e-3
    assert look_up(out, "optimizer.params.eps") is None
    assert config["optimizer"]["params"]["lr"] == "auto"  # type: ignore[index]


@pytest.mark.parametrize(
    ("present", "argument", "fragments"),
    [
        ({MICRO: 8}, flag(4, True), ["--micro-batch-size 4", f'"{MICRO}": 8', "DeepSpeed JSON"]),
        (
            {"optimizer": {"params": {"lr": 1e-3}}},
            flag(3e-4, True, "optimizer.params.lr", "--lr"),
            ["--lr 0.0003", '"optimizer.params.lr": 0.001'],
        ),
        ({"bf16": {"enabled": False}}, flag(True, True, "bf16.enabled", "--bf16"), ["--bf16 true", "false"]),
        ({MICRO: True}, flag(1, True), ["--micro-batch-size 1", "true"]),
        ({"optimizer": 3}, flag(1.0, True, "optimizer.params.lr", "--lr"), ['"optimizer" must be an object']),
    ],
)
def test_flag_and_json_that_contradict_are_refused_with_both(
    present: Json, argument: ArgumentValue, fragments: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        reconcile(present, [argument])
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_two_flags_for_one_key_that_contradict_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"--b 2 contradicts --a 1: both set"):
        reconcile({}, [flag(1, True, MICRO, "--a"), flag(2, True, MICRO, "--b")])


# ---- the batch triple (B55) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dp", "expected"),
    [
        ({"train_batch_size": 16, MICRO: 2, "gradient_accumulation_steps": 4}, 2, (16, 2, 4)),
        ({"train_batch_size": 16, MICRO: 2}, 2, (16, 2, 4)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, 2, (16, 2, 4)),
        ({MICRO: 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        ({"train_batch_size": 16}, 4, (16, 4, 1)),
        ({MICRO: 3}, 4, (12, 3, 1)),
        ({MICRO: 3, "train_batch_size": None, "gradient_accumulation_steps": 5}, 1, (15, 3, 5)),
    ],
)
def test_batch_third_size_follows_from_two(given: Json, dp: int, expected: tuple[int, int, int]) -> None:
    resolved = resolve_batch(given, dp)
    assert tuple(resolved[key] for key in ("train_batch_size", MICRO, "gradient_accumulation_steps")) == expected


def test_batch_that_does_not_multiply_shows_all_four_numbers() -> None:
    message = refusal(base(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1), dp=2)
    for fragment in ('"train_batch_size" 8', f'"{MICRO}" 2', '"gradient_accumulation_steps" 1', "size 2 = 4"):
        assert fragment in message


def test_batch_uses_the_data_parallel_size_not_all_ranks() -> None:
    config = base(train_batch_size=32, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4)
    message = refusal(config, dp=2, tensor_parallel=2)
    assert "data-parallel size 2 (not all 4 ranks: tensor-parallel size 2) = 16" in message
    assert validate(base(), 2, tensor_parallel=2)["train_batch_size"] == 16


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"train_batch_size": 10, MICRO: 2}, '"gradient_accumulation_steps" cannot be derived'),
        ({"train_batch_size": 3}, f'"{MICRO}" cannot be derived'),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 5}, f'"{MICRO}" cannot be derived'),
        ({"gradient_accumulation_steps": 5}, "the batch size is not given"),
        ({}, "the batch size is not given"),
        ({MICRO: 0}, "whole number above 0, got 0"),
        ({MICRO: -2}, "whole number above 0, got -2"),
        ({MICRO: "2"}, 'whole number above 0, got "2"'),
        ({MICRO: True}, "whole number above 0, got true"),
    ],
)
def test_batch_size_missing_wrong_or_not_divisible_is_refused(given: Json, fragment: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_batch(given, 4)
    assert fragment in str(caught.value)


def test_batch_meaning_of_accumulation_steps_is_told() -> None:
    resolved = resolve_batch({MICRO: 2, "gradient_accumulation_steps": 5}, 3)
    line = describe_batch(resolved, 3, AccoConfig())
    for fragment in ("30 samples per update", "2 per micro-batch", "5 micro-batches", "3 data-parallel ranks"):
        assert fragment in line
    assert "after the first 2 and a commit after the other 3" in line
    assert "one exchange per update" in describe_batch(resolved, 3, None)
    assert "mode dpu" in describe_batch(resolved, 3, AccoConfig.from_dict({"mode": "dpu"}))
    half = resolved["gradient_accumulation_steps"] // 2
    for limit, said in ((half + 1, f"at most {half + 1} per half"), (half, f'per_half" is {half}; raise it')):
        section = {"accumulation": "adaptive", "max_micro_batches_per_half": limit}
        assert said in describe_batch(resolved, 3, AccoConfig.from_dict(section))
    assert "waited for" in describe_batch(resolved, 3, AccoConfig.from_dict({"mode": "sync"}))
    coarse = AccoConfig.from_dict({"estimate_bits": 8, "estimate_fraction": "auto"})
    assert "an estimate in 8 bits after the first 2" in describe_batch(resolved, 3, coarse)
    assert "until measured times say" in describe_batch(resolved, 3, coarse)


def test_batch_of_one_micro_batch_is_refused_in_mode_acco_only() -> None:
    one = {"train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert "must be at least 2, got 1" in refusal(acco(**one))
    for mode in ("dpu", "wp", "sync"):
        validate(base(acco={"mode": mode}, **one), 2)
    assert validate(base(acco={"enabled": False}, **one), 2)["gradient_accumulation_steps"] == 1


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    batch = {"train_batch_size": 16, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="groups of 3, 1, which must be equal"):
        validate(base(acco={"estimate_group": 3}, **batch), 4)
    validate(base(acco={"estimate_group": 2}, **batch), 4)


def test_batch_of_one_micro_batch_is_refused_where_deepspeed_derives_it() -> None:
    """Steps follow from the other two, or are 1 because only one of the sizes is given."""
    assert "at least 2" in refusal({**acco(train_batch_size=4), "gradient_accumulation_steps": None})
    with pytest.raises(ValueError, match="at least 2"):
        check_acco_support({MICRO: 2, "zero_optimization": {"stage": 1}, "acco": {}})


def test_probing_deepspeed_leaves_its_logger_as_it_was() -> None:
    from deepspeed.utils import logger

    with quiet_deepspeed():
        assert logger.disabled
    assert not logger.disabled


def test_check_types_accepts_an_empty_json() -> None:
    check_types({})
    check_keys({})
