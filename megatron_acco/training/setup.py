"""From a command line to a run that is ready to train: first everything that can be refused, then the model."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils.data import Sampler

import megatron_acco
from megatron_acco import ds_json
from megatron_acco.hosts.facts import versions
from megatron_acco.hosts.meeting import HostsRefused
from megatron_acco.hosts.ranks import Ranks
from megatron_acco.ops import prepare_cpu_ops
from megatron_acco.training import environment, liveness
from megatron_acco.training.arguments import Arguments, parse_arguments, resolve
from megatron_acco.training.batches import (
    ConsumedSampleSampler,
    EvaluationSampler,
    OwnStreamSampler,
    build_loader,
)
from megatron_acco.training.checkpoint import (
    PADDED_VOCABULARY,
    Checkpointer,
    CheckpointOptions,
    Found,
    Identity,
    Reader,
    SaveError,
    Search,
    TrainState,
    agree,
    describe_schedule,
    find_checkpoint,
    lock_folder,
    refuse_other_writers,
)
from megatron_acco.training.checkpoint.weights import Weights, check_weights, find_weights, load_weights
from megatron_acco.training.data import Datasets, build_datasets
from megatron_acco.training.loop import Run
from megatron_acco.training.metrics import MetricsFile, TrainingLog
from megatron_acco.training.model import build_model, parameter_groups
from megatron_acco.training.replicated import sum_partial_gradients_in_backward
from megatron_acco.training.schedule import Schedule, resolve_schedule
from megatron_acco.training.tokenizer import build_tokenizer, ids_digest

# With adaptive accumulation: samples of a rank's stream, over those that it takes if all ranks are equally fast.
_FASTEST = 2
# Micro-batches of examples have a length that is a multiple of this (and of the tensor-parallel size).
_TRIM = 16


@dataclass(frozen=True)
class Plan:
    """A run whose arguments, JSON, data and checkpoint have been found good. Nothing is built yet.

    `search` is this rank's search for a checkpoint, None if there is none to resume from; `weights` are what a run that
    does not resume begins with, None if they are drawn.
    """

    arguments: Arguments
    schedule: Schedule
    vocab_size: int
    padded_vocab_size: int
    datasets: Datasets
    identity: Identity
    search: Search | None
    weights: Weights | None
    folder_lock: Any


_NOT_THE_ORDER = ("data_cache_path", "num_workers", "multiple_validation_sets")


def make_plan(argv: Sequence[str] | None, ranks: Ranks) -> Plan:
    """Check everything the user gave, on every rank by itself and without a collective.

    Raises:
        ValueError: with one message for the user.
    """
    arguments = parse_arguments(argv)
    tensor_parallel_size = arguments.run.tensor_model_parallel_size
    if ranks.world_size % tensor_parallel_size:
        raise ValueError(
            f"{ranks.world_size} ranks cannot be shared out to replicas of --tensor-model-parallel-size "
            f"{tensor_parallel_size} ranks"
        )
    dp_world_size = ranks.world_size // tensor_parallel_size
    arguments = resolve(arguments, ds_json.load_json(arguments.run.deepspeed_config), dp_world_size)
    schedule = resolve_schedule(arguments.optimizer, arguments.train_samples, arguments.global_batch_size)
    tokenizer = build_tokenizer(arguments.tokenizer)
    batch, training = arguments.global_batch_size, arguments.training
    evaluation_samples = training.eval_iters * batch
    datasets = build_datasets(
        arguments.data,
        tokenizer,
        training.seq_length,
        training.seed,
        (
            # A rank that is faster than the others goes further than they do in its stream.
            arguments.train_samples * (_FASTEST if arguments.adaptive else 1),
            evaluation_samples,
            evaluation_samples,
        ),
    )
    padded = arguments.model.padded_vocab_size(tokenizer.vocab_size, tensor_parallel_size)
    identity = Identity(
        model={**dataclasses.asdict(arguments.model), PADDED_VOCABULARY: padded},
        schedule=describe_schedule(schedule),
        order={
            "seq_length": training.seq_length,
            "seed": training.seed,
            "data": {**dataclasses.asdict(arguments.data), **dict.fromkeys(_NOT_THE_ORDER)},
            "train_samples": arguments.train_samples,
            "sample_index": datasets.key,
        },
        ranks=dp_world_size,
        tensor_parallel=tensor_parallel_size,
        arguments=arguments.as_dict(),
        vocab_size=tokenizer.vocab_size,
        tokenizer=ids_digest(tokenizer.tokenize),
    )
    refuse_other_writers(arguments.checkpoint, arguments.deepspeed)
    reader = Reader(ranks.rank, ranks.world_size, ranks.local_rank)
    override = arguments.optimizer.override_opt_param_scheduler
    search = None
    if not arguments.checkpoint.finetune:
        search = find_checkpoint(arguments.checkpoint, identity, override, reader)
    weights = None if search is not None else _first_weights(arguments.checkpoint, identity, reader)
    save = arguments.checkpoint.save
    lock = lock_folder(Path(save)) if save is not None and ranks.rank == 0 else None
    return Plan(arguments, schedule, tokenizer.vocab_size, padded, datasets, identity, search, weights, lock)


def _first_weights(options: CheckpointOptions, identity: Identity, reader: Reader) -> Weights | None:
    """The weights that a run begins with, checked; one rank per host compares their checksums."""
    if options.weights_from is None:
        return None
    flag = "--load" if options.finetune else "--pretrained-checkpoint"
    weights = find_weights(Path(options.weights_from), flag, checksums=reader.local_rank == 0)
    assert identity.vocab_size is not None
    check_weights(weights, identity.model, identity.vocab_size, identity.tokenizer, flag)
    return weights


def build_run(plan: Plan, ranks: Ranks) -> Run:
    """Meet the other ranks, build model and engine, and load the checkpoint if there is one. Collective."""
    arguments = plan.arguments
    prepare_cpu_ops(["ShareMemCommBuilder", *(["FusedAdamBuilder"] if _fused_adam(arguments.deepspeed) else [])])
    control = environment.initialize_distributed(
        ranks, arguments.run.tensor_model_parallel_size, arguments.run.distributed_timeout_minutes
    )
    with liveness.doing("comparing arguments, data and checkpoints with the other ranks"):
        _agree(plan, control)
        found = agree(plan.search, arguments.checkpoint.load_strict, control)
    environment.seed_everything(arguments.training.seed)
    with liveness.doing("building the model"):
        model = build_model(arguments.model, plan.padded_vocab_size, arguments.dtype, arguments.sequence_parallel)
        if found is None and plan.weights is not None:
            # Before the engine is built, which takes its master weights from the model.
            load_weights(
                model,
                plan.weights,
                plan.padded_vocab_size,
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_world_size(),
            )
    with liveness.doing("building the engine"):
        engine, _, _, _ = megatron_acco.initialize(
            model=model,
            model_parameters=parameter_groups(model),
            lr_scheduler=plan.schedule.build,
            mpu=environment.Mpu(),
            config=engine_config(arguments.deepspeed, found),
            dist_init_required=False,
        )
        if not isinstance(engine, megatron_acco.AccoEngine):
            sum_partial_gradients_in_backward(model, parallel_state.get_tensor_model_parallel_group())
    parts = dist.get_world_size(engine.optimizer.dp_process_group)
    identity = dataclasses.replace(plan.identity, partitions=parts if parts != plan.identity.ranks else 0)
    with liveness.doing("opening the --save folder"):
        checkpointer = Checkpointer(engine, arguments.checkpoint, identity, control)
    with liveness.doing("loading a checkpoint"):
        state = TrainState() if found is None else checkpointer.load(found)
    metrics = _open_metrics(arguments, state, resumed=found is not None, control=control)
    log = TrainingLog(
        engine, arguments.logging, metrics, control, _length(arguments), arguments.training.seq_length, state
    )
    run = Run(arguments, engine, state, *_loaders(plan, state), log, checkpointer, control, found)
    run.position = state.position(
        parallel_state.get_data_parallel_rank(), plan.identity.ranks, plan.arguments.micro_batch_size
    )
    environment.seed_dropout(arguments.training.seed)
    if found is not None:
        checkpointer.restore_generators()
    return run


def engine_config(config: Mapping[str, Any], found: Found | None) -> dict[str, Any]:
    """The JSON for the engine, which takes `load_universal` for the form that the checkpoint has.

    Once a run that was resumed from the universal form has saved, its own checkpoint is the one to resume from, and
    the JSON is the same.
    """
    if found is None or not config.get("checkpoint"):
        return dict(config)
    return {**config, "checkpoint": {**config["checkpoint"], "load_universal": found.universal}}


def _length(arguments: Arguments) -> int | None:
    """Updates of the run, None if only its samples are known."""
    return None if arguments.adaptive else arguments.train_iters


def _fused_adam(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed will build its own Adam, which it compiles."""
    section = config["optimizer"]
    return section["type"].lower() in ("adam", "adamw") and not section.get("params", {}).get("torch_adam", False)


