"""The ranks meet at the master's store and check each other, before any of them makes a process group.

A process group that cannot be made says which address it tried, seldom why; versions that differ show as a hang or as
wrong numbers. So every rank leaves its facts in the store, rank 0 judges them, and all read the verdict.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from megatron_acco.hosts.facts import Facts, gather
from megatron_acco.hosts.judge import Verdict, judge
from megatron_acco.hosts.network import is_loopback
from megatron_acco.hosts.ranks import Ranks

_PREFIX = "megatron_acco_hosts"
_MARGIN_SECONDS = 5.0


class HostsRefused(ValueError):
    """The ranks cannot make a job. The message says what is wrong on which host and what to do."""


@dataclass(frozen=True)
class Meeting:
    """After `meet`: the store (which must live as long as the job on rank 0), facts of all ranks on rank 0."""

    store: dist.Store
    verdict: Verdict
    everyone: list[Facts]


def meet(ranks: Ranks, device: str, timeout: timedelta) -> Meeting:
    """Meet the other ranks and judge their hosts. Collective; makes no process group.

    Raises:
        RuntimeError: not all ranks arrive in time; rank 0 names those that do not.
    """
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    facts = gather(ranks, device, master, port)
    start = time.monotonic()
    minutes = timeout.total_seconds() / 60.0
    try:
        store = _open_store(ranks, master, port, timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise HostsRefused(
                f"{facts.host}: port {port} is taken, by another job or what it left behind; give this one another "
                f"(--master_port)"
            ) from error
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world_size} on {facts.host} could not meet the others at {master}:{port} "
            f"within {minutes:g} minutes (own addresses: {facts.interfaces}): {error}"
        ) from error
    shared = dist.PrefixStore(_PREFIX, store)
    if shared.add(f"taken {ranks.rank}", 1) > 1:
        raise HostsRefused(
            f"{facts.host}: another process is rank {ranks.rank} already at {master}:{port}; two jobs have the same "
            f"master and port (choose another --master_port), or a process was started twice"
        )
    shared.set(str(ranks.rank), json.dumps(asdict(facts)))
    everyone: list[Facts] = []
    try:
        if ranks.rank == 0:
            everyone = tell_apart(_collect(shared, ranks, start, timeout, f"{master}:{port}"))
            verdict = judge(everyone, master)
            shared.set("verdict", json.dumps(asdict(verdict)))
            if verdict.problems:
                _let_others_read(shared, ranks.world_size - 1)
        else:
            # Rank 0 needs the whole time limit to find out that a rank is missing.
            shared.wait(["verdict"], timeout + timedelta(seconds=5))
            verdict = Verdict(**json.loads(shared.get("verdict")))
            shared.add("read", 1)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world_size} on {facts.host} could not meet the others at {master}:{port} "
            f"within {minutes:g} minutes: {error}"
        ) from error
    return Meeting(store, verdict, everyone)


def accept(verdict: Verdict, rank: int) -> None:
    """Let gloo speak through the interface that was chosen for this rank.

    Raises:
        HostsRefused: the verdict has problems; the same message on all ranks.
    """
    if verdict.problems:
        raise HostsRefused("the hosts cannot make a job: " + "\n  ".join(["", *verdict.problems]).strip())
    interface = verdict.speaks[rank][0]
    if interface and not os.environ.get("GLOO_SOCKET_IFNAME"):
        # Else gloo takes the address of the host's own name, which is 127.0.1.1 on many.
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _open_store(ranks: Ranks, master: str, port: int, timeout: timedelta) -> dist.TCPStore:
    # As torch's env:// does, which opens the same store once more: torchrun keeps it in its agent, else rank 0 does.
    serves = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            found.put(
                dist.TCPStore(
                    master, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
                )
            )
        except Exception as error:
            found.put(error)

    # TCPStore waits without a limit for the first answer of whatever has taken the connection.
    threading.Thread(target=connect, daemon=True, name="open the store").start()
    try:
        opened = found.get(timeout=timeout.total_seconds() + _MARGIN_SECONDS)
    except queue.Empty:
        raise dist.DistStoreError(
            "what listens there does not answer; if it is another program, choose another --master_port"
        ) from None
    if isinstance(opened, Exception):
        raise opened
    return opened


def _let_others_read(store: dist.Store, others: int) -> None:
    """Wait a moment until all have the verdict: this process ends, and its store with it."""
    deadline = time.monotonic() + 5.0
    while store.add("read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.02)


def _collect(store: dist.Store, ranks: Ranks, start: float, timeout: timedelta, place: str) -> list[Facts]:
    everyone = []
    deadline = start + timeout.total_seconds()
    for rank in range(ranks.world_size):
        try:
            left = max(0.001, deadline - time.monotonic())
            store.wait([str(rank)], timedelta(seconds=left))
        except dist.DistError as error:
            raise RuntimeError(_missing(store, ranks.world_size, timeout, place)) from error
        everyone.append(Facts(**json.loads(store.get(str(rank)))))
    return everyone


def tell_apart(everyone: list[Facts]) -> list[Facts]:
    """Hosts that share a name, as containers and copied machines do, get their address behind it: names are told."""
    keys = defaultdict(set)
    for facts in everyone:
        keys[facts.host].add(facts.host_key)
    named: dict[str, str] = {}  # by host_key: all ranks of a host get one name
    for facts in everyone:
        if len(keys[facts.host]) > 1 and facts.host_key not in named:
            outside = [a for own in facts.interfaces.values() for a in own if not is_loopback(a)]
            at = next((a for a in (facts.towards_master, *outside) if a and not is_loopback(a)), "no address")
            name = f"{facts.host}@{at}"
            named[facts.host_key] = f"{name} (rank {facts.rank})" if name in named.values() else name
    return [replace(facts, host=named.get(facts.host_key, facts.host)) for facts in everyone]


def _missing(store: dist.Store, world_size: int, timeout: timedelta, place: str) -> str:
    present: dict[str, list[int]] = defaultdict(list)
    absent = []
    for rank in range(world_size):
        if store.check([str(rank)]):
            present[Facts(**json.loads(store.get(str(rank)))).host].append(rank)
        else:
            absent.append(rank)
    arrived = "; ".join(f"{host}: {ranks}" for host, ranks in present.items())
    return (
        f"rank 0 of {world_size} could not meet the others at {place} within {timeout.total_seconds() / 60.0:g} "
        f"minutes (--distributed-timeout-minutes): ranks {absent} did not arrive (there are {arrived}); they are still "
        f"preparing their data, did not start or have ended (look at their output), or {place} cannot be reached from "
        f"their hosts (megatron-acco doctor)"
    )
