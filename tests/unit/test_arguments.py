"""Command line and JSON: misspelt, contradicting, missing and malformed values; the schedule; the launch variables.

Covers CASES B27 (learning rate advances by the wrong unit), B45 (everyone is rank 0 of 1), B55 (batch triple),
B56 ("auto"), B57 (flag and JSON conflict), B63 (threads).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_acco.hosts.ranks import Ranks, discover_ranks
from megatron_acco.training import environment
from megatron_acco.training.arguments import _GROUPS, Arguments, parse_arguments, parser, resolve
from megatron_acco.training.options import flag_of
from megatron_acco.training.schedule import OptimizerOptions, resolve_schedule

REQUIRED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --data-path /nowhere --train-iters 20 --deepspeed_config ds.json"
).split()
JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 1},
}


def parsed(*more: str) -> Arguments:
    return parse_arguments([*REQUIRED, *more])


def with_json(config: dict[str, Any], *more: str, ranks: int = 2) -> Arguments:
    return resolve(parsed(*more), config, ranks)


# ---- the command line by itself -----------------------------------------------------------------------------------


def test_every_option_has_a_flag_of_its_own() -> None:
    names = [field.name for cls, _ in _GROUPS.values() for field in dataclasses.fields(cls)]
    flags = [flag_of(field) for cls, _ in _GROUPS.values() for field in dataclasses.fields(cls)]
    assert len(set(names)) == len(names) and len(set(flags)) == len(flags)
    assert all(flag in parser().format_help() for flag in flags)


def test_defaults_hold_where_nothing_is_given() -> None:
    arguments = parsed()
    assert arguments.training.seed == 1234 and arguments.data.split_weights == "99,1,0"
    assert "seed" not in arguments.given and "num_layers" in arguments.given


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-layer", "3"], "unknown argument --num-layer; did you mean --num-layers?"),
        (["--hidden_size=3"], "did you mean --hidden-size?"),
        (["--lr", "nan"], "--lr: must be a finite number, got nan"),
        (["--lr", "fast"], "--lr: invalid number value: 'fast'"),
        (["--train-iters", "2.5"], "--train-iters: invalid int value"),
        (["--train-samples", "100"], "--train-iters or --train-samples (not both)"),
        (["--seq-length", "17"], "--seq-length 17 is longer than --max-position-embeddings 16"),
        (["--num-attention-heads", "5"], "--hidden-size 32 is not a multiple of --num-attention-heads 5"),
        (["--num-query-groups", "2"], "--num-query-groups needs --group-query-attention"),
        (["--group-query-attention", "--num-query-groups", "3"], "not a multiple of --num-query-groups 3"),
        (["--attention-dropout", "1.0"], "--attention-dropout must be in [0, 1), got 1.0"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size must be 1 or more"),
        (["--tensor-model-parallel-size", "3"], "--num-attention-heads 4 is not a multiple of --tensor-model-parallel"),
        (["--tensor-model-parallel-size", "4", "--ffn-hidden-size", "66"], "(--ffn-hidden-size) 66 is not a multiple"),
        (
            "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2".split(),
            "--num-query-groups 2 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--tensor-model-parallel-size 4 --seq-length 14 --sequence-parallel".split(),
            "--seq-length 14 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (["--pipeline-model-parallel-size", "2"], "--pipeline-model-parallel-size 2 is not supported"),
        (["--recompute-granularity", "full"], "--recompute-granularity full needs --recompute-method"),
        (["--recompute-method", "block"], "--recompute-method needs --recompute-granularity full"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3".split(),
            "--recompute-num-layers must be between 1 and --num-layers 2, got 3",
        ),
        (["--recompute-modules", "mlp"], "--recompute-modules needs --recompute-granularity selective"),
        (
            "--recompute-granularity selective --recompute-modules mlp attention".split(),
            "--recompute-modules attention: choose from core_attn, mlp",
        ),
        (["--bf16", "--fp16"], "--bf16 and --fp16 contradict each other"),
        (["--lr-warmup-iters", "3", "--lr-warmup-fraction", "0.1"], "contradict each other; give one"),
        (["--train-data-path", "a"], "--data-path contradicts --train-data-path"),
        (["--save-interval", "5"], "--save-interval needs --save"),
        (["--normalization", "BatchNorm"], "--normalization: invalid choice: 'BatchNorm'"),
        (["--micro-batch-size", "0"], "--micro-batch-size must be 1 or more, got 0"),
        (["--exit-interval", "0"], "--exit-interval must be above 0"),
        (["--clip-grad", "-1"], "--clip-grad must be 0 or more"),
        (["--lr-decay-style", "WSD"], "needs --lr-wsd-decay-iters"),
    ],
)
def test_bad_arguments_are_named(more: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(*more)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_required_argument_is_named() -> None:
    with pytest.raises(ValueError, match="--num-layers"):
        parse_arguments(REQUIRED[2:])
    with pytest.raises(ValueError, match="no training data: give --data-path or --train-data-path"):
        parse_arguments([word for word in REQUIRED if word not in ("--data-path", "/nowhere")])


# ---- arguments and JSON -------------------------------------------------------------------------------------------


def test_arguments_fill_what_the_json_leaves_open() -> None:
    arguments = with_json(JSON, "--lr", "2e-3", "--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "0.5")
    assert arguments.deepspeed["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
    }
    assert arguments.deepspeed["gradient_clipping"] == 0.5
    assert (arguments.micro_batch_size, arguments.num_microbatches, arguments.global_batch_size) == (2, 4, 16)


def test_arguments_fill_auto() -> None:
    config = {
        **JSON,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
    }
    more = ["--micro-batch-size", "3", "--global-batch-size", "24", "--lr", "1e-3", "--bf16"]
    arguments = with_json(config, *more)
    assert arguments.dtype is torch.bfloat16 and arguments.deepspeed["gradient_clipping"] == 1.0
    assert (arguments.micro_batch_size, arguments.num_microbatches, arguments.global_batch_size) == (3, 4, 24)
    assert arguments.deepspeed["optimizer"]["params"]["betas"] == [0.9, 0.999]


def test_auto_that_nothing_fills_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"optimizer\.params\.lr" is "auto" and nothing fills it in'):
        with_json({**JSON, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})


def test_values_of_the_json_hold_where_no_argument_is_given() -> None:
    config = {
        **JSON,
        "gradient_clipping": 0.25,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}},
    }
    arguments = with_json(config)
    assert arguments.optimizer.lr == 3e-4 and arguments.optimizer.weight_decay == 0.2
    assert arguments.optimizer.clip_grad == 0.25 and arguments.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("section", "more", "names"),
    [
        ({"gradient_clipping": 2.0}, ["--clip-grad", "1.0"], ["--clip-grad 1.0", '"gradient_clipping": 2.0']),
        ({}, ["--micro-batch-size", "8"], ["--micro-batch-size 8", '"train_micro_batch_size_per_gpu": 2']),
        ({"train_batch_size": 16}, ["--global-batch-size", "32"], ["--global-batch-size 32", '"train_batch_size": 16']),
        ({"bf16": {"enabled": False}}, ["--bf16"], ["--bf16", '"bf16.enabled": false']),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            ["--lr", "1e-3"],
            ["--lr 0.001", '"optimizer.params.lr": 0.0001'],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.98]}}},
            ["--adam-beta2", "0.95"],
            ["--adam-beta1/--adam-beta2", "betas"],
        ),
    ],
)
def test_a_contradiction_names_both_values_and_both_places(
    section: dict[str, Any], more: list[str], names: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        with_json({**JSON, **section}, *more)
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_equal_values_on_both_sides_are_no_contradiction() -> None:
    config = {**JSON, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    assert with_json(config, "--clip-grad", "1", "--lr", "0.001", "--micro-batch-size", "2").optimizer.lr == 1e-3


def test_a_scheduler_section_is_refused() -> None:
    config = {**JSON, "scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(ValueError, match="--lr-decay-style"):
        with_json(config, "--lr", "1e-3")


def test_a_profile_of_rounds_needs_rounds() -> None:
    with pytest.raises(ValueError, match="--profile-rounds shows the rounds of ACCO"):
        with_json(JSON, "--lr", "1e-3", "--profile-rounds", "rounds.json")
    with pytest.raises(ValueError, match=r"rounds\.png names the trace"):
        with_json(JSON, "--lr", "1e-3", "--profile-rounds", "rounds.png")


def test_batch_sizes_that_do_not_multiply_show_all_numbers() -> None:
    with pytest.raises(ValueError) as caught:
        with_json(JSON, "--lr", "1e-3", "--global-batch-size", "12", ranks=2)
    assert all(number in str(caught.value) for number in ("12", " 2 ", " 4 ", "data-parallel size 2"))


def test_the_batch_counts_replicas_not_ranks() -> None:
    with pytest.raises(ValueError, match=r"not all 4 ranks: tensor-parallel size 2"):
        with_json(JSON, "--lr", "1", "--global-batch-size", "24", "--tensor-model-parallel-size", "2")
    resolved = with_json(JSON, "--lr", "1", "--global-batch-size", "16", "--tensor-model-parallel-size", "2")
    assert resolved.num_microbatches == 4


def test_one_tensor_parallel_rank_has_no_sequence_to_split() -> None:
    assert not parsed("--sequence-parallel").sequence_parallel
    assert parsed("--sequence-parallel", "--tensor-model-parallel-size", "2").sequence_parallel


def test_train_samples_make_whole_updates() -> None:
    words = [word for word in REQUIRED if word not in ("--train-iters", "20")]
    arguments = resolve(parse_arguments([*words, "--train-samples", "100", "--lr", "1"]), JSON, 2)
    assert arguments.train_iters == 6
    with pytest.raises(ValueError, match="less than one global batch of 16"):
        resolve(parse_arguments([*words, "--train-samples", "10", "--lr", "1"]), JSON, 2)


def test_sgd_takes_no_arguments_of_adam() -> None:
    arguments = with_json(JSON, "--lr", "0.1", "--optimizer", "sgd")
    assert arguments.deepspeed["optimizer"] == {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.01}}


# ---- the learning-rate schedule -----------------------------------------------------------------------------------


def rates(options: OptimizerOptions, iters: int, batch: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = resolve_schedule(options, iters * batch, batch).build(optimizer)
    result = []
    for _ in range(iters):
        result.append(optimizer.param_groups[0]["lr"])
        scheduler.step(batch)
    return result


def test_lr_moves_once_per_update_whatever_the_batch() -> None:
    options = OptimizerOptions(lr=1.0, lr_warmup_iters=10, lr_decay_style="linear")
    expected = [t / 10 for t in range(11)] + [1.0 - (t - 10) / 10 for t in range(11, 20)]
    for batch in (1, 4, 32):
        assert rates(options, 20, batch) == pytest.approx(expected)


def test_the_groups_of_muon_keep_their_own_rates_and_decays() -> None:
    """As DeepSpeed builds them from "lr", "muon_lr" and a group without decay."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.5, weight_decay=0.1)
    matrices, vectors = optimizer.param_groups
    matrices |= {"use_muon": True, "lr": 5.0}
    vectors |= {"use_muon": False, "weight_decay": 0.0}
    options = OptimizerOptions(lr=0.5, min_lr=0.1, lr_decay_style="linear", lr_decay_iters=4, weight_decay=0.1)
    scheduler = resolve_schedule(options, 40, 10).build(optimizer)
    for rate in (0.4, 0.3, 0.2, 0.1):
        scheduler.step(10)
        assert (matrices["lr"], vectors["lr"]) == pytest.approx((10 * rate, rate))
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_lr_decays_to_the_minimum_by_the_cosine() -> None:
    options = OptimizerOptions(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_decay_iters=10)
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * min(t, 10) / 10)) for t in range(15)]
    assert rates(options, 15, 8) == pytest.approx(expected)


