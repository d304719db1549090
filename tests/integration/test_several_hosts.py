"""pretrain_gpt_acco.py on several hosts of the cluster in a box, under the launchers that docs/multi-node.md names.

Covers CASES B40 (ssh on another port, the user's options for it), B41 (hosts whose own name is a loopback address, an
interface variable that is not forwarded or wrong), B45 (schedulers' variables), B47 (no ssh) and B48 (index caches per
host, data that differs).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cluster import Cluster
from tests.integration.test_cluster import REASON
from tests.integration.test_pretrain import (
    ROOT,
    TIME_LIMIT,
    command,
    data,  # noqa: F401 (a fixture)
    reproducible,
    succeed,
    weights,
    write_json,
)

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no cluster in a box: {REASON}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three hosts that find their own name at 127.0.1.1, with sshd on a port of its own."""
    with Cluster(hosts=3, ssh_port=2222, own_name_is_loopback=True) as made:
        yield made


def end_of(process: subprocess.Popen[Any]) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=TIME_LIMIT)
    return process.returncode, output.decode(errors="replace")


PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT}
# As if nothing were set: the cluster's own default names the interface.
NO_INTERFACE = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
CLI = [sys.executable, "-m", "megatron_acco.cli.main"]


@pytest.mark.slow
def test_three_hosts_go_on_as_three_local_ranks_do_bit_for_bit(
    data: Path,  # noqa: F811
    tmp_path: Path,
    cluster: Cluster,
) -> None:
    """B40, B41, B48: plain `deepspeed --hostfile`; every host has a cache, and an estimate, of its own."""
    caches = tmp_path / "cache"
    caches.mkdir()
    for host in range(3):
        cluster.run(host, ["mount", "-t", "tmpfs", "tmpfs", str(caches)], check=True)
    short = ["--train-iters", "4", "--lr-warmup-iters", "0", "--eval-interval", "2", "--data-cache-path", str(caches)]

    def words(group: int | str, folder: Path) -> list[str]:
        config = write_json(tmp_path, "acco", acco={"estimate_group": group})
        save = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]
        return [*command(data, config, ranks=3), *short, *save]

    local, hosts = tmp_path / "local", tmp_path / "hosts"
    succeed(words(1, local))
    shutil.copytree(local / "global_step2", hosts / "global_step2")
    (hosts / "latest").write_text("global_step2")

    options = {**NO_INTERFACE, "OMP_NUM_THREADS": "1", "PDSH_SSH_ARGS_APPEND": "-v"}
    launch = words("node", hosts)
    script = launch[launch.index("pretrain_gpt_acco.py") :]
    code, output = end_of(cluster.deepspeed(script, env=options, **PIPES))
    assert code == 0, output[-4000:]
    for rank, (name, address) in enumerate(zip(cluster.names, cluster.addresses, strict=True)):
        assert re.search(rf" {name} \(rank {rank}\): {address} on eth0", output)
        built = cluster.run(rank, ["sh", "-c", f"ls {caches}/*/manifest.json"]).stdout
        assert built.count("manifest.json") == 1
    assert "debug1: Authentication" in output, "the user's own options for ssh were lost"
    assert "at iteration 2" in output and "an estimate of a node's ranks after the first 2" in output
    *_, third, fourth, _, validation = reproducible(local)
    assert reproducible(hosts) == [third, fourth, validation]
    first, second = (weights(folder, 4) for folder in (local, hosts))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_without_ssh_hosts_with_other_data_are_refused(data: Path, tmp_path: Path, cluster: Cluster) -> None:  # noqa: F811
    """B47 (--no_ssh), B48: each node starts its own launcher; the second finds another text under the same name."""
    index = bytearray((data / "corpus.idx").read_bytes())
    lengths = 9 + 8 + 1 + 8 + 8  # behind the header: magic, version, dtype, two counts
    first = int.from_bytes(index[lengths : lengths + 4], "little")
    index[lengths : lengths + 4] = (first - 1).to_bytes(4, "little")  # as if the first document were shorter
    (tmp_path / "other.idx").write_bytes(index)
    cluster.run(1, ["mount", "--bind", str(tmp_path / "other.idx"), str(data / "corpus.idx")], check=True)
    hosts = tmp_path / "hosts"
    hosts.write_text("host0 slots=1\nhost1 slots=1\n")
    words = command(data, write_json(tmp_path, "acco"), "--data-cache-path", str(tmp_path / "cache"))
    script = words[words.index("pretrain_gpt_acco.py") :]
    launcher = [words[0], "--hostfile", str(hosts), "--no_ssh", "--master_addr", "host0"]
    try:
        nodes = [
            cluster.start(
                node, [*launcher, "--node_rank", str(node), *script], {**NO_INTERFACE, **ENVIRONMENT}, **PIPES
            )
            for node in range(2)
        ]
        ends = [end_of(node) for node in nodes]
    finally:
        cluster.run(1, ["umount", str(data / "corpus.idx")], check=True)
    assert all(code != 0 for code, _ in ends)
    first_output = ends[0][1]
    assert "host1 (rank 1): 10.77.0.2 on eth0" in first_output
    assert re.search(
        r"ERROR: .*differs: \w+ \(rank 0 on host0\); \w+ \(rank 1 on host1\); all hosts need", first_output
    )
    assert "Traceback" not in first_output, first_output[-3000:]


