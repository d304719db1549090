"""What `megatron-acco doctor` measures between hosts: reachability, clocks, and the exchanges of a training run."""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megatron_acco.zero.collectives import make_exchange

CONNECT_SECONDS = 5.0
_REPEATS = 3
_LATENCY_ELEMENTS = 256
# Pairs are measured one after the other: beyond this many hosts, each with its neighbours only.
MOST_HOSTS_ALL_PAIRS = 8


@dataclass(frozen=True)
class Call:
    """One host called another. `error` is empty if it answered.

    Attributes:
        seconds: there and back.
        ahead: how far the other's clock is ahead of the own one, in seconds.
    """

    error: str
    seconds: float = 0.0
    ahead: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Of one exchange: seconds of a reduce-scatter and of an all-gather, each of `sent` bytes per rank, and the seconds
    of an exchange of next to nothing."""

    reduce_scatter: float
    all_gather: float
    latency: float
    sent: int

    @property
    def mbit(self) -> float:
        """Rate in Mbit/s at which each rank sends."""
        return 2.0 * self.sent * 8e-6 / (self.reduce_scatter + self.all_gather) if self.sent else 0.0


def call_everyone(store: dist.Store, name: str, address: str, hosts: Sequence[str]) -> dict[str, Call]:
    """Call every other host by TCP, as gloo and NCCL do, and compare clocks. Collective over `hosts`.

    Args:
        name: of this host among `hosts`.
        address: where this host can be called.
    """
    with socket.create_server((address, 0), family=_family(address), backlog=len(hosts)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        store.set(f"address {name}", json.dumps([address, server.getsockname()[1]]))
        results = {}
        for other in hosts:
            if other != name:
                results[other] = _call(*json.loads(store.get(f"address {other}")))
        # Nobody closes before all have called.
        store.add("called", 1)
        deadline = time.monotonic() + (len(hosts) + 1) * CONNECT_SECONDS
        while store.add("called", 0) < len(hosts) and time.monotonic() < deadline:
            time.sleep(0.02)
        return results


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        with connection:
            connection.settimeout(CONNECT_SECONDS)
            try:
                while connection.recv(1):
                    connection.sendall(struct.pack("d", time.time()))
            except OSError:
                continue


def _call(address: str, port: int) -> Call:
    best = Call("", float("inf"))
    try:
        with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
            for _ in range(5):
                start = time.time()
                connection.sendall(b"?")
                answer = connection.recv(8, socket.MSG_WAITALL)
                end = time.time()
                if end - start < best.seconds:
                    best = Call("", end - start, struct.unpack("d", answer)[0] - (start + end) / 2.0)
    except (OSError, struct.error) as error:
        return Call(f"{address}:{port}: {error}")
    return best


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def speed_of(
    group: dist.ProcessGroup, megabytes: float, device: torch.device, synchronize: Callable[[], None]
) -> Speed:
    """Time the exchange of a training round on `group`, best of a few. Collective over the group."""
    exchange = make_exchange(group, torch.float32)
    ranks = exchange.world_size

    def timed(elements: int) -> tuple[float, float, int]:
        flat = torch.ones(elements // ranks * ranks, device=device)
        shard = torch.empty(flat.numel() // ranks, device=device)
        best, sent = [float("inf")] * 2, 0
        for _ in range(_REPEATS + 1):
            dist.barrier(group=group)
            seconds = []
            for call in (
                lambda: exchange.reduce_scatter(flat, shard, accumulate=False, factor=1.0 / ranks),
                lambda: exchange.all_gather(flat),
            ):
                synchronize()
                start = time.perf_counter()
                sent = call()
                synchronize()
                seconds.append(time.perf_counter() - start)
            best = [min(pair) for pair in zip(best, seconds, strict=True)]
        return best[0], best[1], sent

    _, latency, _ = timed(_LATENCY_ELEMENTS * ranks)
    reduce_scatter, all_gather, sent = timed(int(megabytes * 1e6 / 4))
    return Speed(reduce_scatter, all_gather, latency, sent)


def pairs_of(hosts: int) -> list[tuple[int, int]]:
    """Which hosts are measured together."""
    if hosts <= MOST_HOSTS_ALL_PAIRS:
        return list(itertools.combinations(range(hosts), 2))
    return [(host, (host + 1) % hosts) for host in range(hosts)]


def speed_of_pairs(
    leaders: Sequence[int], rank: int, megabytes: float, device: torch.device, synchronize: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Time the exchange between two hosts at a time; `leaders`: one rank of each. Collective over all ranks.

    Returns:
        On the first rank of a pair, by "i j" in `leaders`: the fields of `Speed`.
    """
    found = {}
    for i, j in pairs_of(len(leaders)):
        members = [leaders[i], leaders[j]]
        dist.barrier()
        if rank in members:
            group = dist.new_group(sorted(members), use_local_synchronization=True)
            assert group is not None
            speed = speed_of(group, megabytes, device, synchronize)
            dist.destroy_process_group(group)
            if rank == members[0]:
                found[f"{i} {j}"] = asdict(speed)
    return found


def slow_links(rates: dict[tuple[str, str], float]) -> list[str]:
    """Hosts whose best link has less than half of the usual best rate, and pairs far below what both can do."""
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for host in pair:
            best[host] = max(best.get(host, 0.0), rate)
    usual = statistics.median(best.values()) if best else 0.0
    slow = [
        f"{host} reaches at most {rate:.0f} Mbit/s, other hosts {usual:.0f}"
        for host, rate in best.items()
        if rate < usual / 2.0
    ]
    for (one, other), rate in rates.items():
        if rate < min(best[one], best[other]) / 2.0:
            slow.append(f"{one} - {other} has {rate:.0f} Mbit/s, and both have links of twice that")
    return slow
