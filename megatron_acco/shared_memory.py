"""DeepSpeed's CPU communication op leaves a file of 66 MiB per rank in /dev/shm behind at every start."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

_FOLDER = Path("/dev/shm")


def release_shared_memory() -> None:
    """Unlink this rank's file, once every rank has mapped it. Collective over all ranks; call after init_distributed.

    The mappings stay, and the memory goes with the last process, however that ends. Without it runs fill the
    machine's memory one by one (DeepSpeed 0.19.8 never unlinks the file). Nothing to do on accelerators.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    # A rank is here only after it has mapped the files of all others.
    dist.barrier()
    (_FOLDER / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}").unlink(missing_ok=True)
