"""The quickstart's steps after installation: corpus, training, plot, sample. Called by quickstart.sh.

Uses the standard library only, so that arguments can be checked before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import children
import progress

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("acco", "zero1", "dpu", "wp")
DEFAULT_UPDATES = 240
CPU_RANKS = 2

# One size for every method, so that their curves can be laid over each other.
MICRO_BATCH = 4
GLOBAL_BATCH = 32
SEQUENCE = 256
VALIDATION_BATCHES = 4
MODEL_ARGUMENTS = {
    "--num-layers": 4,
    "--hidden-size": 256,
    "--num-attention-heads": 4,
    "--seq-length": SEQUENCE,
    "--max-position-embeddings": SEQUENCE,
    "--hidden-dropout": 0.0,
    "--attention-dropout": 0.0,
}
PROMPT = "def"


class QuickstartError(Exception):
    """Something that the user can put right; shown without a traceback."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one method's run under OUT."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """DeepSpeed's checkpoint folder."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged update."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """All output of the launcher and the ranks."""
        return self.path / "train.log"

    @property
    def plot(self) -> Path:
        """Loss against tokens and time."""
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        """Text from the trained model."""
        return self.path / "sample.txt"

    @property
    def settings(self) -> Path:
        """What the run was started with."""
        return self.path / "quickstart.json"

    def updates_saved(self) -> int:
        """Number of updates in the newest whole checkpoint, 0 if there is none."""
        with contextlib.suppress(OSError):
            tag = (self.checkpoints / "latest").read_text().strip()
            number = re.search(r"(\d+)$", tag)
            if number and (self.checkpoints / tag).is_dir():
                return int(number.group(1))
        return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of quickstart.sh; exits with code 2 and a message when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bash quickstart.sh",
        usage="%(prog)s [--method {" + ",".join(METHODS) + "}] [--updates N] [--out DIR]",
        description="Train a small GPT on this machine's Python sources for a few minutes and show the result.",
        allow_abbrev=False,
    )
    parser.add_argument("--method", choices=METHODS, default="acco", help="training method (default: acco)")
    parser.add_argument(
        "--updates",
        type=_updates,
        default=DEFAULT_UPDATES,
        metavar="N",
        help=f"optimizer updates in all (default: {DEFAULT_UPDATES}, about five minutes on two cores); more than an "
        "earlier run made continues that run",
    )
    parser.add_argument(
        "--out", type=Path, default=None, metavar="DIR", help="where everything goes (default: quickstart_run)"
    )
    parser.add_argument("--called-from", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # quickstart.sh changes into the checkout, so a relative DIR is seen from where the user stood.
    args.out = ROOT / "quickstart_run" if args.out is None else (args.called_from / args.out.expanduser()).resolve()
    existing = next(path for path in (args.out, *args.out.parents) if path.exists())
    if not existing.is_dir():
        parser.error(f"argument --out: {existing} is a file")
    if not os.access(existing, os.W_OK):
        parser.error(f"argument --out: no permission to write in {existing}")
    return args


def _updates(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1000000, got {text!r}")
    return value


def main(argv: Sequence[str]) -> int:
    """Run all steps. Exit code 0, 1 (a step failed), 2 (bad arguments) or 130 (interrupted)."""
    args = parse_arguments(argv)
    if args.check_arguments:
        return 0
    children.raise_on_signals()
    run = RunFolder(args.out / args.method)
    try:
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuickstartError(f"cannot write to {args.out}: {error}") from error
        with _only_one_in(run):
            _all_steps(args, run)
    except QuickstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except children.Interrupted:
        saved = run.updates_saved()
        kept = f"{saved} updates are saved" if saved else "nothing was saved yet"
        print(f"\ninterrupted; {kept}. The same command continues.", file=sys.stderr)
        return 130
    return 0


def _all_steps(args: argparse.Namespace, run: RunFolder) -> None:
    _say("1/4 corpus")
    corpus_folder = args.out / "corpus"
    _tool("prepare-corpus", "--out", str(corpus_folder))
    corpus = json.loads((corpus_folder / "corpus.json").read_text())
    _check_same_run(run, corpus["fingerprint"])

    saved = run.updates_saved()
    if saved >= args.updates:
        _say(f"2/4 training: done before, {saved} updates in {run.path} (more: --updates N, afresh: another --out)")
    else:
        _say(f"2/4 training: {args.method}, {'from update ' + str(saved) if saved else 'from scratch'}")
        _train(args, run, corpus_folder, saved)
    _say("3/4 loss plot")
    _tool("plot", f"{args.method}={run.metrics}", "--out", str(run.plot))
    _say("4/4 sample")
    _tool(
        *("generate", "--checkpoint", str(run.checkpoints)),
        *("--tokenizer-model", str(corpus_folder / "tokenizer.model"), "--prompt", PROMPT),
        *("--tokens", "160", "--temperature", "0.7", "--top-k", "40", "--seed", "1", "--out", str(run.sample)),
    )
    _summary(run)


def _train(args: argparse.Namespace, run: RunFolder, corpus: Path, saved: int) -> None:
    environment = _environment()
    device = _prepare_deepspeed(environment)
    ranks = CPU_RANKS if device["accelerator"] == "cpu" else _ranks_for(device["devices"])
    cores = len(os.sched_getaffinity(0))
    # More threads than cores make every rank slower.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if saved == 0:
        _clear(run)
    command = training_command(args.method, args.updates, run, corpus, ranks, saved)
    print(f"{ranks} ranks on {device['accelerator']}; all output: {run.log}")
    print(_folded(command), flush=True)
    view = progress.Progress(run.metrics, args.updates, saved)
    with run.log.open("ab") as log:
        log.write(f"\n$ {shlex.join(command)}\n".encode())
        log.flush()
        code = children.run(
            command,
            environment=environment,
            cwd=ROOT,
            output=log,
            poll=view.show_new,
            ask_to_stop=_ask_ranks_to_save,
            grace_seconds=60.0,
        )
    view.show_new()
    if code != 0:
        raise QuickstartError(f"training ended with exit code {code}; the end of {run.log}:\n\n{_tail(run.log, 40)}")
    if run.updates_saved() < args.updates:
        raise QuickstartError(f"training ended, but {run.checkpoints} holds only {run.updates_saved()} updates")
    _keep_newest_checkpoint(run)


def training_command(method: str, updates: int, run: RunFolder, corpus: Path, ranks: int, saved: int) -> list[str]:
    """The launcher's command line: what a user would type, with this machine's paths."""
    options: dict[str, Any] = {
        "--deepspeed_config": ROOT / "deepspeed_configs" / f"{method}.json",
        **MODEL_ARGUMENTS,
        "--micro-batch-size": MICRO_BATCH,
        "--global-batch-size": GLOBAL_BATCH,
        "--train-iters": updates,
        "--lr": 2e-3,
        "--min-lr": 2e-4,
        "--lr-decay-style": "cosine",
        # At least one update at a useful rate in very short runs.
        "--lr-warmup-iters": min(20, updates // 2),
        "--weight-decay": 0.1,
        "--train-data-path": corpus / "train",
        "--valid-data-path": corpus / "valid",
        "--tokenizer-type": "SentencePieceTokenizer",
        "--tokenizer-model": corpus / "tokenizer.model",
        "--data-cache-path": run.path / "index",
        "--num-workers": 0,
        "--seed": 1234,
        "--save": run.checkpoints,
        "--metrics-file": run.metrics,
        "--save-interval": max(1, min(60, updates // 4)),
        "--eval-interval": max(1, min(20, updates // 4)),
        "--eval-iters": VALIDATION_BATCHES,
        "--log-interval": max(1, min(5, updates // 4)),
    }
    if saved:
        options["--load"] = run.checkpoints
    launcher = [
        *("deepspeed", "--num_gpus", str(ranks), "--master_port", str(_free_port()), "--log_level", "warning"),
        str(ROOT / "pretrain_gpt_acco.py"),
    ]
    # More updates than the run was begun with stretch its learning-rate schedule.
    flags = ["--override-opt_param-scheduler"] if saved else []
    return launcher + [str(part) for pair in options.items() for part in pair] + flags


def _ranks_for(devices: int) -> int:
    """Ranks on GPUs: a power of two that leaves each at least two micro-batches per update."""
    most = GLOBAL_BATCH // MICRO_BATCH // 2
    return 1 << int(math.log2(max(1, min(devices, most))))


def _prepare_deepspeed(environment: dict[str, str]) -> dict[str, Any]:
    print("preparing DeepSpeed (the first time on a CPU this compiles its communication op, half a minute)", flush=True)
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, str(ROOT / "scripts" / "prepare_deepspeed.py")]
        code = children.run(command, environment=environment, cwd=ROOT, output=output)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if code == 0 and isinstance(report, dict) and "accelerator" in report:
                return report
    raise QuickstartError("DeepSpeed cannot be prepared:\n\n" + "\n".join(lines[-30:]))


def _ask_ranks_to_save(launcher: int) -> None:
    """SIGTERM to the node's launcher process, which hands it to the ranks: they save and end."""
    import psutil  # comes with deepspeed

    print("\nstopping: the ranks save a checkpoint (Ctrl-C again ends them at once)", file=sys.stderr, flush=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            child.terminate()


def ops_folder() -> Path:
    """Where DeepSpeed's compiled ops are.

    They belong to one torch build; a folder of our own keeps other programs' half-made ones away.
    """
    return Path(sys.prefix) / "torch_extensions" / f"torch-{importlib.metadata.version('torch')}"


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["TORCH_EXTENSIONS_DIR"] = str(ops_folder())
    environment.setdefault("PYTHONWARNINGS", "ignore")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _tool(*arguments: str) -> None:
    """Run `megatron-acco ARGUMENTS`."""
    command = [sys.executable, "-m", "megatron_acco.cli.main", *arguments]
    with tempfile.TemporaryFile() as errors:
        # These run on the CPU, whatever DeepSpeed would choose.
        environment = _environment() | {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
        code = children.run(command, environment=environment, cwd=ROOT, errors=errors)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if code != 0:
        raise QuickstartError(f"megatron-acco {arguments[0]} ended with exit code {code}:\n{text[-4000:]}")


def _check_same_run(run: RunFolder, fingerprint: str) -> None:
    """A run can only be continued with the corpus and the model that it began with."""
    settings = {"corpus": fingerprint, "model": MODEL_ARGUMENTS, "batch": [MICRO_BATCH, GLOBAL_BATCH]}
    if run.updates_saved() and run.settings.exists():
        if json.loads(run.settings.read_text()) != settings:
            raise QuickstartError(
                f"the run in {run.path} was made with another corpus or model (another Python release, or another "
                f"version of this checkout): move it away, or choose another --out"
            )
        return
    _write_atomically(run.settings, json.dumps(settings, indent=2) + "\n")


def _clear(run: RunFolder) -> None:
    """Remove what a run that never saved left behind."""
    for path in (run.checkpoints, run.path / "index"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*run.path.glob(f"{run.metrics.name}*"), run.log, run.plot, run.sample):
        path.unlink(missing_ok=True)


def _keep_newest_checkpoint(run: RunFolder) -> None:
    newest = (run.checkpoints / "latest").read_text().strip()
    for folder in run.checkpoints.glob("global_step*"):
        if folder.name != newest:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _only_one_in(run: RunFolder) -> Any:
    import fcntl

    with (run.path / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuickstartError(f"another quickstart is at work in {run.path}") from None
        yield


def _summary(run: RunFolder) -> None:
    curve = progress.validation_curve(run.metrics)
    print()
    if len(curve) > 1:
        (first, before), (last, after) = curve[0], curve[-1]
        print(f"validation loss {before:.3f} after {first} updates, {after:.3f} after {last}")
    tag = (run.checkpoints / "latest").read_text().strip()
    print(f"checkpoint  {run.checkpoints / tag}")
    print(f"metrics     {run.metrics}")
    print(f"loss plot   {run.plot}")
    print(f"log         {run.log}")
    print(f"sample      {run.sample}\n")
    print("\n".join("    " + line for line in run.sample.read_text().splitlines()))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _tail(path: Path, lines: int) -> str:
    """The last lines of this run's part of a log, without the launcher's repetitions of the command line."""
    text = path.read_text(errors="replace").rpartition("\n$ ")[2].splitlines()[1:]
    told = [line for line in text if line.strip() and "pretrain_gpt_acco.py', '" not in line]
    return "\n".join(told[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _folded(command: Sequence[str]) -> str:
    """A command line over several lines, to read and to paste; a flag and its value stay together."""
    units: list[str] = []
    for word in command:
        if units and units[-1].startswith("-") and " " not in units[-1] and not word.startswith("-"):
            units[-1] += " " + shlex.quote(word)
        else:
            units.append(shlex.quote(word))
    lines = [""]
    for unit in units:
        if len(lines[-1]) + len(unit) > 100:
            lines.append("")
        lines[-1] += " " + unit
    return "  " + " \\\n     ".join(lines).strip()


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
