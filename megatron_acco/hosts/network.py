"""Interfaces and addresses of this host."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil


def interfaces() -> dict[str, list[str]]:
    """Addresses of every interface that is up, IPv4 first, without link-local ones."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name not in up:
            continue
        own = [(a.family, a.address) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [address for _, address in sorted(own) if not _is_link_local(address)]
        if usable:
            found[name] = usable
    return found


def address_towards(host: str, port: int) -> str | None:
    """The own address from which packets to `host` would be sent, None if it has no name or no route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return probe.getsockname()[0]
    return None


def addresses_of(host: str) -> list[str]:
    """What `host` is called on the network, empty if its name is unknown here."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    """Whether only this host can reach `address`."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_key() -> str:
    """Equal for processes that share a network, also if two hosts have been given one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/net")
    parts = [socket.gethostname()]
    parts += [boot.read_text().strip()] if boot.exists() else []
    parts += [os.readlink(space)] if space.exists() else []
    return " ".join(parts)


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local