def _agree(plan: Plan, control: dist.ProcessGroup) -> None:
    """All ranks must have read the same arguments and data (think of files that differ per host).

    Raises:
        HostsRefused: naming what differs and where, on all ranks.
    """
    mine = {
        **_flatten({**plan.identity.arguments, "run": {**plan.identity.arguments["run"], "local_rank": None}}),
        "the data files (.idx) or the tokenizer": plan.datasets.key,
        "the content of the sample index": plan.datasets.digest,
    }
    mine.pop("data.data_cache_path", None)  # a host may keep its cache where it likes
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, (socket.gethostname(), mine), group=control)
    for name in sorted({name for _, values in others for name in values}):
        kinds: dict[str, list[str]] = {}
        for rank, (host, values) in enumerate(others):
            kinds.setdefault(str(values.get(name)), []).append(f"rank {rank} on {host}")
        if len(kinds) > 1:
            parts = [f"{value} ({', '.join(who[:4])}{', ...' if who[4:] else ''})" for value, who in kinds.items()]
            raise HostsRefused(
                f"{name} differs: {'; '.join(parts)}; all hosts need the same command, JSON, data and tokenizer files "
                f"(megatron-acco doctor --data-path ... compares them)"
            )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def _loaders(plan: Plan, state: TrainState) -> tuple[Any, Any, Any]:
    arguments, training = plan.arguments, plan.arguments.training
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micro_batch, total = arguments.micro_batch_size, arguments.train_samples
    order: Sampler[list[int]]
    if arguments.adaptive:
        position = state.position(rank, ranks, micro_batch)
        order = OwnStreamSampler(total * _FASTEST, position, micro_batch, rank, ranks)
    else:
        order = ConsumedSampleSampler(total, state.consumed_train_samples, micro_batch, rank, ranks)
    # A micro-batch of short examples need not be computed at full length.
    trim = math.lcm(_TRIM, arguments.run.tensor_model_parallel_size) if arguments.data.sft else None
    workers = arguments.data.num_workers
    train = build_loader(plan.datasets.train, order, plan.vocab_size, workers, training.seed, trim)

    def evaluation(dataset: Any) -> Any:
        if dataset is None or training.eval_iters == 0:
            return None
        samples = min(len(dataset), training.eval_iters * arguments.global_batch_size)
        share = EvaluationSampler(samples, micro_batch, rank, ranks)
        return build_loader(dataset, share, plan.vocab_size, 0, training.seed, trim)

    validation = {name: evaluation(dataset) for name, dataset in plan.datasets.validation.items()}
    return train, {n: loader for n, loader in validation.items() if loader is not None}, evaluation(plan.datasets.test)


def _open_metrics(
    arguments: Arguments, state: TrainState, resumed: bool, control: dist.ProcessGroup
) -> MetricsFile | None:
    """metrics.jsonl on rank 0, None on the others. Collective; if it cannot be written, SaveError on all ranks."""
    path = arguments.logging.metrics_path(arguments.checkpoint.save)
    if path is None:
        return None
    metrics, problem = None, [""]
    if dist.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            resolved = {**arguments.as_dict(), "versions": versions()}
            path.with_name("arguments.json").write_text(json.dumps(resolved, indent=2) + "\n")
            metrics = MetricsFile(path, state.iteration if resumed else None)
        except OSError as error:
            problem = [f"cannot write {path} and arguments.json beside it: {error}"]
    dist.broadcast_object_list(problem, src=0, group=control)
    if problem[0]:
        raise SaveError(problem[0])
    return metrics
