"""pretrain_gpt_acco.py with a fault in one rank's lane: `faulty_run.py FAULT RANK CALL ARGUMENTS...`.

FAULT: `raise`, an exception; `kill`, SIGKILL; `stop`, SIGSTOP. It happens before reduce-scatter number CALL of rank
RANK; there is one for every parameter group in every round. `slow`: rank RANK is CALL seconds late at the meeting of
the ranks, and never comes to an end with building its engine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

import megatron_acco
from megatron_acco.training import environment
from megatron_acco.training.main import main
from megatron_acco.zero.collectives import Exchange, group_limit

rest = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
fault, rank, number = rest[0], int(rest[1]), int(rest[2])
original, calls = Exchange.reduce_scatter, 0


def reduce_scatter(self: Exchange, *args: Any, **kwargs: Any) -> int:
    global calls
    calls += 1
    if calls == number:
        if fault == "raise":
            raise ArithmeticError("a fault in the lane")
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return original(self, *args, **kwargs)


meet, initialize = environment.initialize_distributed, megatron_acco.initialize


def meet_late(*args: Any) -> Any:
    """The ranks' imports take as long as the machine likes: they start from here together."""
    folder = Path(os.environ["MEGATRON_ACCO_FOLDER"])
    (folder / f"rank{os.environ['RANK']}").touch()
    while len(list(folder.glob("rank?"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if int(os.environ["RANK"]) == rank:
        time.sleep(number)
    return meet(*args)


def initialize_for_ever(*args: Any, **kwargs: Any) -> Any:
    initialize(*args, **kwargs)
    limits = {group_limit(group).total_seconds() for group in dist.distributed_c10d._world.pg_map}
    print(f"{len(dist.distributed_c10d._world.pg_map)} groups with the limits {limits}", flush=True)
    time.sleep(600.0)


if fault == "slow":
    environment.initialize_distributed = meet_late
if int(os.environ["RANK"]) == rank:
    if fault == "slow":
        megatron_acco.initialize = initialize_for_ever
    else:
        Exchange.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
sys.exit(main(rest[3:]))
