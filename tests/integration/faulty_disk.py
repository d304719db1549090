"""pretrain_gpt_acco.py with a disk that fails on one rank: what a test cannot do to a real one.

MEGATRON_ACCO_FAULT is `<kind> <rank> <iteration>`. At that rank's shard of that checkpoint, kind `hang` writes half of
the file, says so and goes on writing for ever; kind `full` finds no space left on the device.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_acco.training.checkpoint import writer
from megatron_acco.training.main import main

kind, rank, iteration = os.environ["MEGATRON_ACCO_FAULT"].split()
write_file = writer.write_file


def faulty(state: Any, path: Path) -> Any:
    if os.environ["RANK"] != rank or path.parent.name != f"global_step{iteration}" or "optim" not in path.name:
        return write_file(state, path)
    path.write_bytes(b"half of it")
    if kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    print("writing slowly", flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    writer.write_file = faulty
    sys.exit(main())