def test_lr_warmup_fraction_is_a_share_of_the_decay() -> None:
    schedule = resolve_schedule(OptimizerOptions(lr=1.0, lr_warmup_fraction=0.1), 1000, 10)
    assert (schedule.warmup, schedule.decay) == (100, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OptimizerOptions(), "no learning rate"),
        (OptimizerOptions(lr=0.0), "--lr must be above 0"),
        (OptimizerOptions(lr=1e-4, min_lr=1e-3), "lies below --min-lr 0.001"),
        (OptimizerOptions(lr=1.0, lr_warmup_iters=20), "must be shorter than the decay"),
    ],
)
def test_impossible_schedules_are_refused(options: OptimizerOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_schedule(options, 100, 10)


def test_weight_decay_spares_the_groups_without() -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = resolve_schedule(OptimizerOptions(lr=1.0, weight_decay=0.3), 100, 10).build(optimizer)
    scheduler.step(10)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


# ---- ranks and threads --------------------------------------------------------------------------------------------


def test_launcher_variables_are_read() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "h"}
    assert discover_ranks(environ) == Ranks(3, 4, 1, 2)


def test_ranks_are_derived_from_slurm() -> None:
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}
    ranks = discover_ranks(environ)
    assert (ranks.rank, ranks.world_size, environ["MASTER_ADDR"]) == (1, 2, "127.0.0.1")


def test_slurm_on_several_nodes_needs_the_address() -> None:
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
    with pytest.raises(ValueError, match=r"Slurm.* as rank 1 of 2, but MASTER_ADDR"):
        discover_ranks(environ)


def test_a_world_size_without_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but RANK is not set"):
        discover_ranks({"WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK 2 is not among the 2 ranks"):
        discover_ranks({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h"})


def test_a_process_of_its_own_is_one_rank() -> None:
    environ: dict[str, str] = {}
    assert discover_ranks(environ) == Ranks(0, 1, 0, 1)
    assert environ["MASTER_ADDR"] == "127.0.0.1" and int(environ["MASTER_PORT"]) > 0


def test_threads_are_the_cores_shared_by_the_ranks_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(8)))
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert "threads per rank: 4 (cores / ranks on the node; 8 cores, 2 ranks" in environment.set_threads(
            Ranks(0, 4, 0, 2)
        )
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert "OMP_NUM_THREADS" in environment.set_threads(Ranks(0, 4, 0, 2))
    finally:
        torch.set_num_threads(before)
