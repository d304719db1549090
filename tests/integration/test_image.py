"""The image of docker/: what its files promise, and trainings on several hosts inside it.

Covers CASES B47 (names, ssh on another port, little shared memory, --no_ssh). compose.yaml cannot be started without an
engine; its services' own commands run here under the image's entry point, each on a host of the cluster in a box.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.cluster import Cluster, remove_remains, stop
from tests.integration import containers
from tests.integration.containers import Container, Image
from tests.integration.test_pretrain import reproducible

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
REASON = containers.why_not()
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
USER = 1000
TIME_LIMIT = 300.0
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 12 --train-iters 4 --lr 3e-3 --lr-warmup-iters 0 --log-interval 1 "
    "--train-data-path /data/corpus/train --valid-data-path /data/corpus/valid --eval-interval 2 --eval-iters 2 "
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model /data/corpus/tokenizer.model --num-workers 0"
)

needs_image = pytest.mark.skipif(REASON is not None, reason=f"no image on this machine: {REASON}")


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_image_ends_as_a_user_and_holds_no_key() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER ${USER_ID}"]
    assert not re.search(r"PRIVATE KEY|password=|TOKEN=", "".join(path.read_text() for path in DOCKER.iterdir()))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and all((ROOT / line[1:]).exists() for line in ignored if line.startswith("!"))
    assert "-c constraints.txt" in (DOCKER / "install.sh").read_text()


def test_compose_names_two_nodes_and_the_hostfile_that_they_use() -> None:
    services = compose()["services"]
    assert {name for name in services if services[name].get("hostname") == name} == {"node1", "node2"}
    assert all("shm_size" in service and "/ssh" in "".join(service["volumes"]) for service in services.values())
    assert "node1 slots=1\\nnode2 slots=1" in services["node2"]["entrypoint"][-1]
    # With --exit-code-from the end of any service ends the others; and builds of one image collide.
    assert len(services) == 2 and sum("build" in service for service in services.values()) == 1


@dataclass
class Nodes:
    """Containers node1 ..., each on a host of its own, after the compose file's node2 has prepared the data."""

    cluster: Cluster
    containers: list[Container]
    data: Path  # /data in all of them

    def ready(self, node: int, process: subprocess.Popen[Any]) -> None:
        deadline = time.monotonic() + 60
        while not self.containers[node].healthy():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with Image() as made:
        yield made


