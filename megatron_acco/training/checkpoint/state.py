"""What a checkpoint holds besides DeepSpeed's own state, and what it is compared by before anything is loaded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_acco.training.blends import DataOptions
from megatron_acco.training.options import flag_of, option

if TYPE_CHECKING:
    from megatron_acco.training.schedule import Schedule

CLIENT_STATE = "megatron_acco"
"""Key of our part in DeepSpeed's model file."""

PADDED_VOCABULARY = "padded_vocab_size"
"""The one entry of a model's identity that depends on the tensor-parallel size."""

# Changing these does not change which weights the model has.
_FREE_MODEL_OPTIONS = frozenset(
    {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "use_cpu_initialization",
        "make_vocab_size_divisible_by",
    }
)

# Options that checkpoints of earlier releases do not know, with what those releases did.
_NEW_MODEL_OPTIONS = {"openai_gelu": False}


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints go and come from, in Megatron's argument names."""

    save: str | None = option(None, "Folder to save checkpoints in.")
    load: str | None = option(
        None, "Folder to resume from; if it is the --save folder it may be empty, and training starts fresh."
    )
    save_interval: int | None = option(None, "Updates between checkpoints.")
    save_retain: int | None = option(
        None, "Keep this many of the newest checkpoints in the --save folder; older ones are deleted after a save."
    )
    async_save: bool = option(
        False, "Write the checkpoints of --save-interval beside training, from a copy in host memory."
    )
    load_strict: bool = option(
        False, "A damaged or partial checkpoint is an error; without it the newest whole one before it is taken."
    )
    finetune: bool = option(
        False, "Take nothing but the weights from --load, and begin a new run with them at iteration 0."
    )
    pretrained_checkpoint: str | None = option(
        None, "Weights to begin with where --load has no checkpoint yet, so that the same command also resumes."
    )

    def __post_init__(self) -> None:
        for name in ("save", "load"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} is empty; give a folder")
        for name in ("save_interval", "save_retain"):
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag} must be 1 or more, got {value}")
            if value is not None and self.save is None:
                raise ValueError(f"{flag} needs --save")
        if self.async_save and self.save is None:
            raise ValueError("--async-save needs --save")
        if self.load_strict and self.load is None:
            raise ValueError("--load-strict needs --load")
        if self.pretrained_checkpoint == "":
            raise ValueError("--pretrained-checkpoint is empty; give a folder")
        if self.finetune and self.load is None:
            raise ValueError("--finetune takes weights from --load; give that folder")
        if self.finetune and self.pretrained_checkpoint is not None:
            raise ValueError(
                "--finetune and --pretrained-checkpoint contradict each other: with the first, --load gives the "
                "weights, with the second a run to resume"
            )

    @property
    def weights_from(self) -> str | None:
        """Where a run that does not resume takes its first weights from; None: they are drawn."""
        return self.load if self.finetune else self.pretrained_checkpoint


