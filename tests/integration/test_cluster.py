"""The cluster in a box (benchmarks/cluster.py): hosts, links, CPU limits, launchers, tear-down.

What the tests of several hosts stand on: if a link here did not have its rate, or a cut one did not lose packets, they
would show nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.cluster
from benchmarks.cluster import NAME, Cluster, ClusterError, bits_per_second, why_not

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
REASON = why_not()
TIME_LIMIT = 240.0

needs_cluster = pytest.mark.skipif(REASON is not None, reason=f"no cluster in a box: {REASON}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts with sshd on a port of its own; the second may use half a CPU."""
    with Cluster(hosts=2, cpu=[1.0, 0.5], ssh_port=2222) as made:
        yield made


@needs_cluster
def test_hosts_have_names_addresses_processes_and_memory_of_their_own(cluster: Cluster) -> None:
    for host, (name, address) in enumerate(zip(cluster.names, cluster.addresses, strict=True)):
        script = "hostname; hostname -I; ls /sys/class/net; getent hosts host0 host1; ls /dev/shm; touch /dev/shm/mine"
        out = cluster.run(host, ["sh", "-c", script], check=True).stdout.split()
        assert out == [name, address, "eth0", "lo", "10.77.0.1", "host0", "10.77.0.2", "host1"]
        assert cluster.run(host, ["sh", "-c", "pgrep -c sleep"]).stdout == "0\n"
        cluster.start(host, ["sleep", "600"])
    route = cluster.run(0, ["ip", "route"], check=True).stdout
    assert "default" not in route, "nothing leads out of the box"


