"""Kills a run again and again at random moments, starts it again, and compares its end with an uninterrupted run's.

    python -m benchmarks.torture --kills 50

Two CPU ranks under the real launcher train a tiny GPT with ACCO, dropout on, and save every few updates. A kill is a
SIGKILL of one rank or of the whole job: while it starts, at a random moment of training, or while a checkpoint is being
written. Every start continues from the newest checkpoint. Checked: no start continues from before a checkpoint that had
been announced as saved; every job is gone after a kill; the weights at the end are, bit for bit, those of a run
that was left alone. The exit code is 1 if not. `--out FILE` writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from megatron_acco.corpus import CorpusSettings, prepare_corpus, standard_library

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 4 --lr-decay-style cosine "
    "--tokenizer-type SentencePieceTokenizer --num-workers 0 --eval-iters 0 --log-interval 1"
).split()
CONFIG = {
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "acco": {"warmup_updates": 5},
}
MOMENTS = ("start", "training", "training", "save")
LIFE_SECONDS, START_SECONDS, LIMIT_SECONDS = 2.0, 8.0, 240.0


@dataclass
class Figures:
    """What happened. `kills` by moment and victim; `lost`: starts that went back behind an announced checkpoint."""

    kills: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    lost: int = 0
    survivors: int = 0
    updates: int = 0
    identical: bool = False
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing was lost."""
        return self.identical and not self.lost and not self.survivors


class Job:
    """One start of the run."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(port)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [*deepspeed, *words], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks that have been started."""
        found = []
        for pid in re.findall(r"process (\d+) spawned", self.text()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def wait_for(self, ready: re.Pattern[str] | None, folder: Path | None, seconds: float) -> None:
        """Until the log matches, a checkpoint is being written to `folder`, the job has ended or the time is over."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < limit:
            if ready is not None and ready.search(self.text()):
                return
            if folder is not None and any(folder.glob(".saving-*")):
                return
            time.sleep(0.002 if folder is not None else 0.05)

    def end(self) -> int:
        """Kill what is left and wait; the number of processes that outlived their job."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60.0)
        _, alive = psutil.wait_procs(self.ranks(), timeout=5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return len(alive)


def torture(folder: Path, kills: int, updates: int, save_interval: int, seed: int) -> Figures:
    """Carry it out in `folder`."""
    started, chance, figures = time.monotonic(), random.Random(seed), Figures(updates=updates)
    corpus = prepare_corpus(folder / "corpus", CorpusSettings(str(standard_library()), vocab_size=512))
    config = folder / "acco.json"
    config.write_text(json.dumps(CONFIG))
    data = ["--train-data-path", str(corpus.prefix("train"))]
    data += ["--tokenizer-model", str(corpus.tokenizer), "--data-cache-path", str(folder / "index")]
    words = ["pretrain_gpt_acco.py", *MODEL, *data, "--deepspeed_config", str(config), "--train-iters", str(updates)]

    def saving_to(name: str) -> list[str]:
        save = ["--save", str(folder / name), "--load", str(folder / name), "--save-retain", "3"]
        return [*words, *save, "--save-interval", str(save_interval), "--async-save"]

    alone = Job(saving_to("alone"), folder / "alone.log")
    if alone.process.wait() != 0:
        raise RuntimeError(alone.text()[-4000:])
    announced, done = 0, collections.Counter[str]()
    while True:
        figures.starts += 1
        job = Job(saving_to("tortured"), folder / f"tortured{figures.starts}.log")
        what = ""
        if sum(done.values()) < kills:
            what = kill(job, chance, folder / "tortured")
        else:
            job.process.wait(timeout=LIMIT_SECONDS + updates)
        ended = job.process.poll() == 0
        figures.survivors += job.end()
        text = job.text()
        first = re.search(r"training from iteration (\d+) to", text)
        if first is not None and int(first.group(1)) < announced:
            figures.lost += 1
        announced = max([announced, *map(int, re.findall(r" saved checkpoint at iteration (\d+) to", text))])
        if ended:
            break
        if not what:
            raise RuntimeError(text[-4000:])
        done[what] += 1
        print(f"kill {sum(done.values()):3d}: {what:22s} newest checkpoint {announced}", flush=True)
    figures.kills = dict(done)
    figures.identical = same_weights(folder / "alone", folder / "tortured", updates)
    figures.seconds = time.monotonic() - started
    return figures


def kill(job: Job, chance: random.Random, folder: Path) -> str:
    """Kill a rank or the whole job at a moment of its life. Returns what was done, "" if the job had ended."""
    moment, victim = chance.choice(MOMENTS), chance.choice(("rank 0", "rank 1", "job"))
    training = re.compile(r"^ iteration ", re.M)
    if moment == "start":
        job.wait_for(training, None, chance.uniform(0.0, START_SECONDS))
    else:
        job.wait_for(training, None, LIMIT_SECONDS)
        time.sleep(chance.uniform(0.0, LIFE_SECONDS))
        if moment == "save":
            job.wait_for(None, folder, LIMIT_SECONDS)
    if job.process.poll() is not None:
        return ""
    ranks = job.ranks()
    if victim != "job" and len(ranks) == 2:
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks[int(victim[-1])].kill()
    else:
        victim = "job"
        os.killpg(job.process.pid, signal.SIGKILL)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    return f"{moment}, {victim}"


def same_weights(one: Path, other: Path, iteration: int) -> bool:
    """Whether the final weights, masters and moments of both runs have the same bits."""
    names = ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2))]
    for name in names:
        a, b = (torch.load(f / f"global_step{iteration}" / name, weights_only=False) for f in (one, other))
        keys = ["module"] if "module" in a else ["optimizer_state_dict"]
        if not all(_equal(a[key], b[key]) for key in keys):
            return False
    return True


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    # Objects of DeepSpeed's own (its loss scaler) have no equality; their tensors are above.
    return type(a) is type(b)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--updates", type=int, default=1500, help="length of the run; long enough for all kills")
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = torture(Path(folder), args.kills, args.updates, args.save_interval, args.seed)
    print(json.dumps(asdict(figures), indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
