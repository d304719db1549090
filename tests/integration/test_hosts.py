"""pretrain_gpt_acco.py on several hosts of the cluster in a box, under the launchers that docs/multi-node.md names.

Covers CASES B40 (ssh on another port, the user's options for it), B41 (hosts whose own name is a loopback address, an
interface variable that is not forwarded or wrong), B45 (schedulers' variables), B47 (no ssh) and B48 (index caches per
host, data that differs).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster
from tests.integration.test_cluster import REASON
from tests.integration.test_pretrain import (
    ROOT,
    TIME_LIMIT,
    command,
    data,  # noqa: F401 (a fixture)
    reproducible,
    succeed,
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


@pytest.mark.slow
def test_three_hosts_train_as_three_local_ranks_do_bit_for_bit(
    data: Path,  # noqa: F811
    tmp_path: Path,
    cluster: Cluster,
) -> None:
    """B40, B41, B48: plain `deepspeed --hostfile`; every host has a cache of its own."""
    caches = tmp_path / "cache"
    caches.mkdir()
    for host in range(3):
        cluster.run(host, ["mount", "-t", "tmpfs", "tmpfs", str(caches)], check=True)
    short = ["--train-iters", "4", "--lr-warmup-iters", "0", "--eval-interval", "2", "--data-cache-path", str(caches)]
    words = [*command(data, write_json(tmp_path, "acco"), ranks=3), *short, "--save"]
    succeed([*words, str(tmp_path / "local")])

    script = words[words.index("pretrain_gpt_acco.py") :]
    options = {**NO_INTERFACE, "OMP_NUM_THREADS": "1", "PDSH_SSH_ARGS_APPEND": "-v"}
    code, output = end_of(cluster.deepspeed([*script, str(tmp_path / "hosts")], env=options, **PIPES))
    assert code == 0, output[-4000:]
    for rank, (name, address) in enumerate(zip(cluster.names, cluster.addresses, strict=True)):
        assert re.search(rf" {name} \(rank {rank}\): {address} on eth0", output)
        built = cluster.run(rank, ["sh", "-c", f"ls {caches}/*/manifest.json"]).stdout
        assert built.count("manifest.json") == 1
    assert "debug1: Authentication" in output, "the user's own options for ssh were lost"
    local, hosts = reproducible(tmp_path / "local"), reproducible(tmp_path / "hosts")
    assert local == hosts and len(local) == 4 + 2
