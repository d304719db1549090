"""What the facts of all ranks mean: whether they can make a job, and through which interface each of them speaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_acco.hosts.facts import CPU_SHARED_MEMORY, Facts
from megatron_acco.hosts.network import is_loopback

# Of an accelerator host: NCCL and the loader's processes.
_ACCELERATOR_SHARED_MEMORY = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """The same on all ranks.

    Attributes:
        problems: each ends the run; what is wrong, on which host, what to do.
        warnings: each should be put right, and ends nothing.
        hosts: a line per host, with its ranks and its address.
        speaks: [interface, address] of every rank; empty strings where the ranks of one host need none.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    speaks: list[list[str]] = field(default_factory=list)


def judge(everyone: Sequence[Facts], master: str) -> Verdict:
    """Judge the facts of all ranks, in rank order. `master`: MASTER_ADDR."""
    verdict = Verdict()
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for facts in everyone:
        hosts[facts.host_key].append(facts)
    _judge_counts(everyone, hosts, verdict)
    _judge_versions(everyone, verdict)
    several = len(hosts) > 1
    master_address = next(
        (a for facts in everyone for a in facts.master if not is_loopback(a)), None if is_name(master) else master
    )
    for facts in everyone:
        verdict.speaks.append(_choose(facts, several, master_address, verdict))
    for ranks in hosts.values():
        first = ranks[0]
        _judge_shared_memory(ranks, verdict)
        interface, address = verdict.speaks[first.rank]
        where = f"{address} on {interface}" if interface else "alone, no interface needed"
        verdict.hosts.append(f"{first.host} ({_ranges([facts.rank for facts in ranks])}): {where}")
    return verdict


def is_name(host: str) -> bool:
    """Whether `host` is not an address."""
    return any(letter.isalpha() for letter in host) and ":" not in host


def _judge_counts(everyone: Sequence[Facts], hosts: dict[str, list[Facts]], verdict: Verdict) -> None:
    for what, read in (("WORLD_SIZE", lambda f: str(f.world_size)), ("the accelerator", lambda f: f.device)):
        kinds = _by_value(everyone, read)
        if len(kinds) > 1:
            verdict.problems.append(f"{what} differs: {_spread(kinds)}")
    for ranks in hosts.values():
        taken = defaultdict(list)
        for facts in ranks:
            taken[facts.local_rank].append(facts.rank)
        for local_rank, owners in taken.items():
            if len(owners) > 1:
                cpu = everyone[0].device == "cpu"
                (verdict.warnings if cpu else verdict.problems).append(
                    f"{_ranges(owners)} on {ranks[0].host} all have LOCAL_RANK {local_rank} and would share "
                    f"{'its cores' if cpu else 'one device'}; is it in the hostfile under two names?"
                )


def _judge_versions(everyone: Sequence[Facts], verdict: Verdict) -> None:
    for name in everyone[0].versions:
        kinds = _by_value(everyone, lambda facts, name=name: facts.versions.get(name, "missing"))  # type: ignore[misc]
        if len(kinds) == 1:
            continue
        same_release = len({value.partition("+")[0] for value in kinds}) == 1
        advice = (
            "bring the checkout to the same state on all hosts"
            if name.startswith("files")
            else "install the same on all hosts (pip install -c constraints.txt)"
        )
        (verdict.warnings if same_release else verdict.problems).append(f"{name} differs: {_spread(kinds)}; {advice}")


def _choose(facts: Facts, several: bool, master: str | None, verdict: Verdict) -> list[str]:
    """The interface that a rank speaks through, and its address."""
    has = "; ".join(f"{name} ({', '.join(a)})" for name, a in facts.interfaces.items()) or "none that is up"
    own = {address: name for name, addresses in facts.interfaces.items() for address in addresses}
    if facts.gloo_interface is not None:
        names = [name for name in facts.gloo_interface.split(",") if name]
        unknown = [name for name in names if name not in facts.interfaces]
        if unknown or not names:
            verdict.problems.append(
                f"GLOO_SOCKET_IFNAME={facts.gloo_interface} on {facts.host}, whose interfaces are {has}; name one of "
                f"them, or unset the variable to let each host choose"
            )
            return ["", ""]
        name, address = names[0], facts.interfaces[names[0]][0]
        if several and is_loopback(address):
            verdict.problems.append(
                f"GLOO_SOCKET_IFNAME={name} on {facts.host} is the loopback interface, which no other host reaches; "
                f"its interfaces are {has}"
            )
        return [name, address]
    if not several:
        return ["", ""]
    if facts.towards_master in own and not is_loopback(str(facts.towards_master)):
        return [own[str(facts.towards_master)], str(facts.towards_master)]
    # The name of the master is a loopback address on its own host (127.0.1.1 in /etc/hosts): the address by which the
    # others know it will do.
    if master in own and not is_loopback(str(master)):
        return [own[str(master)], str(master)]
    outside = [name for name, addresses in facts.interfaces.items() if not is_loopback(addresses[0])]
    if len(outside) == 1:
        return [outside[0], facts.interfaces[outside[0]][0]]
    verdict.problems.append(
        f"{facts.host} reaches the master at {facts.towards_master or 'no address'} only, so that no other host could "
        f"reach it, and its interfaces are {has}; set GLOO_SOCKET_IFNAME there to the one that leads to the others, or "
        f"MASTER_ADDR to an address instead of a name"
    )
    return ["", ""]


def _judge_shared_memory(ranks: list[Facts], verdict: Verdict) -> None:
    first = ranks[0]
    cpu = first.device == "cpu"
    need = CPU_SHARED_MEMORY * len(ranks) if cpu else _ACCELERATOR_SHARED_MEMORY
    if len(ranks) > 1 and first.shared_memory_free < need:
        verdict.warnings.append(
            f"/dev/shm on {first.host} has {first.shared_memory_free / 2**20:.0f} MiB free, and {len(ranks)} ranks may "
            f"want {need / 2**20:.0f} MiB; start the container with --shm-size 8g (Kubernetes: an emptyDir of medium "
            f"Memory at /dev/shm)"
        )


def _by_value(everyone: Iterable[Facts], read: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    kinds: dict[str, list[Facts]] = defaultdict(list)
    for facts in everyone:
        kinds[read(facts)].append(facts)
    return kinds


def _spread(kinds: dict[str, list[Facts]]) -> str:
    parts = []
    for value, owners in kinds.items():
        names = list(dict.fromkeys(facts.host for facts in owners))
        parts.append(f"{value} on {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}")
    return "; ".join(parts)


def _ranges(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
