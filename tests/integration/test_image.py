"""The image of docker/: what its files promise, and a training on two hosts inside it.

Covers CASES B47 (names, ssh on another port). compose.yaml cannot be started without an engine; its services' own
commands run here under the image's entry point, each on a host of the cluster in a box.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.cluster import Cluster
from tests.integration import containers
from tests.integration.containers import Container, Image

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
REASON = containers.why_not()
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
USER = 1000

needs_image = pytest.mark.skipif(REASON is not None, reason=f"no image on this machine: {REASON}")


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_image_ends_as_a_user_and_holds_no_key() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER acco"]
    assert not re.search(r"PRIVATE KEY|password=|TOKEN=", "".join(path.read_text() for path in DOCKER.iterdir()))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and all((ROOT / line[1:]).exists() for line in ignored if line.startswith("!"))
    assert "-c constraints.txt" in (DOCKER / "install.sh").read_text()


def test_compose_names_two_nodes_and_the_hostfile_that_they_use() -> None:
    services = compose()["services"]
    assert {name for name in services if services[name].get("hostname") == name} == {"node1", "node2"}
    assert all("shm_size" in service and "/ssh" in "".join(service["volumes"]) for service in services.values())
    assert "node1 slots=1\\nnode2 slots=1" in services["prepare"]["command"][-1]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with Image() as made:
        yield made


@pytest.mark.slow
@needs_image
def test_the_services_of_compose_train_on_two_hosts(image: Image, tmp_path: Path) -> None:
    services = compose()["services"]
    folders = {"keys": tmp_path / "keys", "data": tmp_path / "data"}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, USER, USER)
    with Cluster(hosts=2, ssh=False) as cluster:
        names = {f"node{host + 1}": address for host, address in enumerate(cluster.addresses)}
        nodes = []
        for host in range(2):
            service = services[f"node{host + 1}"]
            volumes = {folders[name]: inside for name, inside in (v.split(":") for v in service["volumes"])}
            memory = service["shm_size"].removesuffix("b")
            nodes.append(Container(image, cluster, host, volumes, memory, service["environment"], names))
        assert nodes[0].run(["sh", "-c", "ls /etc/ssh/ssh_host_* /var/cache/apt/archives/*.deb"]).stdout == ""
        made = nodes[0].run(["sh", "-c", "stat -c %y $TORCH_EXTENSIONS_DIR/*/*.so"]).stdout
        small = Container(image, cluster, 1).start(["true"], **PIPES)  # Docker's own 64 MiB of /dev/shm
        assert "warning: /dev/shm has 64 MiB free" in small.communicate(timeout=30)[0]
        prepare = nodes[0].start(services["prepare"]["command"], **PIPES)
        output, _ = prepare.communicate(timeout=120)
        assert prepare.returncode == 0, output
        second = nodes[1].start(services["node2"]["command"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while nodes[1].run(["test", "-e", "/home/acco/.sshd/port"]).returncode != 0 or not nodes[1].healthy():
            assert second.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        first = nodes[0].start(shlex.split(services["node1"]["command"]), **PIPES)
        output, _ = first.communicate(timeout=240)
        assert first.returncode == 0, output[-4000:]
        assert re.search(rf"\(rank 1\): {cluster.addresses[1]} on eth0", output), output[-4000:]
        assert (folders["data"] / "run" / "latest").stat().st_uid == USER
        assert made and nodes[0].run(["sh", "-c", "stat -c %y $TORCH_EXTENSIONS_DIR/*/*.so"]).stdout == made
