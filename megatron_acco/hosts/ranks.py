"""From the variables of a launcher or scheduler to the rank of this process."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# rank, number of ranks, rank on the node, ranks on the node
_SCHEDULERS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "Slurm (job)": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# What a launcher leaves in the environment that starts ranks of its own, DeepSpeed's and torchrun.
_LAUNCHERS = {"DeepSpeed's launcher": "CROSS_RANK", "torchrun": "TORCHELASTIC_RUN_ID"}

_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_HOW = "docs/multi-node.md has a command for every launcher"


@dataclass(frozen=True)
class Ranks:
    """Which process of how many this is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def discover_ranks(environ: MutableMapping[str, str] = os.environ) -> Ranks:
    """Read the launcher's variables, or derive them from Slurm's or MPI's, and complete them for torch.

    A process that is started with none of them is a run of one rank.

    Raises:
        ValueError: if only some of the variables are there, or a scheduler's contradict them, so that processes which
            belong together would make several jobs.
    """
    for name in _OWN:
        if environ.get(name, "set").strip() == "":  # as a wrapper exports what it does not know
            del environ[name]
    if "RANK" not in environ:
        _derive(environ)
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if not environ.get(name)]
    if missing:
        raise ValueError(
            f"incomplete launch: {', '.join(missing)} not set; start with `deepspeed pretrain_gpt_acco.py ...` ({_HOW})"
        )
    environ.setdefault("MASTER_PORT", "29500")
    local = "LOCAL_SIZE" if "LOCAL_SIZE" in environ else "LOCAL_WORLD_SIZE"
    ranks = Ranks(*(_number(environ, name, 1) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", local)))
    if not 0 <= ranks.rank < ranks.world_size:
        raise ValueError(f"RANK {ranks.rank} is not among the {ranks.world_size} ranks of WORLD_SIZE")
    if ranks.local_rank < 0 or (local in environ and ranks.local_rank >= ranks.local_world_size):
        raise ValueError(f"LOCAL_RANK {ranks.local_rank} is not among the {ranks.local_world_size} ranks of {local}")
    if not 0 < _number(environ, "MASTER_PORT", 0) < 65_536:
        raise ValueError(f"MASTER_PORT {environ['MASTER_PORT']} is not a port (1 to 65535)")
    _refuse_contradiction(ranks, environ)
    return ranks


def _refuse_contradiction(ranks: Ranks, environ: Mapping[str, str]) -> None:
    """Refuse ranks that the scheduler's own count shows to be wrong (think of an exported RANK=0)."""
    launcher = next((name for name, variable in _LAUNCHERS.items() if variable in environ), None)
    scheduler = _scheduler(environ)
    # A batch script has the numbers of its job and is none of its tasks; only a step's count processes.
    if scheduler is None or scheduler == "Slurm (job)":
        return
    rank, size, _, _ = _SCHEDULERS[scheduler]
    started = _number(environ, size, 1)
    if launcher is not None and ranks.world_size == ranks.local_world_size:
        raise ValueError(
            f"{scheduler} started {launcher} {started} times, and each of them makes a job of its own with "
            f"{ranks.world_size} ranks; tell it about the other nodes, or start the script itself with {scheduler} "
            f"({_HOW})"
        )
    if launcher is None and (ranks.world_size != started or ranks.rank != _number(environ, rank, 0)):
        raise ValueError(
            f"{scheduler} started this process as rank {environ[rank]} of {started} ({rank}, {size}), but RANK and "
            f"WORLD_SIZE in the environment say rank {ranks.rank} of {ranks.world_size}; unset RANK, WORLD_SIZE "
            f"and LOCAL_RANK, they are derived from {scheduler}'s"
        )


def _scheduler(environ: Mapping[str, str]) -> str | None:
    """Which of `_SCHEDULERS` started this process as one of several.

    Of more than one it is the one with the most processes: mpirun and its daemons inherit the variables of the Slurm
    step, or of the batch script, that they run in.
    """
    sizes = {
        scheduler: _number(environ, size, 1) for scheduler, (rank, size, _, _) in _SCHEDULERS.items() if rank in environ
    }
    several = {scheduler: size for scheduler, size in sizes.items() if size > 1}
    if len(several) > 1:
        several.pop("Slurm (job)", None)
    return max(several, key=several.__getitem__, default=None)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a number, got {text!r}") from error


def _derive(environ: MutableMapping[str, str]) -> None:
    scheduler = _scheduler(environ)
    if scheduler is not None:
        rank, size, local_rank, local_size = _SCHEDULERS[scheduler]
        started = _number(environ, size, 1)
        if _number(environ, "WORLD_SIZE", started) != started:
            raise ValueError(
                f"{scheduler} started {started} processes ({size}), but WORLD_SIZE is {environ['WORLD_SIZE']}; "
                f"unset WORLD_SIZE"
            )
        environ.update(RANK=environ[rank], WORLD_SIZE=environ[size], LOCAL_RANK=environ.get(local_rank, "0"))
        local = _tasks_on_this_node(environ.get(local_size, ""), _number(environ, "SLURM_NODEID", 0))
        if local is not None:
            environ["LOCAL_WORLD_SIZE"] = str(local)
        one_node = scheduler.startswith("Slurm") and environ.get("SLURM_NNODES") == "1"
        _find_master(scheduler, environ, one_node=one_node or local == started)
        return
    if _number(environ, "WORLD_SIZE", 1) > 1:
        raise ValueError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']} but RANK is not set; start with "
            f"`deepspeed pretrain_gpt_acco.py ...` ({_HOW})"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    environ.setdefault("MASTER_ADDR", "127.0.0.1")
    environ.setdefault("MASTER_PORT", port)


def _find_master(scheduler: str, environ: MutableMapping[str, str], one_node: bool) -> None:
    """Set MASTER_ADDR and MASTER_PORT where the scheduler says enough."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if "MASTER_ADDR" not in environ:
        if one_node:
            environ["MASTER_ADDR"] = "127.0.0.1"
        elif scheduler.startswith("Slurm") and nodes:
            environ["MASTER_ADDR"] = first_node(nodes)
        else:
            option = " (mpirun -x MASTER_ADDR=HOST)" if scheduler == "Open MPI" else ""
            raise ValueError(
                f"started by {scheduler} as rank {environ['RANK']} of {environ['WORLD_SIZE']}, but MASTER_ADDR (the "
                f"host of rank 0) is not set; set it for all ranks{option}"
            )
    job = environ.get("SLURM_JOB_ID", "")
    if scheduler.startswith("Slurm") and job.isdigit():
        # Jobs that share a node must not meet at one port.
        step = environ.get("SLURM_STEP_ID", "")
        environ.setdefault("MASTER_PORT", str(20_000 + (int(job) * 16 + int(step if step.isdigit() else 0)) % 10_000))


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list, such as "node07" of "node[07-09,12],gpu1"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"not a Slurm node list: {nodes!r}; set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "") + (match[3] or "")


def _tasks_on_this_node(tasks: str, node: int) -> int | None:
    """Of "4", or of Slurm's "2(x3),1": tasks on node 0, 1, ..."""
    counts: list[int] = []
    for part in filter(None, tasks.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or "1")
    if len(counts) == 1:
        return counts[0]
    return counts[node] if node < len(counts) else None
