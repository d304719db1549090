"""What every rank tells the others before they make process groups."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from megatron_acco.hosts import network
from megatron_acco.hosts.ranks import Ranks

PACKAGES = ("torch", "deepspeed", "megatron-core", "megatron-acco", "numpy")
SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed's CPU communication op maps this much per rank, and takes it as soon as it is used.
CPU_SHARED_MEMORY = 66 << 20


@dataclass(frozen=True)
class Facts:
    """Of one rank; sizes in bytes.

    Attributes:
        host_key: equal for ranks of one host (`network.host_key`).
        towards_master: own address from which the master is reached, None if it has no name or no route here.
        master: addresses that MASTER_ADDR has on this host.
        gloo_interface: GLOO_SOCKET_IFNAME, None if it is not set.
        versions: of the packages that all hosts must have in the same version.
        clock: seconds since the epoch; ranks write it at different times, see `measure` for a comparison.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    host_key: str
    device: str
    interfaces: dict[str, list[str]]
    towards_master: str | None
    master: list[str]
    gloo_interface: str | None
    versions: dict[str, str]
    shared_memory_total: int
    shared_memory_free: int
    clock: float = field(default_factory=time.time)


def gather(ranks: Ranks, device: str, master: str, port: int) -> Facts:
    """The facts of this process. `device`: the accelerator's name."""
    memory = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return Facts(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        host=socket.gethostname(),
        host_key=network.host_key(),
        device=device,
        interfaces=network.interfaces(),
        towards_master=network.address_towards(master, port),
        master=network.addresses_of(master),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        versions=versions(),
        shared_memory_total=memory.total if memory else 0,
        shared_memory_free=memory.free if memory else 0,
    )


def versions() -> dict[str, str]:
    """Versions of what must be the same on all hosts, and a hash of this package's own files."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    # An installed package has one version through all of its development: a stale checkout shows here only.
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    found["files of megatron_acco"] = digest.hexdigest()[:12]
    return found