@dataclass
class TrainState:
    """What must survive a restart besides the engine's own state.

    Attributes:
        iteration: committed updates (DeepSpeed: global steps).
        consumed_train_samples: samples whose gradient went into those updates, over all ranks.
        best_validation_loss: lowest validation loss so far.
        train_seconds: wall clock spent in the training loop, evaluations and saves left out.
        micro_batches_by_rank: with adaptive accumulation, micro-batches that each data-parallel rank has done.
        micro_batch_size: samples in each of those; 0, in checkpoints of earlier releases, as many as now.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    best_validation_loss: float = float("inf")
    train_seconds: float = 0.0
    micro_batches_by_rank: list[int] = field(default_factory=list)
    micro_batch_size: int = 0

    def position(self, rank: int, ranks: int, micro_batch_size: int) -> int:
        """Micro-batches that data-parallel rank `rank` of `ranks` has done of its own stream of samples.

        On another number of ranks, with another size of micro-batches and after fixed accumulation the streams are cut
        anew, behind the furthest rank: no sample comes twice.
        """
        before, size = self.micro_batches_by_rank, self.micro_batch_size or micro_batch_size
        if len(before) == ranks and size == micro_batch_size:
            return before[rank]
        used = max(before) * len(before) * size if before else self.consumed_train_samples
        return -(-used // (ranks * micro_batch_size))


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: compared before anything is loaded from it.

    Attributes:
        model: the model options and the padded vocabulary.
        schedule: lengths and rates of the learning-rate schedule.
        order: what the order of the samples depends on.
        ranks: number of data-parallel ranks.
        arguments: the whole command line and JSON, for the reader.
        tensor_parallel: number of tensor-parallel ranks, each of which has files of its own.
        vocab_size: ids of the tokenizer, the rows of the embedding that mean something; None in checkpoints of earlier
            releases.
        tokenizer: `megatron_acco.training.tokenizer.ids_digest` of it; None: not known.
        partitions: ranks among which the optimizer state is cut, if these are not all (`acco.estimate_group`), else 0.

    With `ranks` 0 there are weights and nothing else (`megatron-acco import`).
    """

    model: dict[str, Any]
    schedule: dict[str, Any]
    order: dict[str, Any]
    ranks: int
    arguments: dict[str, Any]
    tensor_parallel: int = 1
    vocab_size: int | None = None
    tokenizer: str | None = None
    partitions: int = 0

    @property
    def shards(self) -> int:
        """Optimizer files of a tensor-parallel rank."""
        return self.partitions or self.ranks


