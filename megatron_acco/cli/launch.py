"""`megatron-acco launch`: DeepSpeed's launcher, with the variables that a run needs sent to all hosts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# DeepSpeed 0.19 sends those that begin with MLFLOW, PYTHON, MV2, UCX, and on CUDA with NCCL.
FORWARDED = (
    "CUDA_DEVICE_",
    "DEEPSPEED_",
    "DS_",
    "GLOO_",
    "HF_",
    "KMP_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "TOKENIZERS_",
    "TORCH_",
    "TRANSFORMERS_",
    "WANDB_",
)
# DeepSpeed writes what it sends into its log, and every process list shows it.
_SECRET = re.compile(r"TOKEN($|_)|KEY$|SECRET|PASSW|CREDENTIAL")
_ALIVE_SECONDS = 15


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "launch",
        help="deepspeed's launcher, with GLOO_*, NCCL_*, OMP_*, DS_*, HF_* ... sent to all hosts",
        description=f"Takes the arguments of the `deepspeed` command. Variables that begin with one of "
        f"{', '.join(FORWARDED)} reach the ranks of all hosts, not only those of this one.",
        prefix_chars="\0",  # every option is DeepSpeed's
        add_help=False,
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="as for `deepspeed`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start DeepSpeed's launcher; its exit code."""
    return launch(args.arguments)


def launch(arguments: Sequence[str], cut_off_seconds: float | None = None) -> int:
    """DeepSpeed's launcher in this process, with more variables sent.

    Args:
        arguments: as for `deepspeed`.
        cut_off_seconds: how long a host may be cut off before its ssh ends; None: the time limit of the script.

    Raises:
        ValueError: a `.deepspeed_env` that DeepSpeed cannot read, two ports of ssh, or what the launcher refuses.
    """
    from deepspeed.launcher import runner

    from megatron_acco.cli.runners import PlainOpenMPIRunner, PlainPDSHRunner

    runner.PDSHRunner, runner.OpenMPIRunner = PlainPDSHRunner, PlainOpenMPIRunner
    names, secrets = select(os.environ, tuple(runner.EXPORT_ENVS))
    if secrets:
        print(f"megatron-acco launch: not sent to the hosts, because it would be logged: {', '.join(secrets)}")
    for folder in runner.DEEPSPEED_ENVIRONMENT_PATHS:
        check_environment_file(Path(folder) / runner.DEEPSPEED_ENVIRONMENT_NAME)
    # DeepSpeed compares beginnings of names.
    runner.EXPORT_ENVS = [*runner.EXPORT_ENVS, *names]
    appended = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    alive = keep_alive(time_limit(arguments) if cut_off_seconds is None else cut_off_seconds)
    os.environ["PDSH_SSH_ARGS_APPEND"] = f"{appended} {alive}".strip()
    sys.stdout.flush()
    try:
        options = port_options(runner.parse_args(arguments).ssh_port, ssh_port(appended))
        runner.main([*options, *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except (RuntimeError, AssertionError, subprocess.CalledProcessError) as error:
        # pdsh is missing, a node rank that is none, a host that does not let us in: no case for a traceback.
        raise ValueError(f"the launcher: {error}") from error
    return 0


def port_options(given: int | None, appended: str | None) -> list[str]:
    """Options that tell DeepSpeed's own logins the port of pdsh's.

    Args:
        given: --ssh_port.
        appended: the port in PDSH_SSH_ARGS_APPEND.
    """
    if given and appended and given != int(appended):
        raise ValueError(
            f"--ssh_port {given}, but PDSH_SSH_ARGS_APPEND says -p {appended}, which pdsh would take; leave one out"
        )
    return ["--ssh_port", appended] if appended and not given else []


def select(environ: Mapping[str, str], more: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Names of the variables to send, and of those that look like secrets; `more`: beginnings beside `FORWARDED`."""
    names = sorted(name for name, value in environ.items() if name.startswith(FORWARDED + more) and value)
    return [n for n in names if not is_secret(n)], [n for n in names if is_secret(n)]


def is_secret(name: str) -> bool:
    """Whether a variable of this name looks like one that no log may show."""
    return _SECRET.search(name) is not None


def time_limit(arguments: Sequence[str]) -> float:
    """--distributed-timeout-minutes of the script's arguments, in seconds."""
    minutes = 10.0
    for word, following in itertools.pairwise([*arguments, ""]):
        name, _, value = word.partition("=")
        if name == "--distributed-timeout-minutes":
            with contextlib.suppress(ValueError):  # for the script to refuse
                minutes = float(value or following)
    return 60.0 * minutes


def keep_alive(seconds: float) -> str:
    """Options that end an ssh whose host has been cut off for a little more than `seconds`; else it waits for hours.

    ssh takes the first value that it finds: behind the user's own options these change nothing of them.
    """
    count = max(2, math.ceil(seconds / _ALIVE_SECONDS)) + 2
    return f"-o ServerAliveInterval={_ALIVE_SECONDS} -o ServerAliveCountMax={count}"


def check_environment_file(path: Path) -> None:
    """DeepSpeed ends with a traceback that names neither file nor line.

    Raises:
        ValueError: naming both.
    """
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not re.match(r"\s*\w+=", line):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is not NAME=VALUE; DeepSpeed takes no blank lines and no "
                f"comments there"
            )


def ssh_port(options: str) -> str | None:
    """The port of ssh's options for pdsh. DeepSpeed's own logins by ssh do not know them, only --ssh_port."""
    words = shlex.split(options)
    for number, word in enumerate(words):
        value = "".join(words[number + 1 : number + 2]) if word == "-p" else word.removeprefix("-p")
        if word.startswith("-p") and value.isdigit():
            return value
    return None
