"""Ranks from launchers' and schedulers' variables, and the judgement over hosts.

Covers CASES B41 (loopback and interface names), B45 (everyone is rank 0 of 1), B40 (ssh port), B47 (shared memory).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_acco.cli.launch import (
    check_environment_file,
    keep_alive,
    launch,
    port_options,
    select,
    ssh_port,
    time_limit,
)
from megatron_acco.hosts import meeting
from megatron_acco.hosts.facts import Facts
from megatron_acco.hosts.files import data_files, leave_token, mark, marks, room
from megatron_acco.hosts.judge import Verdict, judge
from megatron_acco.hosts.measure import slow_links
from megatron_acco.hosts.meeting import HostsRefused, meet, tell_apart
from megatron_acco.hosts.ranks import Ranks, discover_ranks, first_node

SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def test_slurm_says_everything_about_ranks_on_several_nodes() -> None:
    environ = dict(SLURM)
    assert discover_ranks(environ) == Ranks(2, 3, 0, 1)
    assert environ["MASTER_ADDR"] == "gpu07" and 20_000 <= int(environ["MASTER_PORT"]) < 30_000
    assert discover_ranks({**SLURM, "MASTER_ADDR": "own", "SLURM_NODEID": "0"}) == Ranks(2, 3, 0, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],x1", "gpu07"), ("rack[2,4]-a,b", "rack2-a"), ("n[003]", "n003")],
)
def test_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_mpi_needs_the_master_only() -> None:
    assert discover_ranks({**MPI, "MASTER_ADDR": "h"}) == Ranks(1, 2, 0, 1)
    with pytest.raises(ValueError, match=r"Open MPI as rank 1 of 2, but MASTER_ADDR.*mpirun -x MASTER_ADDR"):
        discover_ranks(dict(MPI))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, **BY_HAND}, "Slurm started this process as rank 2 of 3.*say rank 0 of 1; unset RANK"),
        ({**MPI, **BY_HAND, "WORLD_SIZE": "2"}, "Open MPI started this process as rank 1 of 2.*say rank 0 of 2"),
        ({**SLURM, "WORLD_SIZE": "2"}, r"Slurm started 3 processes.*but WORLD_SIZE is 2"),
        ({**SLURM, **BY_HAND, "CROSS_RANK": "0"}, "Slurm started DeepSpeed's launcher 3 times, and each of them"),
        ({**SLURM, **BY_HAND, "TORCHELASTIC_RUN_ID": "0"}, "Slurm started torchrun 3 times"),
        ({**BY_HAND, "WORLD_SIZE": "x"}, "WORLD_SIZE must be a number, got 'x'"),
        ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT must be a number, got 'http'"),
        ({**BY_HAND, "MASTER_PORT": "99999"}, "MASTER_PORT 99999 is not a port"),
        ({**BY_HAND, "LOCAL_RANK": "-1"}, "LOCAL_RANK -1 is not among the 1 ranks"),
        ({**BY_HAND, "LOCAL_RANK": "2", "LOCAL_SIZE": "2"}, "LOCAL_RANK 2 is not among the 2 ranks of LOCAL_SIZE"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS must be a number, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR not set"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environ: dict[str, str], message: str) -> None:
    """B45: never several jobs of one rank."""
    with pytest.raises(ValueError, match=message):
        discover_ranks(dict(environ))


def test_mpirun_inside_a_slurm_job_gives_the_ranks() -> None:
    """B45: its daemons are a step of Slurm's, one task per node, and what they start inherits that step's variables."""
    daemons = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    ranks = {"RANK": 5, "SIZE": 8, "LOCAL_RANK": 1, "LOCAL_SIZE": 4}
    inner = {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ranks.items()}, "MASTER_ADDR": "h"}
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
    for outer in (daemons, batch_script):
        environ = {**outer, **inner}
        assert discover_ranks(environ) == Ranks(5, 8, 1, 4) and environ["MASTER_ADDR"] == "h"
    with pytest.raises(ValueError, match="Open MPI as rank 5 of 8, but MASTER_ADDR"):
        discover_ranks({**daemons, **inner, "MASTER_ADDR": ""})
    # srun --mpi=pmi2 sets both, and the rank on the node in Slurm's only.
    assert (
        discover_ranks(
            {**SLURM, "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "PMI_RANK": "2", "PMI_SIZE": "3"}
        ).local_rank
        == 1
    )


def test_empty_variables_are_not_set() -> None:
    assert discover_ranks({**SLURM, "RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": " "}) == Ranks(2, 3, 0, 1)


def test_a_launcher_under_a_scheduler_is_right() -> None:
    launched = {**BY_HAND, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "2"}
    assert discover_ranks({**SLURM, **launched}) == Ranks(5, 6, 1, 2)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "CROSS_RANK": "0"}
    assert discover_ranks({**batch_script, **BY_HAND}) == Ranks(0, 1, 0, 1)


# ---- hosts --------------------------------------------------------------------------------------------------------


def rank(number: int, **changes: Any) -> Facts:
    """Rank `number`, alone on host h`number` at 10.0.0.`number`; the master is h0."""
    facts = Facts(
        rank=number,
        world_size=2,
        local_rank=0,
        host=f"h{number}",
        host_key=f"h{number}",
        device="cpu",
        interfaces={"lo": ["127.0.0.1"], "eth0": [f"10.0.0.{number}"], "docker0": ["172.17.0.1"]},
        towards_master=f"10.0.0.{number}",
        master=["10.0.0.0"],
        gloo_interface=None,
        versions={"torch": "2.13.0+cpu", "files of megatron_acco": "aa"},
        shared_memory_total=64 << 20,
        shared_memory_free=64 << 20,
    )
    return replace(facts, **changes)


def two(address: str = "h0", first: dict[str, Any] | None = None, **second: Any) -> Verdict:
    return judge([rank(0, **(first or {})), rank(1, **second)], address)


def test_every_rank_speaks_from_the_address_that_leads_to_the_master() -> None:
    verdict = two()
    assert not verdict.problems and not verdict.warnings
    assert verdict.speaks == [["eth0", "10.0.0.0"], ["eth0", "10.0.0.1"]]
    assert verdict.hosts == ["h0 (rank 0): 10.0.0.0 on eth0", "h1 (rank 1): 10.0.0.1 on eth0"]


def test_a_host_whose_own_name_is_loopback_speaks_from_the_address_that_the_others_use() -> None:
    """B41."""
    loopback = {"towards_master": "127.0.0.1", "master": ["127.0.1.1"]}
    assert two(first=loopback).speaks[0] == ["eth0", "10.0.0.0"]
    everywhere = two("127.0.0.1", loopback, towards_master="127.0.0.1", master=["127.0.0.1"])
    assert len(everywhere.problems) == 2 and "h1 reaches the master at 127.0.0.1 only" in everywhere.problems[1]
    assert "docker0 (172.17.0.1)" in everywhere.problems[1] and "set GLOO_SOCKET_IFNAME" in everywhere.problems[1]


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"gloo_interface": "eth9"}, r"GLOO_SOCKET_IFNAME=eth9 on h1, whose interfaces are lo.*eth0 \(10.0.0.1\)"),
        ({"gloo_interface": "lo"}, "lo on h1 is the loopback interface, which no other host reaches"),
        ({"world_size": 3}, "WORLD_SIZE differs: 2 on h0; 3 on h1"),
        ({"device": "cuda"}, "the accelerator differs: cpu on h0; cuda on h1"),
        ({"versions": {"torch": "2.12.0", "files of megatron_acco": "aa"}}, r"torch differs: 2.13.0\+cpu on h0; 2.12"),
        ({"versions": {"torch": "2.13.0+cpu", "files of megatron_acco": "bb"}}, "bring the checkout to the same"),
    ],
)
def test_hosts_that_do_not_fit_together_are_refused(second: dict[str, Any], problem: str) -> None:
    verdict = two(**second)
    assert len(verdict.problems) == 1
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(verdict.problems[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_host_that_is_listed_under_two_names_is_told(device: str) -> None:
    twice = {"device": device, "host": "h0", "host_key": "h0", "shared_memory_free": 8 << 30}
    verdict = judge([rank(0, **twice), rank(1, **twice)], "127.0.0.1")
    (text,) = verdict.warnings if device == "cpu" else verdict.problems
    assert "ranks 0-1 on h0 all have LOCAL_RANK 0" in text and "under two names" in text


def test_another_build_and_little_shared_memory_are_warnings() -> None:
    """B47."""
    verdict = two(versions={"torch": "2.13.0+cu130", "files of megatron_acco": "aa"})
    assert not verdict.problems and "torch differs" in verdict.warnings[0]
    one_host = judge([rank(0), rank(1, host="h0", host_key="h0", local_rank=1)], "127.0.0.1")
    assert not one_host.problems and one_host.speaks == [["", ""], ["", ""]]
    assert "/dev/shm on h0 has 64 MiB free, and 2 ranks may want 132 MiB" in one_host.warnings[0]
    assert one_host.hosts == ["h0 (ranks 0-1): alone, no interface needed"]


def test_hosts_with_one_name_are_told_apart() -> None:
    """Copied machines and containers: what `doctor` collects by name must not be lost."""
    same = [rank(n, host="ubuntu", host_key=f"h{n // 2}", towards_master=f"10.0.0.{n // 2}") for n in range(4)]
    names = [facts.host for facts in tell_apart([*same, rank(4)])]
    assert names == ["ubuntu@10.0.0.0"] * 2 + ["ubuntu@10.0.0.1"] * 2 + ["h4"]
    behind_nat = [replace(facts, towards_master="127.0.0.1", interfaces={}) for facts in same]
    assert len({facts.host for facts in tell_apart(behind_nat)}) == 2


def test_a_folder_that_cannot_be_written_is_found_out_by_writing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "runs", Path("/proc/runs")):
        assert not room(str(folder))["writable"] and leave_token(str(folder), "token") == ""
    assert room(str(tmp_path / "new" / "runs"))["writable"] and list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_taken_port_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(HostsRefused, match=rf"port {port} is taken.*--master_port"):
            meet(Ranks(0, 2, 0, 1), "cpu", timedelta(seconds=30))


def test_a_program_that_takes_the_connection_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks must not wait for it without a limit: pdsh ends no host for the failure of another."""
    monkeypatch.setattr(meeting, "_MARGIN_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*does not answer; if it is another program"):
            meet(Ranks(1, 2, 0, 1), "cpu", timedelta(seconds=0.5))
        assert time.monotonic() - start < 10.0


