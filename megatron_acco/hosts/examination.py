"""`megatron-acco doctor` as the ranks of a job run it: every rank takes part, rank 0 collects and prints."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_acco.hosts import files, measure, meeting
from megatron_acco.hosts.findings import Findings
from megatron_acco.hosts.ranks import Ranks

_LOW_DISK = 10 << 30
_CLOCKS_APART = 1.0


@dataclass(frozen=True)
class Wanted:
    """What to examine.

    Attributes:
        files: that must be the same on all hosts.
        folders: by their flags; must be writable, with room.
        megabytes: of the measured exchanges, 0: none.
        seconds: time limit of every step.
    """

    files: list[str]
    folders: dict[str, str]
    megabytes: float
    seconds: float


class Examination:
    """One rank's part of it."""

    def __init__(self, wanted: Wanted, ranks: Ranks) -> None:
        self.wanted, self.ranks = wanted, ranks
        self.findings = Findings()
        self.accelerator = get_accelerator()

    def run(self) -> int:
        """Collective; the exit code, 0 on other ranks than the first unless they fail."""
        limit = timedelta(seconds=self.wanted.seconds)
        try:
            met = meeting.meet(self.ranks, self.accelerator.device_name(), limit)
        except (RuntimeError, meeting.HostsRefused) as error:
            self.findings.problem(str(error))
            return self.findings.end()
        self.store: dist.Store = dist.PrefixStore("megatron_acco_doctor", met.store)
        self.store.set_timeout(limit)
        self.met = met
        self._report_meeting()
        for step in (self._tools, self._files, self._folders, self._calls, self._exchanges):
            if not self._proceed():
                break
            try:
                step()
            except Exception as error:  # a hang that reached its time limit, a connection that broke
                self.findings.problem(f"rank {self.ranks.rank} on {os.uname().nodename}: {error}")
                return self.findings.end()
        return self._end()

    # ---- rank 0 and the others --------------------------------------------------------------------------------------

    def _proceed(self) -> bool:
        """Whether rank 0 has found no problem so far. The first call also tells all ranks about the hosts."""
        first: dict[str, int] = {}
        for facts in self.met.everyone:  # empty on all other ranks
            first.setdefault(facts.host_key, facts.rank)
        if self.ranks.rank == 0:
            names = [self.met.everyone[rank].host for rank in first.values()]
            self.store.set("so far", json.dumps([self.findings.problems, names, list(first.values())]))
        # The barrier makes the value of this step, not of the one before, the one that is read.
        self._barrier()
        problems, self.hosts, self.leaders = json.loads(self.store.get("so far"))
        self._barrier()
        return problems == 0

    def _barrier(self) -> None:
        count = self.store.add("barrier", 1)
        everyone = self.ranks.world_size
        target = (count + everyone - 1) // everyone * everyone
        deadline = time.monotonic() + self.wanted.seconds
        while self.store.add("barrier", 0) < target:
            if time.monotonic() > deadline:
                raise RuntimeError("some ranks do not answer any more")
            time.sleep(0.005)

    def _end(self) -> int:
        self._barrier()  # rank 0 keeps the store
        if self.ranks.rank != 0:
            return 0
        time.sleep(0.2)
        return self.findings.end()

    def _per_host(self, name: str, value: Any) -> dict[str, Any]:
        """The values of the first ranks of all hosts, by name of the host, on rank 0; elsewhere empty."""
        if self.ranks.rank in self.leaders:
            self.store.set(f"{name} {self.ranks.rank}", json.dumps(value))
        if self.ranks.rank != 0:
            return {}
        return {
            host: json.loads(self.store.get(f"{name} {rank}"))
            for host, rank in zip(self.hosts, self.leaders, strict=True)
        }

    # ---- the steps --------------------------------------------------------------------------------------------------

    def _report_meeting(self) -> None:
        if self.ranks.rank != 0:
            return
        verdict, everyone = self.met.verdict, self.met.everyone
        for text in verdict.problems:
            self.findings.problem(text)
        for text in verdict.warnings:
            self.findings.warning(text)
        if not any("differs" in text for text in verdict.problems + verdict.warnings):
            named = ", ".join(f"{name} {version}" for name, version in everyone[0].versions.items())
            self.findings.ok(f"versions agree: {named}")
        for line in verdict.hosts:
            self.findings.ok(line)
        free = {facts.host: f"{facts.shared_memory_free / 2**20:.0f} MiB" for facts in everyone}
        self.findings.ok(f"/dev/shm free: {_join(free)}")

    def _tools(self) -> None:
        """A CPU run compiles DeepSpeed's communication op."""
        for host, found in self._per_host("tools", shutil.which("g++") is not None).items():
            if not found and self.accelerator.device_name() == "cpu":
                self.findings.problem(f"{host}: no C++ compiler (g++), which DeepSpeed needs on CPU; install g++")

    def _files(self) -> None:
        per_host = self._per_host("files", files.marks(self.wanted.files))
        for path in self.wanted.files if per_host else []:
            kinds: dict[str, list[str]] = {}
            for host, marks in per_host.items():
                kinds.setdefault(marks[path], []).append(host)
            if "" in kinds:
                self.findings.problem(f"{path} cannot be read on {', '.join(kinds[''])}; copy it there, or mount it")
            elif len(kinds) > 1:
                parts = "; ".join(f"{mark} on {', '.join(hosts)}" for mark, hosts in kinds.items())
                self.findings.problem(f"{path} is not the same everywhere ({parts}); copy one version to all hosts")
            else:
                self.findings.ok(f"{path} is the same on all hosts")

    def _folders(self) -> None:
        name = self._token_name()
        for flag, folder in self.wanted.folders.items():
            token = files.leave_token(folder, name) if self.ranks.rank == 0 else ""
            self._barrier()
            room = files.room(folder)
            shared = (Path(room["existing"]) / name).exists()
            per_host = self._per_host(flag, {**room, "shared": shared})
            self._barrier()
            if token:
                Path(token).unlink(missing_ok=True)
            self._judge_folder(flag, folder, per_host)

    def _token_name(self) -> str:
        if self.ranks.rank == 0:
            self.store.set("token", f".megatron-acco-doctor-{uuid.uuid4().hex}")
        return self.store.get("token").decode()

    def _judge_folder(self, flag: str, folder: str, per_host: Mapping[str, Any]) -> None:
        if not per_host:
            return
        closed = [host for host, found in per_host.items() if not found["writable"]]
        if closed:
            self.findings.problem(f"{flag} {folder} cannot be written on {', '.join(closed)}")
            return
        low = {host: _gib(found["free"]) for host, found in per_host.items() if found["free"] < _LOW_DISK}
        if low:
            self.findings.warning(f"{flag} {folder}: little room, {_join(low)} free")
        others = [host for host, found in per_host.items() if not found["shared"]]
        free = _join({host: _gib(found["free"]) for host, found in per_host.items()})
        if others and flag == "--save":
            self.findings.warning(
                f"{flag} {folder} is another folder on {', '.join(others)}: a checkpoint is spread over the hosts and "
                f"resumes on the same hosts only; use a shared file system ({free} free)"
            )
        else:
            kept = f"own folder on {', '.join(others)}" if others else "one folder for all hosts"
            self.findings.ok(f"{flag} {folder}: {kept}, {free} free")

    def _calls(self) -> None:
        """Every host calls every other, and compares clocks."""
        if len(self.hosts) < 2:
            return
        calls: dict[str, measure.Call] = {}
        if self.ranks.rank in self.leaders:
            number = self.leaders.index(self.ranks.rank)
            address = self.met.verdict.speaks[self.ranks.rank][1]
            names = [str(index) for index in range(len(self.hosts))]
            calls = measure.call_everyone(self.store, str(number), address, names)
        ahead = {}
        answers = self._per_host("calls", {name: vars(call) for name, call in calls.items()})
        for host, found in answers.items():
            for number_of, call in found.items():
                other = self.hosts[int(number_of)]
                if call["error"]:
                    self.findings.problem(
                        f"{host} cannot connect to {other} at {call['error']}; open the firewall between the hosts for "
                        f"all TCP ports (gloo and NCCL choose them), or choose another GLOO_SOCKET_IFNAME"
                    )
                elif host == self.hosts[0]:
                    ahead[other] = call["ahead"]
        if answers and not self.findings.problems:
            self.findings.ok(f"every host reaches every other: {len(self.hosts)} hosts")
            wrong = {host: f"{seconds:+.1f} s" for host, seconds in ahead.items() if abs(seconds) > _CLOCKS_APART}
            if wrong:
                self.findings.warning(f"clocks differ from {self.hosts[0]}'s: {_join(wrong)}; start an NTP client")
            else:
                apart = max(map(abs, ahead.values()))
                self.findings.ok(f"clocks agree within {max(apart, 1e-3):.3f} s")

    def _exchanges(self) -> None:
        """The collectives of a training round, over all ranks and between pairs of hosts."""
        if self.wanted.megabytes <= 0 or self.ranks.world_size == 1:
            return
        accelerator = self.accelerator
        if accelerator.device_name() != "cpu":
            accelerator.set_device(self.ranks.local_rank)
        device = torch.device(accelerator.current_device_name())
        synchronize: Callable[[], None] = accelerator.synchronize if device.type != "cpu" else lambda: None
        meeting.accept(self.met.verdict, self.ranks.rank)
        dist.init_process_group(
            accelerator.communication_backend_name(),
            store=dist.PrefixStore("group", self.store),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            timeout=timedelta(seconds=self.wanted.seconds),
        )
        group = dist.group.WORLD
        assert group is not None
        whole = measure.speed_of(group, self.wanted.megabytes, device, synchronize)
        pairs: dict[str, Any] = {}
        if len(self.hosts) > 2:
            pairs = measure.speed_of_pairs(self.leaders, self.ranks.rank, self.wanted.megabytes, device, synchronize)
        found = {k: v for values in self._per_host("pairs", pairs).values() for k, v in values.items()}
        dist.barrier()
        dist.destroy_process_group()
        if self.ranks.rank == 0:
            self._report_speeds(whole, {key: measure.Speed(**value) for key, value in found.items()})

    def _report_speeds(self, whole: measure.Speed, pairs: Mapping[str, measure.Speed]) -> None:
        title = f"all {self.ranks.world_size} ranks, {self.wanted.megabytes:g} MB"
        self.findings.ok(f"{title}: {_describe(whole)}")
        rates = {}
        for key, speed in pairs.items():
            one, other = (self.hosts[int(number)] for number in key.split())
            rates[one, other] = speed.mbit
            self.findings.ok(f"{one} - {other}: {_describe(speed)}")
        for text in measure.slow_links(rates):
            self.findings.warning(f"{text}; every exchange waits for the slowest link")


def _describe(speed: measure.Speed) -> str:
    return (
        f"reduce-scatter {speed.reduce_scatter * 1e3:.1f} ms, all-gather {speed.all_gather * 1e3:.1f} ms, "
        f"{speed.mbit:.0f} Mbit/s sent per rank, latency {speed.latency * 1e3:.2f} ms"
    )


def _join(values: Mapping[str, str]) -> str:
    kinds: dict[str, list[str]] = {}
    for host, value in values.items():
        kinds.setdefault(value, []).append(host)
    if len(kinds) == 1 and len(values) > 1:
        return f"{next(iter(kinds))} on every host"
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in kinds.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
