"""Checkpoints at update boundaries, in DeepSpeed's layout, with everything that an exact resume needs.

A checkpoint is the folder `<save>/global_step<N>` and becomes the one to resume from when `<save>/latest` names it.
That file is written last, by an atomic rename, so an interrupted save leaves the one before it in force.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_acco.training.options import option

if TYPE_CHECKING:
    from megatron_acco.training.schedule import Schedule

_STATE = "megatron_acco"
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


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints go and come from, in Megatron's argument names."""

    save: str | None = option(None, "Folder to save checkpoints in.")
    load: str | None = option(
        None, "Folder to resume from; if it is the --save folder it may be empty, and training starts fresh."
    )
    save_interval: int | None = option(None, "Updates between checkpoints.")

    def __post_init__(self) -> None:
        for name in ("save", "load"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} is empty; give a folder")
        if self.save_interval is not None and self.save_interval < 1:
            raise ValueError(f"--save-interval must be 1 or more, got {self.save_interval}")
        if self.save_interval is not None and self.save is None:
            raise ValueError("--save-interval needs --save")


@dataclass
class TrainState:
    """What must survive a restart besides the engine's own state.

    Attributes:
        iteration: committed updates (DeepSpeed: global steps).
        consumed_train_samples: samples whose gradient went into those updates, over all ranks.
        best_validation_loss: lowest validation loss so far.
        train_seconds: wall clock spent in the training loop, evaluations and saves left out.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    best_validation_loss: float = float("inf")
    train_seconds: float = 0.0
    micro_batches_by_rank: list[int] = field(default_factory=list)

    def position(self, rank: int, ranks: int) -> int:
        """Micro-batches that data-parallel rank `rank` of `ranks` has done of its own stream of samples.

        On another number of ranks the streams are cut anew, behind the furthest rank: no sample comes twice.
        """
        before = self.micro_batches_by_rank
        if len(before) == ranks:
            return before[rank]
        return -(-max(before, default=0) * len(before) // ranks)


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
    """

    model: dict[str, Any]
    schedule: dict[str, Any]
    order: dict[str, Any]
    ranks: int
    arguments: dict[str, Any]
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from, checked against the run."""

    folder: Path
    tag: str
    notices: tuple[str, ...] = ()


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


def find_checkpoint(options: CheckpointOptions, mine: Identity, override_schedule: bool) -> Found | None:
    """The checkpoint that --load names, None if there is none to load. Reads no tensors and uses no collective.

    Raises:
        ValueError: if the folder holds no complete checkpoint, or one of another model, schedule or rank count.
    """
    if options.load is None:
        return None
    folder = Path(options.load)
    latest = folder / "latest"
    if not latest.is_file():
        if options.save is not None and folder.resolve() == Path(options.save).resolve():
            return None
        raise ValueError(f"--load {folder}: no checkpoint there (no file {latest})")
    try:
        tag = latest.read_text().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"--load {folder}: {latest} cannot be read: {error}") from error
    model_file = folder / tag / "mp_rank_00_model_states.pt"
    if not tag or not model_file.is_file():
        raise ValueError(f"--load {folder}: {latest} names {tag!r}, but there is no file {model_file}")
    try:
        content = torch.load(model_file, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise ValueError(f"--load {folder}: {model_file} is damaged: {error}") from error
    header = content.get(_STATE)
    if header is None:
        raise ValueError(f"--load {folder}: {tag} was not written by pretrain_gpt_acco.py")
    saved: Identity = Identity(**header["identity"])
    _check_complete(folder, tag, saved)
    return Found(folder, tag, _compare(saved, mine, f"{folder}/{tag}", override_schedule))


def _check_complete(folder: Path, tag: str, saved: Identity) -> None:
    for part in range(saved.tensor_parallel):
        of_part = f" of tensor-parallel rank {part}" if saved.tensor_parallel > 1 else ""
        if not (folder / tag / f"mp_rank_{part:02d}_model_states.pt").is_file():
            raise ValueError(f"--load {folder}: {tag} is incomplete, it has no weights{of_part}")
        for rank in range(saved.ranks):
            # DeepSpeed marks the files of bf16 runs.
            names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt" for prefix in ("", "bf16_")]
            shards = [folder / tag / name for name in names if (folder / tag / name).is_file()]
            if not shards:
                raise ValueError(
                    f"--load {folder}: {tag} is incomplete, it has no optimizer file of rank {rank}{of_part}"
                )
            if not zipfile.is_zipfile(shards[0]):
                raise ValueError(f"--load {folder}: {shards[0]} is damaged (cut off?)")


def _compare(saved: Identity, mine: Identity, where: str, override_schedule: bool) -> tuple[str, ...]:
    """Raise for differences that make the checkpoint useless; return a notice for those that are the user's choice."""
    if saved.tensor_parallel != mine.tensor_parallel:
        raise ValueError(
            f"--load {where} was saved with --tensor-model-parallel-size {saved.tensor_parallel}, this run has "
            f"{mine.tensor_parallel}; resuming with another tensor-parallel size is not supported in this release"
        )
    different = _differences(saved.model, mine.model, _FREE_MODEL_OPTIONS)
    if different:
        raise ValueError(f"--load {where} is of another model: {different}")
    if saved.ranks != mine.ranks:
        raise ValueError(
            f"--load {where} was saved by {saved.ranks} data-parallel ranks, this run has {mine.ranks}; resuming on "
            f"another number of ranks is not supported in this release"
        )
    different = _differences(saved.schedule, mine.schedule)
    if different and not override_schedule:
        raise ValueError(
            f"--load {where} has another learning-rate schedule: {different}; repeat the arguments of the first run, "
            f"or take the new ones with --override-opt_param-scheduler"
        )
    different = _differences(saved.order, mine.order)
    return (f"the order of samples changes at the resume: {different}",) if different else ()


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> str:
    return ", ".join(
        f"{name} is {saved.get(name)} in the checkpoint and {mine.get(name)} here"
        for name in sorted({*saved, *mine} - ignored)
        if saved.get(name) != mine.get(name)
    )


