"""The entry point behind pretrain_gpt_acco.py: arguments -> model, data -> initialize -> train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_acco.config import acco_config
from megatron_acco.ds_json import describe_batch
from megatron_acco.hosts.meeting import HostsRefused
from megatron_acco.hosts.ranks import Ranks, discover_ranks
from megatron_acco.training import environment, liveness
from megatron_acco.training.checkpoint import Refused, SaveError
from megatron_acco.training.control import Stop
from megatron_acco.training.loop import Run, train
from megatron_acco.training.setup import Plan, build_run, make_plan


def main(argv: Sequence[str] | None = None, launcher: Sequence[int] = ()) -> int:
    """Train as the command line says.

    Args:
        argv: the command line.
        launcher: see `StopVote`; found by the script before its imports, which take seconds.

    Returns:
        The exit code, see `megatron_acco.training.environment`.
    """
    ranks: Ranks | None = None
    try:
        ranks = discover_ranks()
        threads = environment.set_threads(ranks)
        plan = make_plan(argv, ranks)
    except ValueError as error:
        return environment.end_with_message(ranks, str(error))
    try:
        run = build_run(plan, ranks)
        if ranks.rank == 0:
            report_start(plan, run, threads)
        stop = train(run, launcher)
        dist.barrier(group=run.control)
        liveness.stop()
        dist.barrier(group=run.control)  # with rank 0 goes the store that the others' signs are kept in
        dist.destroy_process_group()
    except (Refused, HostsRefused) as error:
        environment.end_at_once(environment.end_with_message(ranks, str(error)))
    except SaveError as error:
        environment.end_with_message(ranks, str(error))
        environment.end_at_once(environment.EXIT_FAILED)
    except BaseException:
        environment.end_after_failure(ranks)
    return environment.EXIT_SIGNAL if stop is Stop.SIGNAL else environment.EXIT_DONE


def report_start(plan: Plan, run: Run, threads: str) -> None:
    """Say what is about to run."""
    arguments = plan.arguments
    parameters = sum(parameter.numel() for parameter in run.engine.module.parameters())
    print(f" {threads}")
    parts = arguments.run.tensor_model_parallel_size
    share = "" if parts == 1 else f" on each of {parts} tensor-parallel ranks"
    print(f" model: {parameters:,} parameters{share}, vocabulary {plan.vocab_size} padded to {plan.padded_vocab_size}")
    print(f" {describe_batch(arguments.deepspeed, plan.identity.ranks, acco_config(arguments.deepspeed))}")
    print(
        f" device {run.engine.device}, {str(arguments.dtype).removeprefix('torch.')}, optimizer "
        f"{type(run.engine.optimizer).__name__} around {type(run.engine.basic_optimizer).__name__}"
    )
    found = run.found
    if found is not None:
        for warning in found.warnings:
            print(f" WARNING: {warning}")
        print(f" resumed from {found.folder / found.tag} at iteration {run.state.iteration}")
        if found.checked_bytes:
            size, seconds = found.checked_bytes / 1e6, found.checked_seconds
            print(f" checksums of this rank's share, {size:.1f} MB, compared in {seconds:.2f} s")
        for notice in found.notices:
            print(f" NOTICE: {notice}")
    elif plan.weights is not None:
        print(f" weights of {plan.weights.folder} (iteration {plan.weights.iteration}); a new run begins with them")
    elif arguments.checkpoint.load is not None:
        print(f" NOTICE: no checkpoint in {arguments.checkpoint.load} yet; training starts fresh")
    save = arguments.checkpoint.save
    if save is not None and (Path(save) / "latest").is_file():
        if found is None:
            print(f" NOTICE: {save} holds the checkpoint of a run before; the first save replaces it")
        elif found.folder.resolve() != Path(save).resolve():
            print(f" NOTICE: {save} holds checkpoints, too; give it to --load to continue from those")
    for notice in run.checkpointer.take_notices():
        print(f" NOTICE: {notice}")
    if plan.datasets.notice is not None:
        print(f" {plan.datasets.notice}")
    if arguments.adaptive:
        goal = f"sample {run.state.consumed_train_samples} to {arguments.train_samples}"
    else:
        goal = f"iteration {run.state.iteration} to {arguments.train_iters}"
    print(f" training from {goal}", flush=True)