def test_slow_hosts_and_slow_pairs_are_named() -> None:
    rates = {("a", "b"): 900.0, ("a", "c"): 100.0, ("b", "c"): 110.0}
    assert slow_links(rates) == ["c reaches at most 110 Mbit/s, other hosts 900"]
    four = {("a", "b"): 900.0, ("a", "c"): 900.0, ("b", "c"): 200.0}
    assert slow_links(four) == ["b - c has 200 Mbit/s, and both have links of twice that"]
    assert slow_links({("a", "b"): 5.0}) == slow_links({}) == []


def test_marks_tell_files_apart_that_differ_anywhere(tmp_path: Path) -> None:
    content = bytearray(b"x" * 3_000_000)
    names = [str(tmp_path / name) for name in "abc"]
    for name, changed in zip(names, (None, 2_999_999, 0), strict=True):
        if changed is not None:
            content[changed] ^= 1
        Path(name).write_bytes(content)
    assert len(set(marks(names).values())) == 3 and mark(str(tmp_path / "none")) == ""
    assert data_files(["0.3", "x", "1", "y"]) == ["x.idx", "x.bin", "y.idx", "y.bin"]


# ---- megatron-acco launch -----------------------------------------------------------------------------------------


def test_variables_are_sent_and_secrets_are_not() -> None:
    environ = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/hf",
        "HF_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "HOME": "/",
        "DS_": "",
    }
    assert select(environ) == (["GLOO_SOCKET_IFNAME", "HF_HOME"], ["HF_TOKEN", "WANDB_API_KEY"])
    assert select({"MLFLOW_TRACKING_PASSWORD": "s", "MLFLOW_RUN": "r"}, ("MLFLOW",)) == (
        ["MLFLOW_RUN"],
        ["MLFLOW_TRACKING_PASSWORD"],
    )
    assert "TOKENIZERS_PARALLELISM" in select({"TOKENIZERS_PARALLELISM": "1"})[0]