@pytest.fixture(scope="module")
def nodes(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    services = compose()["services"]
    folders = {name: tmp_path_factory.mktemp(name) for name in ("keys", "data")}
    for folder in folders.values():
        os.chown(folder, USER, USER)
    with Cluster(hosts=3, ssh=False) as cluster:
        names = {f"node{host + 1}": address for host, address in enumerate(cluster.addresses)}
        containers = []
        for host in range(len(cluster)):
            service = services["node1" if host == 0 else "node2"]
            volumes = {folders[name]: inside for name, inside in (v.split(":") for v in service["volumes"])}
            memory = service["shm_size"].removesuffix("b")
            containers.append(Container(image, cluster, host, volumes, memory, service["environment"], names))
        nodes = Nodes(cluster, containers, folders["data"])
        server = containers[1].execute(services["node2"]["entrypoint"])
        nodes.ready(1, server)
        end(server)
        yield nodes


def end(server: subprocess.Popen[Any]) -> None:
    """`docker stop`."""
    stop(server)
    server.wait(timeout=30)


def end_of(process: subprocess.Popen[Any]) -> tuple[str, int]:
    """Output and exit code."""
    return process.communicate(timeout=TIME_LIMIT)[0], process.returncode


@pytest.mark.slow
@needs_image
def test_the_services_of_compose_train_on_two_hosts(nodes: Nodes) -> None:
    services = compose()["services"]
    first, second = nodes.containers[:2]
    assert first.run(["sh", "-c", "ls /etc/ssh/ssh_host_* /var/cache/apt/archives/*.deb"]).stdout == ""
    ops = "stat -c %y $TORCH_EXTENSIONS_DIR/*/*.so"
    made = first.run(["sh", "-c", ops]).stdout
    server = second.start(["sshd"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    nodes.ready(1, server)
    training = first.start(shlex.split(services["node1"]["command"]), **PIPES)
    nodes.ready(0, training)
    output, code = end_of(training)
    assert code == 0, output[-4000:]
    assert re.search(rf"\(rank 1\): {nodes.cluster.addresses[1]} on eth0", output), output[-4000:]
    assert "launcher" in output and "pdsh" in output
    losses = [loss for _, _, loss, *_ in reproducible(nodes.data / "run")]
    assert losses[0] > losses[-1], losses
    assert (nodes.data / "run" / "latest").stat().st_uid == USER
    assert made and first.run(["sh", "-c", ops]).stdout == made, "compiled again"
    assert not first.healthy(), "its sshd stayed"
    end(server)


@pytest.mark.slow
@needs_image
def test_three_hosts_in_the_image_train_as_three_local_ranks_do_bit_for_bit(nodes: Nodes) -> None:
    """Over ssh; and by the recipe without (every node its own launcher), on two hosts of which one has two ranks."""
    settings = json.loads((ROOT / "deepspeed_configs" / "acco.json").read_text())
    settings["acco"]["warmup_updates"] = 1
    (nodes.data / "short.json").write_text(json.dumps(settings))
    (nodes.data / "hosts3").write_text("".join(f"node{host + 1} slots=1\n" for host in range(3)))
    (nodes.data / "hosts2").write_text("node1 slots=2\nnode2 slots=1\n")
    script = ["pretrain_gpt_acco.py", "--deepspeed_config", "/data/short.json", *MODEL.split(), "--save"]
    first = nodes.containers[0]

    local = ["deepspeed", "--num_gpus", "3", *script, "/data/local"]
    output, code = end_of(first.start(local, **PIPES))
    assert code == 0, output[-4000:]
    expected = reproducible(nodes.data / "local")
    assert len(expected) == 4 + 2

    servers = [node.start(["sshd"], stdout=subprocess.DEVNULL) for node in nodes.containers[1:]]
    for host, server in enumerate(servers, start=1):
        nodes.ready(host, server)
    launch = ["with-sshd", "deepspeed", "--hostfile", "/data/hosts3", *script, "/data/ssh"]
    output, code = end_of(first.start(launch, **PIPES))
    assert code == 0, output[-4000:]
    for rank, address in enumerate(nodes.cluster.addresses):
        assert re.search(rf"\(rank {rank}\): {address} on eth0", output), output[-4000:]
    assert reproducible(nodes.data / "ssh") == expected
    for server in servers:
        end(server)

    launch = ["deepspeed", "--hostfile", "/data/hosts2", "--no_ssh", "--master_addr", "node1", "--node_rank"]
    started = [
        node.start([*launch, str(rank), *script, "/data/no_ssh"], **PIPES)
        for rank, node in enumerate(nodes.containers[:2])
    ]
    for output, code in map(end_of, started):
        assert code == 0, output[-4000:]
    assert reproducible(nodes.data / "no_ssh") == expected


@pytest.mark.slow
@needs_image
def test_little_shared_memory_is_warned_of_and_a_key_is_asked_for(image: Image, nodes: Nodes) -> None:
    container = Container(image, nodes.cluster, 2)  # Docker's own 64 MiB of /dev/shm
    assert not container.healthy(), "before its start"
    output, code = end_of(container.start(["true"], **PIPES))
    assert code == 0 and "warning: /dev/shm has 64 MiB free" in output
    assert container.healthy(), "no sshd was asked for"
    output, code = end_of(container.start(["sshd"], **PIPES))
    assert code == 1 and "mount a folder with authorized_keys at /ssh" in output
    assert not container.healthy(), "the set-up failed"


def processes_that_see(name: str) -> list[int]:
    """Those with a mount that has `name` in its source."""
    found = []
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if name in path.read_text() else []
    return found


@pytest.mark.slow
@needs_image
def test_nothing_runs_or_stays_mounted_after_a_killed_process(image: Image) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cluster = Cluster(hosts=1, ssh=False)
            container = Container(image, cluster, 0)
            asleep = container.start(["sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
            assert asleep.stdout is not None and asleep.stdout.readline()
            assert processes_that_see(cluster.folder.name)
            os.write(writer, cluster.folder.name.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writer)
    name = os.read(reader, 200).decode()
    os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL and name
    deadline = time.monotonic() + 10
    while users := processes_that_see(name):
        assert time.monotonic() < deadline, users
        time.sleep(0.1)
    remove_remains()  # as the next cluster does
    assert not (Path(tempfile.gettempdir()) / name).exists()