@pytest.mark.slow
def test_doctor_measures_pairs_names_the_slow_one_and_sees_files_that_differ(tmp_path: Path, cluster: Cluster) -> None:
    """Over a hostfile with two ranks on one host (B40: ssh's port from the user's own options for pdsh)."""
    corpus = tmp_path / "it's 100%n; $HOME corpus"  # what pdsh and the shells of the hosts would read again
    for suffix in (".idx", ".bin"):
        Path(f"{corpus}{suffix}").write_bytes(suffix.encode() * 25_000)
    own = tmp_path / "own"
    own.mkdir()
    cluster.run(2, ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(own)], check=True)
    hosts = tmp_path / "hosts"
    hosts.write_text("host0 slots=2\nhost1 slots=1\nhost2 slots=1\n")
    cluster.set_rate(2, "50mbit")
    words = ["doctor", "--hostfile", str(hosts), "--data-path", "0.3", str(corpus), "--save", str(own)]
    variables = {**NO_INTERFACE, **ENVIRONMENT, "PDSH_SSH_ARGS_APPEND": "-p 2222"}
    code, output = end_of(cluster.start(0, [*CLI, *words, "--megabytes", "1"], variables, **PIPES))
    cluster.set_rate(2, None)
    assert code == 0 and "a run can start" in output, output[-4000:]
    for line in (
        r"ok       ssh, the interpreter and megatron_acco: host0, host1, host2",
        r"ok       versions agree: Python 3\.\d+, torch",
        r"ok       host0 \(ranks 0-1\): 10\.77\.0\.1 on eth0",
        r"ok       \S+/it's 100%n; \$HOME corpus\.bin is the same on all hosts",
        r"WARNING  --save \S+: little room, 0\.0 GiB on host2 free",
        r"WARNING  --save \S+ is another folder on host2",
        r"ok       clocks agree within 0\.0\d\d s",
        r"ok       all 4 ranks, 1 MB: reduce-scatter [\d.]+ ms, all-gather [\d.]+ ms, \d+ Mbit/s",
        r"ok       host0 - host1: ",
        r"WARNING  host2 reaches at most \d\d Mbit/s, other hosts \d\d\d",
    ):
        assert re.search(line, output), f"{line}\n{output[-4000:]}"
    slow = [float(rate) for rate in re.findall(r"ok       host[01] - host2: .* (\d+) Mbit/s", output)]
    assert len(slow) == 2 and all(30.0 < rate < 60.0 for rate in slow), output[-4000:]


@pytest.mark.slow
def test_a_wrong_interface_reaches_all_hosts_and_is_refused_by_name(tmp_path: Path, cluster: Cluster) -> None:
    """B41: `megatron-acco launch` sends GLOO_SOCKET_IFNAME, which the ranks of each host find wrong."""
    hosts = tmp_path / "hosts"
    hosts.write_text("host0 slots=1\nhost1 slots=1\n")
    words = ["launch", "--hostfile", str(hosts), "--ssh_port", "2222", "--module", "megatron_acco.cli.doctor"]
    variables = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth9"}
    code, output = end_of(cluster.start(0, [*CLI, *words], variables, **PIPES))
    assert code == 1, output[-4000:]
    for host in range(2):
        assert f"PROBLEM  GLOO_SOCKET_IFNAME=eth9 on host{host}, whose interfaces are" in output
    assert f"eth0 ({cluster.addresses[1]})" in output and "a run cannot start: 2 problems" in output


def _slurm(host: int) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "megatron_acco.cli.doctor"], {
        "SLURM_PROCID": str(host),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(host),
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "host[0-1]",
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
    }


def _torchrun(host: int) -> tuple[list[str], dict[str, str]]:
    # As the operator of a PyTorchJob sets them.
    variables = {"NNODES": "2", "NODE_RANK": str(host), "NPROC_PER_NODE": "1"}
    rendezvous = {"MASTER_ADDR": "host0", "MASTER_PORT": "29600"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "-m", "megatron_acco.cli.doctor"]
    return torchrun, {**{f"PET_{name}": value for name, value in {**variables, **rendezvous}.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("start", [_slurm, _torchrun])
def test_ranks_meet_under_other_launchers(cluster: Cluster, start: Any) -> None:
    """B45: Slurm's variables, and those that a Kubernetes operator sets for torchrun."""
    nodes = []
    for host in range(2):
        words, variables = start(host)
        nodes.append(
            cluster.start(host, [*words, "--megabytes", "0"], {**NO_INTERFACE, **ENVIRONMENT, **variables}, **PIPES)
        )
    ends = [end_of(node) for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "host1 (rank 1): 10.77.0.2 on eth0" in ends[0][1] and "a run can start" in ends[0][1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI (apt-get install openmpi-bin)")
def test_open_mpi_through_the_deepspeed_launcher(tmp_path: Path, cluster: Cluster) -> None:
    """B45: ranks from Open MPI's variables, without mpi4py."""
    hosts = tmp_path / "hosts"
    hosts.write_text("host0 slots=1\nhost1 slots=1\n")
    options = "--allow-run-as-root --mca plm_rsh_args '-p 2222' -x MASTER_ADDR=host0"
    launcher = ["--hostfile", str(hosts), "--ssh_port", "2222", "--launcher", "openmpi", "--launcher_args", options]
    words = ["launch", *launcher, "--module", "megatron_acco.cli.doctor", "--megabytes", "0"]
    code, output = end_of(cluster.start(0, [*CLI, *words], {**NO_INTERFACE, **ENVIRONMENT}, **PIPES))
    assert code == 0 and "host1 (rank 1): 10.77.0.2 on eth0" in output and "a run can start" in output, output[-4000:]