def refuse_other_writers(options: CheckpointOptions, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the JSON chooses a writer of DeepSpeed's that would write past the checks of --save."""
    section = config.get("checkpoint")
    writer = section.get("writer") if isinstance(section, Mapping) else None
    for key, value in {"checkpoint.writer": writer, "datastates_ckpt": config.get("datastates_ckpt")}.items():
        if options.save is not None and value not in (None, False):
            raise ValueError(
                f'"{key}": --save has a writer of its own, with checksums; remove the key, and give --async-save to '
                f"write beside training"
            )


def describe_schedule(schedule: Schedule) -> dict[str, Any]:
    """The schedule as plain values."""
    return {
        "lr": schedule.peak,
        "min_lr": schedule.options.min_lr,
        "lr_decay_style": schedule.options.lr_decay_style,
        "weight_decay": schedule.options.weight_decay,
        "warmup_samples": schedule.warmup,
        "decay_samples": schedule.decay,
    }


def compare(
    saved: Identity, mine: Identity, where: str, override_schedule: bool, universal: bool = False
) -> tuple[str, ...]:
    """Raise for differences that make the checkpoint useless; return a notice for those that are the user's choice.

    Args:
        saved: of the checkpoint.
        mine: of this run.
        where: the checkpoint, for the message.
        override_schedule: take this run's schedule if it is another one.
        universal: the checkpoint is in DeepSpeed's universal form, which is of any tensor-parallel size.

    Raises:
        ValueError: for another tensor-parallel size, model, learning-rate schedule, or, on another number of ranks,
            another global batch.
    """
    if saved.ranks == 0:
        raise ValueError(f"--load {where} holds weights only, no run to resume; add --finetune to begin one with them")
    resized = saved.tensor_parallel != mine.tensor_parallel
    if resized and not universal:
        raise ValueError(
            f"--load {where} was saved with --tensor-model-parallel-size {saved.tensor_parallel}, this run has "
            f"{mine.tensor_parallel}; convert it with `python -m deepspeed.checkpoint.ds_to_universal --input_folder "
            f"{where} --output_folder {where}_universal` and start again with "
            f'"checkpoint": {{"load_universal": true}} in the DeepSpeed JSON'
        )
    different = model_differences(saved.model, mine.model)
    if different:
        padding, rows = "", saved.model.get(PADDED_VOCABULARY)
        if (
            resized
            and rows is not None
            and rows != mine.model.get(PADDED_VOCABULARY)
            and rows % mine.tensor_parallel == 0
        ):
            multiple = rows // mine.tensor_parallel
            padding = f"; --make-vocab-size-divisible-by {multiple} pads the vocabulary as in the checkpoint"
        raise ValueError(f"--load {where} is of another model: {different}{padding}")
    check_tokenizer(saved.tokenizer, mine.tokenizer, f"--load {where}")
    notices = []
    if saved.ranks != mine.ranks:
        before, now = _global_batch(saved), _global_batch(mine)
        if before != now:
            raise ValueError(
                f"--load {where} was saved by {saved.ranks} data-parallel ranks with a global batch of {before} "
                f"samples, on this run's {mine.ranks} ranks it would be {now}; give --global-batch-size {before} (and "
                f'"auto" for the batch sizes of the JSON), so that updates and learning rate keep their meaning'
            )
        notices.append(
            f"saved by {saved.ranks} data-parallel ranks, continued on {mine.ranks}: the order of samples goes on, "
            f"but the ranks draw other dropout masks"
        )
    if resized:
        notices.append(
            f"saved with --tensor-model-parallel-size {saved.tensor_parallel}, continued with {mine.tensor_parallel}: "
            f"the order of samples goes on, but dropout masks are drawn from fresh seeds"
        )
    different = _differences(saved.schedule, mine.schedule)
    if different and not override_schedule:
        raise ValueError(
            f"--load {where} has another learning-rate schedule: {different}; repeat the arguments of the first run, "
            f"or take the new ones with --override-opt_param-scheduler"
        )
    different = _differences(_flat(saved.order), _flat(mine.order))
    if different:
        notices.append(f"the order of samples changes at the resume: {different}")
    return tuple(notices)


def check_tokenizer(saved: str | None, mine: str | None, what: str) -> None:
    """Raise ValueError if `Identity.tokenizer` of a checkpoint and of a tokenizer at hand are known and differ."""
    if None not in (saved, mine) and saved != mine:
        raise ValueError(
            f"{what} was trained with another tokenizer: this one gives other ids for the same text; give "
            f"--tokenizer-model (and --tokenizer-type) of the training"
        )


def _flat(order: Mapping[str, Any]) -> dict[str, Any]:
    """`Identity.order` with each data option by its flag; one that a release did not know has its default."""
    data = order.get("data")
    if not isinstance(data, Mapping):  # of the first release
        return dict(order)
    own = {flag_of(f): f.default if data.get(f.name) is None else data[f.name] for f in fields(DataOptions)}
    return {**{name: value for name, value in order.items() if name != "data"}, **own}


def model_differences(saved: Mapping[str, Any], mine: Mapping[str, Any], free: frozenset[str] = frozenset()) -> str:
    """Which options make the weights of two models unlike, in words; empty if none.

    Args:
        saved: `Identity.model` of a checkpoint.
        mine: the same of this run.
        free: options that may differ beside those that change no weights.
    """
    saved, mine = {**_NEW_MODEL_OPTIONS, **saved}, {**_NEW_MODEL_OPTIONS, **mine}
    return _differences(saved, mine, _FREE_MODEL_OPTIONS | free)


def _global_batch(identity: Identity) -> Any:
    return identity.arguments.get("deepspeed", {}).get("train_batch_size")


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> str:
    return ", ".join(
        f"{name} is {saved.get(name)} in the checkpoint and {mine.get(name)} here"
        for name in sorted({*saved, *mine} - ignored)
        if saved.get(name) != mine.get(name)
    )


def random_state() -> dict[str, Any]:
    """The state of every random generator that training draws from on this rank."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "tensor_parallel": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["accelerator"] = get_accelerator().get_rng_state().cpu()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "tensor_parallel" in state:  # not on the CPU before tensor parallelism was supported
        get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    if torch.cuda.is_available() and "accelerator" in state:
        get_accelerator().set_rng_state(state["accelerator"])
