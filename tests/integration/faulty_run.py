"""pretrain_gpt_acco.py with a fault in one rank's lane: `faulty_run.py FAULT RANK CALL ARGUMENTS...`.

FAULT: `raise`, an exception; `kill`, SIGKILL; `stop`, SIGSTOP. It happens before reduce-scatter number CALL of rank
RANK; there is one for every parameter group in every round.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_acco.training.main import main
from megatron_acco.zero.collectives import Exchange

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


if int(os.environ["RANK"]) == rank:
    Exchange.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
sys.exit(main(rest[3:]))
