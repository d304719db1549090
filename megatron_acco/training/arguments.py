"""The command line of pretrain_gpt_acco.py, and how it meets the DeepSpeed JSON.

Precedence: defaults < DeepSpeed JSON < arguments given; an argument given that contradicts a value in the JSON is
an error, "auto" in the JSON takes the argument's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_acco import ds_json
from megatron_acco.config import acco_config
from megatron_acco.ds_json import ArgumentValue
from megatron_acco.training.checkpoint import CheckpointOptions
from megatron_acco.training.data import DataOptions
from megatron_acco.training.metrics import LoggingOptions
from megatron_acco.training.model import ModelOptions
from megatron_acco.training.options import ArgumentParser, add_options, build, option
from megatron_acco.training.schedule import OptimizerOptions
from megatron_acco.training.tokenizer import TokenizerOptions


@dataclass(frozen=True)
class TrainingOptions:
    """Length and batch of the run, in Megatron's argument names."""

    seq_length: int = option(doc="Tokens per sample.")
    micro_batch_size: int | None = option(None, "Samples per rank and micro-batch.")
    global_batch_size: int | None = option(None, "Samples per update, over all ranks and micro-batches.")
    train_iters: int | None = option(None, "Updates to train for.")
    train_samples: int | None = option(None, "The same in samples.")
    calculate_per_token_loss: bool = option(
        False, "Average over the tokens with loss of a whole update, not over those of each micro-batch first."
    )
    seed: int = option(1234, "Seed of weights, dropout and sample order.")
    eval_interval: int = option(1000, "Updates between evaluations; 0: at the end only.")
    eval_iters: int = option(100, "Size of the validation set in global batches; 0: no evaluation.")
    exit_interval: int | None = option(None, "Save and exit at the first multiple of this many updates.")
    exit_duration_in_mins: float | None = option(None, "Save and exit after this many minutes, set-up included.")

    def __post_init__(self) -> None:
        if (self.train_iters is None) == (self.train_samples is None):
            raise ValueError("give the length of the run, --train-iters or --train-samples (not both)")
        for name in ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "train_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
        for name in ("eval_interval", "eval_iters", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(self, name)}")
        if self.seed >= 1 << 31:
            raise ValueError(f"--seed must be below {1 << 31}, got {self.seed}")
        for name in ("exit_interval", "exit_duration_in_mins"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")


@dataclass(frozen=True)
class RunOptions:
    """Launching, precision and parallelism."""

    deepspeed_config: str = option(doc="DeepSpeed JSON file.", flag="--deepspeed_config")
    deepspeed: bool = option(False, "Accepted because DeepSpeed's examples pass it; DeepSpeed is always used.")
    local_rank: int | None = option(None, "Set by the launcher.", flag="--local_rank")
    bf16: bool = option(False, "Train in bfloat16 with fp32 master weights.")
    fp16: bool = option(False, "Train in float16 with fp32 master weights and loss scaling.")
    tensor_model_parallel_size: int = option(1, "Ranks that share one copy of the model.")
    sequence_parallel: bool = option(
        False, "Split activations between the linear layers by sequence over the tensor-parallel ranks."
    )
    pipeline_model_parallel_size: int = option(1, "Pipeline-parallel size (1 only).")
    context_parallel_size: int = option(1, "Context-parallel size (1 only).")
    distributed_timeout_minutes: float = option(10.0, "Time limit of every collective and of the rendezvous.")

    def __post_init__(self) -> None:
        if self.tensor_model_parallel_size < 1:
            raise ValueError(f"--tensor-model-parallel-size must be 1 or more, got {self.tensor_model_parallel_size}")
        for name in ("pipeline_model_parallel_size", "context_parallel_size"):
            if getattr(self, name) != 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is not supported; only 1 is")
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 contradict each other; give one")
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(f"--distributed-timeout-minutes must be above 0, got {self.distributed_timeout_minutes}")


@dataclass(frozen=True)
class Arguments:
    """Everything the run was asked for. `deepspeed` is the resolved JSON once `resolve` has run."""

    model: ModelOptions
    tokenizer: TokenizerOptions
    data: DataOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    checkpoint: CheckpointOptions
    logging: LoggingOptions
    run: RunOptions
    given: frozenset[str]
    deepspeed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def micro_batch_size(self) -> int:
        """Samples per rank and micro-batch."""
        return int(self.deepspeed["train_micro_batch_size_per_gpu"])

    @property
    def global_batch_size(self) -> int:
        """Samples per update."""
        return int(self.deepspeed["train_batch_size"])

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank and update."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    @property
    def train_iters(self) -> int:
        """Updates to train for."""
        if self.training.train_iters is not None:
            return self.training.train_iters
        assert self.training.train_samples is not None
        return self.training.train_samples // self.global_batch_size

    @property
    def adaptive(self) -> bool:
        """Whether updates grow with the exchange, so that the run's length is counted in samples."""
        acco = acco_config(self.deepspeed)
        return acco is not None and acco.adaptive

    @property
    def train_samples(self) -> int:
        """Samples to train for; with adaptive accumulation the last update may go beyond."""
        return self.train_iters * self.global_batch_size

    @property
    def per_token_loss(self) -> bool:
        """Whether a token weighs the same wherever it stands; examples have unequal numbers of them."""
        return self.training.calculate_per_token_loss or self.data.sft

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split by sequence; as in Megatron, one tensor-parallel rank has nothing to split."""
        return self.run.sequence_parallel and self.run.tensor_model_parallel_size > 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights shown to compute."""
        if _precision(self.deepspeed, "bf16", "bfloat16"):
            return torch.bfloat16
        return torch.float16 if _precision(self.deepspeed, "fp16") else torch.float32

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for the run folder and the checkpoint."""
        plain = {
            group.name: dataclasses.asdict(getattr(self, group.name))
            for group in dataclasses.fields(self)
            if group.name in _GROUPS
        }
        return {**plain, "deepspeed": dict(self.deepspeed)}


_GROUPS: dict[str, tuple[type[Any], str]] = {
    "model": (ModelOptions, "model"),
    "tokenizer": (TokenizerOptions, "tokenizer"),
    "data": (DataOptions, "data"),
    "training": (TrainingOptions, "training"),
    "optimizer": (OptimizerOptions, "optimizer and learning rate"),
    "checkpoint": (CheckpointOptions, "checkpoints"),
    "logging": (LoggingOptions, "logging"),
    "run": (RunOptions, "launching, precision, parallelism"),
}


def parser() -> ArgumentParser:
    """The parser of the command line."""
    result = ArgumentParser(
        prog="pretrain_gpt_acco.py",
        description="Pretrain a GPT model with DeepSpeed ZeRO stage 1, with or without ACCO.",
        allow_abbrev=False,
    )
    for cls, title in _GROUPS.values():
        add_options(result, cls, title)
    return result


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """The command line, checked by itself (not yet against the JSON).

    Raises:
        ValueError: with one message for the user; an unknown argument is answered with the nearest known one.
    """
    command_line = parser()
    namespace, unknown = command_line.parse_known_args(argv)
    command_line.refuse_unknown(unknown)
    given = vars(namespace)
    groups = {name: build(cls, given) for name, (cls, _) in _GROUPS.items()}
    arguments = Arguments(**groups, given=frozenset(given))
    if arguments.training.seq_length > arguments.model.max_position_embeddings:
        raise ValueError(
            f"--seq-length {arguments.training.seq_length} is longer than --max-position-embeddings "
            f"{arguments.model.max_position_embeddings}"
        )
    _check_tensor_parallel(arguments)
    return arguments


def _check_tensor_parallel(arguments: Arguments) -> None:
    size, length = arguments.run.tensor_model_parallel_size, arguments.training.seq_length
    arguments.model.check_tensor_parallel(size)
    if arguments.sequence_parallel and length % size:
        raise ValueError(
            f"--sequence-parallel: --seq-length {length} is not a multiple of --tensor-model-parallel-size {size}"
        )


def resolve(arguments: Arguments, config: Mapping[str, Any], dp_world_size: int) -> Arguments:
    """Bring arguments and JSON together.

    Args:
        arguments: the command line.
        config: the parsed JSON.
        dp_world_size: number of data-parallel ranks.

    Returns:
        The arguments with the values that the JSON decides, and with `deepspeed` the complete, valid JSON.

    Raises:
        ValueError: naming both values and both places where the two contradict each other, and for everything that
            `ds_json.validate` refuses.
    """
    if "scheduler" in config:
        raise ValueError(
            'the DeepSpeed JSON has a "scheduler" section, but the learning rate is scheduled by --lr-decay-style and '
            "the arguments beside it; remove the section"
        )
    merged = ds_json.reconcile(_with_auto(config, arguments), _shared_values(arguments))
    resolved = ds_json.validate(
        merged, dp_world_size=dp_world_size, tensor_parallel=arguments.run.tensor_model_parallel_size
    )
    params = resolved["optimizer"].get("params", {})
    taken = {name: params[name] for name in ("lr", "weight_decay") if name in params}
    optimizer = dataclasses.replace(arguments.optimizer, clip_grad=float(resolved["gradient_clipping"]), **taken)
    result = dataclasses.replace(arguments, optimizer=optimizer, deepspeed=resolved)
    if arguments.logging.profile_rounds is not None and acco_config(resolved) is None:
        raise ValueError('--profile-rounds shows the rounds of ACCO; the DeepSpeed JSON has no enabled "acco" section')
    if result.per_token_loss and result.adaptive:
        raise ValueError(
            "--sft and --calculate-per-token-loss need the tokens of an update counted before it begins, but with "
            '"accumulation": "adaptive" nobody knows how many micro-batches it will have; take "fixed"'
        )
    if result.train_iters < 1:
        raise ValueError(
            f"--train-samples {arguments.training.train_samples} is less than one global batch of "
            f"{result.global_batch_size}"
        )
    return result


def _precision(config: Mapping[str, Any], *sections: str) -> bool:
    return any(bool(config.get(section, {}).get("enabled", False)) for section in sections)


_ADAM = ("adam", "adamw")
_OPTIMIZER_TYPES = {"adam": "AdamW", "sgd": "SGD"}


def _with_auto(config: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """The JSON with "auto" where it is silent on what the arguments always decide."""
    result = dict(config)
    result.setdefault("gradient_clipping", "auto")
    if "optimizer" not in result and arguments.optimizer.optimizer == "sgd":
        # Asked for by name: DeepSpeed need not ask again.
        result.setdefault("zero_allow_untested_optimizer", True)
    section = result.setdefault("optimizer", {"type": _OPTIMIZER_TYPES[arguments.optimizer.optimizer]})
    if not isinstance(section, Mapping) or not isinstance(section.get("params", {}), Mapping):
        return result
    names = ["lr", "weight_decay"]
    kind = section.get("type")
    if isinstance(kind, str) and kind.lower() in (*_ADAM, "muon"):
        names += ["betas", "eps"]
    result["optimizer"] = {**section, "params": {**dict.fromkeys(names, "auto"), **section.get("params", {})}}
    return result


def _shared_values(arguments: Arguments) -> list[ArgumentValue]:
    """What both the command line and the JSON can say."""
    given, training, optimizer = arguments.given, arguments.training, arguments.optimizer
    betas = [optimizer.adam_beta1, optimizer.adam_beta2]
    values = [
        ("train_micro_batch_size_per_gpu", "micro_batch_size", training.micro_batch_size),
        ("train_batch_size", "global_batch_size", training.global_batch_size),
        ("gradient_clipping", "clip_grad", optimizer.clip_grad),
        ("optimizer.params.lr", "lr", optimizer.lr),
        ("optimizer.params.weight_decay", "weight_decay", optimizer.weight_decay),
        ("optimizer.params.eps", "adam_eps", optimizer.adam_eps),
        ("bf16.enabled", "bf16", arguments.run.bf16),
        ("fp16.enabled", "fp16", arguments.run.fp16),
    ]
    result = [ArgumentValue(path, "--" + name.replace("_", "-"), value, name in given) for path, name, value in values]
    betas_given = bool({"adam_beta1", "adam_beta2"} & given)
    result.append(ArgumentValue("optimizer.params.betas", "--adam-beta1/--adam-beta2", betas, betas_given))
    kind = _OPTIMIZER_TYPES[optimizer.optimizer]
    result.append(ArgumentValue("optimizer.type", "--optimizer", kind, "optimizer" in given))
    directory = arguments.logging.tensorboard_dir
    if directory is not None:
        result.append(ArgumentValue("tensorboard.enabled", "--tensorboard-dir", True, True))
        result.append(ArgumentValue("tensorboard.output_path", "--tensorboard-dir", directory, True))
    return result
