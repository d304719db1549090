"""`megatron-acco doctor`: whether a run can start on these hosts, and how fast they exchange.

megatron-acco doctor                                        this host
megatron-acco doctor --hostfile hosts --data-path ...       all hosts of a DeepSpeed hostfile
srun megatron-acco doctor                                   under any launcher: one process per rank
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_acco.hosts.files import data_files
from megatron_acco.hosts.findings import Findings

_MODULE = "megatron_acco.cli.doctor"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the hosts of a run: versions, addresses, links, clocks, disks, data",
        description="Checks whether a run can start: one line per finding with what to do; exit code 0 if it can, 1 if "
        "not. Measures the exchanges of a training round. Without --hostfile it takes the ranks of the launcher that "
        "started it (deepspeed --module megatron_acco.cli.doctor, torchrun, srun, mpirun), or checks this host.",
    )
    parser.add_argument("--hostfile", help="check all hosts of this DeepSpeed hostfile")
    parser.add_argument("--include", default="", metavar="HOSTS", help="as for the launcher, with --hostfile")
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="as for the launcher, with --hostfile")
    parser.add_argument("--master-port", "--master_port", type=int, help="as for the launcher, with --hostfile")
    parser.add_argument("--ssh-port", "--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument(
        "--data-path", nargs="+", default=[], metavar="PREFIX", help="as for training: the same on all hosts?"
    )
    parser.add_argument("--tokenizer-model", help="as for training: the same on all hosts?")
    parser.add_argument("--save", help="as for training: shared, writable, with room?")
    parser.add_argument("--data-cache-path", help="as for training: writable, with room?")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the measured exchanges, 0: none (16)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="time limit for every step (60)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check; the exit code."""
    if args.hostfile:
        return _over_hostfile(args)
    from megatron_acco.hosts.examination import Examination, Wanted
    from megatron_acco.hosts.ranks import discover_ranks

    folders = {"--save": args.save, "--data-cache-path": args.data_cache_path}
    wanted = Wanted(
        [*data_files(args.data_path), *([args.tokenizer_model] if args.tokenizer_model else [])],
        {flag: folder for flag, folder in folders.items() if folder},
        args.megabytes,
        args.timeout,
    )
    return Examination(wanted, discover_ranks()).run()


# ---- over a hostfile ------------------------------------------------------------------------------------------------


def _over_hostfile(args: argparse.Namespace) -> int:
    from deepspeed.launcher import runner

    from megatron_acco.cli.launch import launch, port_options, ssh_port

    if not os.path.isfile(args.hostfile):
        raise FileNotFoundError(f"no hostfile {args.hostfile}")
    # The part of the hosts that a run with the same options would take.
    hosts = list(runner.parse_inclusion_exclusion(runner.fetch_hostfile(args.hostfile), args.include, args.exclude))
    if not hosts:
        raise ValueError("--include and --exclude leave no host")
    appended = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    port = str(args.ssh_port) if args.ssh_port else ssh_port(appended)
    port_options(args.ssh_port, ssh_port(appended))
    options = [*shlex.split(appended), *(["-p", port] if port else [])]
    with ThreadPoolExecutor(32) as pool:
        faults = list(pool.map(lambda host: _login_fault(host, options), hosts))
    findings = Findings()
    for host, fault in zip(hosts, faults, strict=True):
        if fault:
            findings.problem(f"{host}: {fault}")
    if findings.problems:
        return findings.end()
    findings.ok(f"ssh, the interpreter and megatron_acco: {', '.join(hosts)}")
    words = ["--data-path", *args.data_path] if args.data_path else []
    for name in ("tokenizer_model", "save", "data_cache_path", "megabytes", "timeout"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    start = ["--hostfile", args.hostfile, "--force_multi", "--no_local_rank", *(["--ssh_port", port] if port else [])]
    for name in ("include", "exclude", "master_port"):
        start += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    return launch([*start, "--module", _MODULE, *words], cut_off_seconds=args.timeout)


def _login_fault(host: str, options: Sequence[str]) -> str:
    """What hinders a login without a password followed by a start of the interpreter, empty if nothing does."""
    there = f"cd {shlex.quote(os.getcwd())} && {shlex.quote(sys.executable)} -c 'import megatron_acco'"
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *options, host, there]
    try:
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except FileNotFoundError:
        return "no ssh on this host; install openssh-client and pdsh"
    except subprocess.TimeoutExpired:
        return "the login by ssh took more than 60 s"
    if result.returncode == 0:
        return ""
    said = (result.stderr.strip().splitlines() or ["no message"])[-1]
    if result.returncode == 255:
        return f"no login by ssh ({said}); ssh must work without a password: ssh-copy-id, --ssh-port, ~/.ssh/config"
    return f"{shlex.join([sys.executable])} cannot start there ({said}); the same path must hold the same installation"


if __name__ == "__main__":
    from megatron_acco.cli.main import main

    sys.exit(main(["doctor", *(word for word in sys.argv[1:] if not word.startswith("--local_rank"))]))
