"""Peak memory of each method, in a process that has nothing else."""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import sys
import traceback
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import turns
from benchmarks.compare.methods import METHODS, Kind
from benchmarks.compare.trainers import compute_micro_batch, new_trainer

# Both halves of an update have a micro-batch, and what stays in flight has been so twice.
STEPS, UPDATES = 2, 3
SECONDS = 300.0


def peaks(args: argparse.Namespace) -> dict[str, int | None]:
    """Bytes of each method on this rank; None where it failed. Collective, and before this process has met the others.

    Forked, so that all begin with the same imports in memory, which do not count.
    """
    context = multiprocessing.get_context("fork")
    found: dict[str, int | None] = {}
    for number, name in enumerate(args.methods):
        ours, theirs = context.Pipe(duplex=False)
        port = int(os.environ["MASTER_PORT"]) + 1 + number
        child = context.Process(target=_child, args=(name, args, port, theirs))
        child.start()
        theirs.close()
        try:
            found[name] = ours.recv() if ours.poll(SECONDS) else None
        except EOFError:
            found[name] = None
        child.kill()
        child.join()
    return found


def _child(name: str, args: argparse.Namespace, port: int, out: Connection) -> None:
    os.environ["MASTER_PORT"] = str(port)
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # every engine says the same there
            peak = _train(name, args)
    except Exception:
        print(f"peak memory of {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    else:
        import torch.distributed as dist

        dist.barrier()  # nobody leaves while another is still sending
        out.send(peak)
    os._exit(0)


def _train(name: str, args: argparse.Namespace) -> int:
    """Growth of the resident memory from before the model is made to its peak, bytes."""
    args = copy.copy(args)
    args.gas = STEPS
    turns.start()
    before = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    batches = turns.micro_batches(args, seed=0)
    if METHODS[name].kind is Kind.COMPUTE:
        model = turns.new_model(args)
        for step in range(STEPS * UPDATES):
            if step % STEPS == 0:
                model.zero_grad(set_to_none=True)
            compute_micro_batch(model, next(batches), STEPS)
    else:
        trainer = new_trainer(name, args)
        for _ in range(UPDATES):
            trainer.update(batches)
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {field} in /proc/self/status")