class Checkpointer:
    """Saves and loads. Both are collective over all ranks, at an update boundary."""

    def __init__(self, engine: Any, options: CheckpointOptions, identity: Identity, control: dist.ProcessGroup) -> None:
        self.engine = engine
        self.options = options
        self.identity = identity
        self.control = control
        self.saved_iteration: int | None = None

    def save(self, state: TrainState) -> Path | None:
        """Write a checkpoint unless this iteration's is there already. Returns its folder if one was written."""
        if self.options.save is None or self.saved_iteration == state.iteration:
            return None
        folder, tag = Path(self.options.save), f"global_step{state.iteration}"
        generators: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(generators, random_state(), group=self.control)
        own_state = {
            "state": dataclasses.asdict(state),
            "generators": generators,
            "identity": dataclasses.asdict(self.identity),
        }
        self.engine.save_checkpoint(str(folder), tag=tag, client_state={_STATE: own_state}, save_latest=False)
        # All shards are on disk once every rank is here.
        dist.barrier(group=self.control)
        if dist.get_rank() == 0:
            _write_latest(folder, tag)
        dist.barrier(group=self.control)
        self.saved_iteration = state.iteration
        return folder / tag

    def load(self, found: Found) -> TrainState:
        """Load everything but the random generators; `restore_generators` comes after all that draws from them."""
        tags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tags, found.tag, group=self.control)
        if len(set(tags)) > 1:
            raise RuntimeError(f"the ranks found different checkpoints in {found.folder}: {sorted(set(tags))}")
        path, client_state = self.engine.load_checkpoint(str(found.folder), tag=found.tag)
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {found.folder / found.tag}")
        # The optimizer's state brings the rates of the save; with another schedule they would stand for one update.
        self.engine.lr_scheduler.step(0)
        self.loaded_generators = client_state[_STATE]["generators"][dist.get_rank()]
        state = TrainState(**client_state[_STATE]["state"])
        if self.options.save is not None and found.folder.resolve() == Path(self.options.save).resolve():
            self.saved_iteration = state.iteration
        return state

    def restore_generators(self) -> None:
        """Set every random generator of this rank as it was at the save."""
        set_random_state(self.loaded_generators)


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


def _write_latest(folder: Path, tag: str) -> None:
    staged = folder / f".latest.{os.getpid()}"
    with open(staged, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, folder / "latest")


def lock_folder(folder: Path) -> Any:
    """Take the folder for this job, for as long as the returned handle lives. Called on one rank.

    Raises:
        ValueError: if another job holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "a")  # noqa: SIM115 (the lock lives as long as the handle)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another job is writing to {folder}; give each job its own --save folder") from error
    except OSError:
        pass  # a file system without locks: nothing to hold on to
    return handle