@needs_cluster
def test_clusters_side_by_side_do_not_see_each_other(cluster: Cluster) -> None:
    before = subprocess.run(["ip", "address"], capture_output=True, text=True).stdout
    with Cluster(hosts=3, ssh=False) as other:
        assert subprocess.run(["ip", "address"], capture_output=True, text=True).stdout == before
        listen = "import socket; s = socket.create_server(('', 7000)); print('on', flush=True); s.accept()"
        server = cluster.start(0, [sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "on\n"
        call = [sys.executable, "-c", "import socket; socket.create_connection(('10.77.0.1', 7000), 5)"]
        refused = other.run(2, call, timeout=30)
        assert refused.returncode == 1 and "Connection refused" in refused.stderr
        assert cluster.run(1, call, timeout=30).returncode == 0
        server.stdout.close()


@needs_cluster
def test_nothing_is_left_after_the_owner_was_killed() -> None:
    script = """if True:
        import os, signal
        from benchmarks.cluster import Cluster
        cluster = Cluster(hosts=2, cpu=0.5)
        host = cluster.start(1, ["sh", "-c", "setsid sleep 600 & echo $(readlink /proc/self/ns/net); wait"], stdout=-1)
        print(os.getpid(), cluster.folder, host.stdout.readline().decode().strip(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    owner = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    pid, folder, network = owner.stdout.split()
    deadline = time.monotonic() + 10
    while network in _networks():
        assert time.monotonic() < deadline, "processes of a host outlived the cluster's owner"
        time.sleep(0.05)
    assert Path(folder).exists(), "or the next line shows nothing"
    with Cluster(hosts=1, ssh=False) as made:
        assert made.folder.exists() and not Path(folder).exists()
    remains = [*Path(tempfile.gettempdir()).glob(f"{NAME}-{pid}-*"), *Path("/sys/fs/cgroup").glob(f"*/{NAME}-{pid}-*")]
    assert not remains and not made.folder.exists()


def _networks() -> set[str]:
    """Network namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return found


@needs_cluster
def test_a_cpu_limit_holds_and_can_be_changed(cluster: Cluster) -> None:
    burn = "import time; end = time.time() + 1\nwhile time.time() < end: pass\nprint(time.process_time())"
    half = float(cluster.run(1, [sys.executable, "-c", burn], check=True).stdout)
    cluster.set_cpu(1, 0.2)
    fifth = float(cluster.run(1, [sys.executable, "-c", burn], check=True).stdout)
    cluster.set_cpu(1, 0.5)
    assert half < 0.6 and fifth < 0.3  # a loaded machine gives less, never more


RANK = """
import datetime, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
rank, other = dist.get_rank(), 1 - dist.get_rank()
out, into = torch.zeros(5_000_000, dtype=torch.uint8), torch.empty(5_000_000, dtype=torch.uint8)

def swap():
    for work in (dist.irecv(into, other), dist.isend(out, other)):
        work.wait()

def wait_for(name):
    while not os.path.exists(sys.argv[1] + "/" + name):
        time.sleep(0.02)

swap()
for number, rate in enumerate(["100mbit", "300mbit"]):
    wait_for(rate)
    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        swap()
        seconds.append(time.perf_counter() - start)
    print("RATE", rate, out.numel() * 8 / min(seconds) / 1e6, flush=True)
print("READY", flush=True)
wait_for("cut")
while True:
    swap()
"""


@needs_cluster
def test_links_have_their_rate_in_both_directions_at_once_and_a_cut_one_fails_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with Cluster(hosts=2, rate="100mbit", ssh=False) as shaped:
        job = shaped.launch([sys.executable, str(script), str(tmp_path)], capture=True)
        (tmp_path / "100mbit").touch()
        _wait_for(job, "RATE 100mbit")
        for host in range(2):
            shaped.set_rate(host, "300mbit")
        (tmp_path / "300mbit").touch()
        _wait_for(job, "READY")
        for rank in range(2):
            rates = dict(re.findall(r"RATE (\w+) ([\d.]+)", job.output(rank)))
            for rate, measured in rates.items():
                assert float(measured) == pytest.approx(bits_per_second(rate) / 1e6, rel=0.1)
            assert len(rates) == 2
        shaped.cut(1)
        (tmp_path / "cut").touch()
        start = time.monotonic()
        assert job.wait(TIME_LIMIT, grace=60) == [1, 1]
        assert 4.0 < time.monotonic() - start < 60.0, "the time limit of the collective is 5 s"
        assert all("Timed out waiting 5000ms" in job.output(rank) for rank in range(2))


def _wait_for(job, text: str) -> None:  # type: ignore[no-untyped-def]
    """Until every rank has written `text`."""
    deadline = time.monotonic() + TIME_LIMIT
    while not all(text in job.output(rank) for rank in range(len(job.processes))):
        assert all(process.poll() is None for process in job.processes), job.output(0) + job.output(1)
        assert time.monotonic() < deadline, job.output(0) + job.output(1)
        time.sleep(0.05)


@needs_cluster
def test_the_command_runs_on_every_host_and_hands_on_the_exit_code() -> None:
    command = [sys.executable, "-m", "benchmarks.cluster", "--hosts", "3", "--rate", "300mbit", "--"]
    script = 'echo $RANK of $WORLD_SIZE on $(hostname); test "$RANK" != 2 || exit 7'
    result = subprocess.run([*command, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 7, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{rank} of 3 on host{rank}" for rank in range(3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts must be 1 to"),
        ({"rate": "300 Mbit/s"}, "such as .300mbit., got '300 Mbit/s'"),
        ({"rate": ["1mbit"]}, "2 hosts, 1 values"),
        ({"cpu": 0.0}, "at least 0.05 CPUs"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


def test_remains_that_another_cluster_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once find the same remains of a third, whose process number is no one's start time any more."""
    gone, there = (tmp_path / f"{NAME}-{os.getpid()}-1-{number}" for number in range(2))
    there.mkdir()
    remains = [("folder", gone), ("group", gone), ("folder", there)]
    monkeypatch.setattr(benchmarks.cluster, "_remains", lambda: iter(remains))
    benchmarks.cluster.remove_remains()
    assert not there.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="for those who are not root")
def test_who_is_not_root_is_told_so() -> None:
    with pytest.raises(ClusterError, match="needs root"):
        Cluster()