def test_ssh_options_and_the_environment_file(tmp_path: Path) -> None:
    """B40."""
    assert ssh_port("-o X=y -p 2222") == ssh_port("-p2222") == "2222" and ssh_port("-v") is ssh_port("") is None
    path = tmp_path / ".deepspeed_env"
    path.write_text("A=b\n\nC=d\n")
    with pytest.raises(ValueError, match=r"deepspeed_env, line 2: '' is not NAME=VALUE"):
        check_environment_file(path)


WORDS = ["x y", 'say "hi"', 'a"b', "$HOME", "`id`", "it's", "a;b", "a*", "(p)", "%n", "%%", "ü", "", "\\", "a\nb", "~"]
VALUES = {"HF_A": "/h f/$x", "HF_B": 'q"', "HF_C": "%n", "HF_D": "a\nb", "HF_E": "`id`; id", "HF_F": "\\ "}
SECRETS = {"MLFLOW_TRACKING_PASSWORD": "s", "HF_TOKEN": "s"}


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """DeepSpeed's arguments, in a folder whose name has a space, with variables that are hard to hand on."""
    here = tmp_path / "a folder"
    here.mkdir()
    monkeypatch.chdir(here)
    for name, value in {**VALUES, **SECRETS}.items():
        monkeypatch.setenv(name, value)
    off = dict.fromkeys(("ssh_port", "venv_script", "no_python", "module", "no_local_rank", "save_pid"))
    empty = {"include": "", "exclude": "", "num_nodes": -1, "num_gpus": -1, "launcher_args": "", "hostfile": "h"}
    master = {"master_addr": "h", "master_port": 1, "enable_each_rank_log": None}
    return Namespace(user_script="my script.py", user_args=WORDS, **off, **empty, **master)


