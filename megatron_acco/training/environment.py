"""Ranks, process groups, threads, seeds and the device: everything between the launcher and the model."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import NoReturn

import deepspeed
import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from megatron.core import parallel_state, tensor_parallel

from megatron_acco.hosts import meeting
from megatron_acco.hosts.judge import Verdict
from megatron_acco.hosts.ranks import Ranks
from megatron_acco.shared_memory import release_shared_memory
from megatron_acco.training import liveness
from megatron_acco.training.without_cuda import support_cpu

EXIT_DONE = 0
"""Training reached its end, the end of the data, --exit-interval or --exit-duration-in-mins."""
EXIT_FAILED = 1
"""Something failed on this rank, or a checkpoint could not be saved; the launcher ends the others."""
EXIT_BAD_INPUT = 2
"""Arguments, JSON, data or checkpoint were refused before the model was built."""
EXIT_SIGNAL = 75
"""Stopped by SIGTERM, SIGUSR1 or Ctrl-C; if there is a --save folder, it holds a checkpoint to resume from."""

_SEEDS_PER_REPLICA = 10_000


def set_threads(ranks: Ranks) -> str:
    """Share the node's cores among its ranks unless OMP_NUM_THREADS says otherwise. Returns a line for the log."""
    cores = len(os.sched_getaffinity(0))
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is None:
        torch.set_num_threads(max(1, cores // ranks.local_world_size))
    source = "cores / ranks on the node" if chosen is None else "OMP_NUM_THREADS"
    return (
        f"threads per rank: {torch.get_num_threads()} ({source}; {cores} cores, {ranks.local_world_size} ranks on this "
        f"node)"
    )


class Mpu:
    """megatron-core's parallel state under the names that DeepSpeed asks of a model-parallel unit."""

    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_src_rank = staticmethod(parallel_state.get_tensor_model_parallel_src_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)


def initialize_distributed(ranks: Ranks, tensor_parallel_size: int, timeout_minutes: float) -> dist.ProcessGroup:
    """Meet the other ranks and set up Megatron's groups.

    Returns:
        The control group: all ranks, on CPU tensors, for decisions and log figures.

    Raises:
        HostsRefused: if the hosts do not fit together (megatron_acco.hosts.judge).
        RuntimeError: if not all ranks arrive within the time limit, or not as many as the launcher promised.
    """
    timeout = timedelta(minutes=timeout_minutes)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(ranks.local_rank)
    met = meeting.meet(ranks, accelerator.device_name(), timeout)
    if ranks.rank == 0:
        _report_hosts(met.verdict)
    meeting.accept(met.verdict, ranks.rank)
    try:
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    except (dist.DistError, RuntimeError) as error:
        interface, address = met.verdict.speaks[ranks.rank]
        spoke = (
            f" (it speaks from {address} on {interface}; megatron-acco doctor tries every pair)" if interface else ""
        )
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world_size} met the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}, but could not connect to all of them{spoke}: {error}"
        ) from error
    liveness.start(ranks.rank, ranks.world_size)
    release_shared_memory()
    if dist.get_world_size() != ranks.world_size:
        raise RuntimeError(f"expected {ranks.world_size} ranks, but {dist.get_world_size()} are there")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return control


def _report_hosts(verdict: Verdict) -> None:
    for line in verdict.hosts:
        print(f" {line}")
    for warning in verdict.warnings:
        print(f" WARNING: {warning}")
    sys.stdout.flush()


def seed_everything(seed: int) -> None:
    """Seed every random generator: Megatron's default stream, and the one that differs per tensor-parallel rank.

    With equal seeds on all ranks the model's initial weights fit together.
    """
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    support_cpu()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def seed_dropout(seed: int) -> None:
    """Seed every random generator for training: replicas draw different numbers.

    Megatron's own seeds of one replica lie close together, hence the distance between replicas.
    """
    seed_everything(seed + 1 + _SEEDS_PER_REPLICA * parallel_state.get_data_parallel_rank())


def end_with_message(ranks: Ranks | None, message: str) -> int:
    """Say why the run is refused, once per node, and return the exit code.

    Every rank finds the same fault by itself. The first of a node speaks; the others give it the time to, because
    the launcher ends all once one is gone, and speak only if it does not.
    """
    if ranks is not None and ranks.local_rank > 0:
        time.sleep(5.0)
    print(f"ERROR: {message}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


def end_after_failure(ranks: Ranks | None) -> None:
    """Print the exception being handled with its rank, and who failed first; end the process at once.

    A normal exit would wait for threads and communicators that wait for the other ranks.
    """
    # The launcher ends the ranks as soon as one is gone, which may be before this one has said what it knows.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = "?" if ranks is None else str(ranks.rank)
    lines = traceback.format_exc().rstrip().splitlines()
    _print_error(name, lines)
    error = sys.exc_info()[1]
    summary = "; ".join(part.strip() for part in traceback.format_exception_only(error))
    _print_error(name, liveness.report(summary.splitlines()[0]))
    end_at_once(EXIT_FAILED)


def _print_error(rank: str, lines: list[str]) -> None:
    if lines:
        print("\n".join(f"[rank {rank}] {line}" for line in lines), file=sys.stderr, flush=True)


def end_at_once(code: int) -> NoReturn:
    """End the process without the waiting of a normal exit."""
    sys.stdout.flush()
    os._exit(code)