def test_words_and_values_arrive_through_pdsh_and_a_shell(launcher: Namespace) -> None:
    from megatron_acco.cli.runners import PlainPDSHRunner

    runner = PlainPDSHRunner(launcher, "e30=")
    for name, value in {**VALUES, **SECRETS}.items():
        runner.add_export(name, value)
    runner.add_export("HF_FILE", "$PWD/%h\n")  # as DeepSpeed hands over a line of .deepspeed_env
    command, _, _ = runner.get_cmd({}, {"h0": [0], "h1": [0]})
    line = " ".join(command[command.index("h0,h1") + 1 :])
    for pattern, meaning in (("%%", "\0"), ("%n", "7"), ("%h", "h1"), ("\0", "%")):  # pdsh's own reading
        line = line.replace(pattern, meaning)
    show = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))"
    line = line.replace("-u -m deepspeed.launcher.launch", f"-c '{show}'")
    ran = subprocess.run(["sh", "-c", line], env={}, cwd="/", capture_output=True, text=True, check=True)
    words, environ, folder = json.loads(ran.stdout)
    assert words[-len(WORDS) - 1 :] == ["my script.py", *WORDS] and "--node_rank=7" in words
    assert VALUES.items() <= environ.items() and not SECRETS.keys() & environ.keys()
    assert folder == str(Path.cwd()) and environ["HF_FILE"] == "//%h", "the file's values are read on the host"


def test_words_and_values_go_to_open_mpi_as_they_are(launcher: Namespace) -> None:
    from megatron_acco.cli.runners import PlainOpenMPIRunner

    runner = PlainOpenMPIRunner(launcher, "e30=", {"h0": 1, "h1": 1})
    for name, value in {**VALUES, **SECRETS}.items():
        runner.add_export(name, value)
    command = runner.get_cmd({}, {})
    assert command[-len(WORDS) :] == WORDS
    assert {f"{name}={value}" for name, value in VALUES.items()} <= set(command)
    assert not any(word.startswith(tuple(SECRETS)) for word in command)


def test_what_the_launcher_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher import runner

    for name in ("EXPORT_ENVS", "PDSHRunner", "OpenMPIRunner"):
        monkeypatch.setattr(runner, name, getattr(runner, name))
    (tmp_path / "hosts").write_text("h0 slots=1\r\n\n# two\nh1 slots=1\n")
    words = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--master_addr", "h0", "--node_rank", "2", "s.py"]
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    with pytest.raises(ValueError, match=r"launcher: .*--node_rank is not set correctly"):
        launch(words)
    with pytest.raises(ValueError, match="--ssh_port 22, but PDSH_SSH_ARGS_APPEND says -p 2222"):
        launch([*words[:2], "--ssh_port", "22", *words[2:]])
    with pytest.raises(ValueError, match=r"launcher: .*--node_rank"):
        launch([*words, "--ssh_port", "22"])  # the script's own argument
    assert port_options(2222, "2222") == port_options(None, None) == []


def test_a_cut_link_ends_the_login_and_the_users_own_options_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher import runner

    for name in ("EXPORT_ENVS", "PDSHRunner", "OpenMPIRunner"):
        monkeypatch.setattr(runner, name, getattr(runner, name))
    options: list[str] = []
    monkeypatch.setattr(runner, "main", options.extend)
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o ServerAliveInterval=3 -p 2222")
    assert launch(["script.py"]) == 0 and options == ["--ssh_port", "2222", "script.py"]
    own, added = os.environ["PDSH_SSH_ARGS_APPEND"].split(" -p 2222 ")
    assert own == "-o ServerAliveInterval=3", "ssh takes the first of two values"
    assert added == "-o ServerAliveInterval=15 -o ServerAliveCountMax=42", "the script's default: 10 minutes"
    assert time_limit(["s.py", "--distributed-timeout-minutes", "1"]) == 60.0 and keep_alive(60.0).endswith("=6")
    assert time_limit(["s.py", "--distributed-timeout-minutes=0.1"]) == 6.0 and keep_alive(6.0).endswith("=4")
