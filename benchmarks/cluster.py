"""A cluster in a box: several hosts on one machine, with links of a chosen rate and CPUs of a chosen speed.

    python -m benchmarks.cluster --hosts 2 --rate 300mbit -- hostname -I
    python -m benchmarks.cluster --hosts 2 --cpu 1.0 0.5 --pin -- python train.py

    with Cluster(hosts=2, rate="300mbit", cpu=[1.0, 0.5]) as cluster:
        cluster.launch([sys.executable, "train.py"]).wait(timeout=600)
        cluster.cut(1)

Each host is a set of Linux namespaces: network, processes, host name, mounts, shared memory. File systems other than
/dev/shm and /run are the machine's own, as on a shared disk. A further network namespace is the switch:

    host0: eth0 10.77.0.1 --- port0 \\
                                     bridge   (switch)
    host1: eth0 10.77.0.2 --- port1 /

No interface, address or route of the machine itself is touched, so that no packet leaves the box, and boxes side by
side do not know of each other. Both ends of each cable are shaped (`tc tbf`), sending and receiving independently.

The first process of every host waits at a pipe from the process that made the cluster. However that one ends, the
pipe closes, the first process ends, and with it the kernel ends all others of the host and removes its network. Only
CPU groups and a temporary folder can be left; their names carry their owner, and the next cluster removes those whose
owner is gone.

Needs root, iproute2, util-linux and, for `ssh` and `deepspeed`, openssh-server and pdsh (`scripts/cluster_tools.sh`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

INTERFACE = "eth0"
NETWORK = "10.77.0"
MOST_HOSTS = 200
LEAST_CPU = 0.05
NAME = "megatron-acco-box"
START_SECONDS = 30.0
# Short, so that a slow host is slow evenly and not in steps of a tenth of a second.
CPU_PERIOD = 20_000
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "taskset": "util-linux"}
SSH_TOOLS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}

_counter = itertools.count()
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork"]
# The shell opens /proc/self itself, and that /proc is still the machine's: its own number as the machine counts.
_FIRST_PROCESS = 'read pid rest </proc/self/stat; {setup} echo "$pid"; read closed'


class ClusterError(RuntimeError):
    """The box cannot be built or a command of its own failed."""


def why_not(ssh: bool = True) -> str | None:
    """Why this machine cannot hold a cluster (one line), or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    tools = TOOLS | (SSH_TOOLS if ssh else {})
    missing = sorted({package for tool, package in tools.items() if _which(tool) is None})
    if missing:
        return f"needs {', '.join(missing)} (apt-get install {' '.join(missing)})"
    return _kernel_refusal()


@functools.cache
def _kernel_refusal() -> str | None:
    script = (
        "ip link add name bridge type bridge && ip link add name port type veth && "
        "tc qdisc add dev port root tbf rate 1mbit burst 32kb latency 50ms && mount -t tmpfs tmpfs /dev/shm"
    )
    probe = [*_UNSHARE, "sh", "-c", script]
    result = subprocess.run(probe, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    return f"this machine allows no namespaces, bridges or tbf: {_last_line(result.stderr)}"


class Cluster:
    """N hosts, named host0, host1 ...; a context manager.

    Attributes:
        names: names of the hosts, which each of them resolves.
        addresses: their IPv4 addresses.
        slots: ranks per host, for `launch` and the hostfile.
        folder: temporary folder for keys and logs, removed at the end.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | Sequence[str | None] | None = None,
        cpu: float | Sequence[float | None] | None = None,
        pin: bool | Sequence[Sequence[int] | None] = False,
        slots: int | Sequence[int] = 1,
        ssh: bool = True,
        ssh_port: int = 22,
        own_name_is_loopback: bool = False,
    ) -> None:
        """
        Args:
            hosts: how many.
            rate: of each host's link in both directions, such as "300mbit"; one per host, or one for all. None is as
                fast as the machine.
            cpu: CPUs that a host may use, such as 0.5; one per host, or one for all. None is no limit.
            pin: True binds host i to CPU i (modulo their number); or the CPUs of every host.
            slots: ranks per host.
            ssh: run sshd on every host; root may log in from host to host with a key made for this cluster.
            ssh_port: its port.
            own_name_is_loopback: every host finds its own name at 127.0.1.1, as Debian installs it.

        Raises:
            ClusterError: the machine cannot hold a cluster.
            ValueError: an argument.
        """
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts must be 1 to {MOST_HOSTS}, got {hosts}")
        self._rates = _per_host("rate", rate, hosts)
        for value in self._rates:
            bits_per_second(value)
        self._cpu = _per_host("cpu", cpu, hosts)
        if any(value is not None and not LEAST_CPU <= value < math.inf for value in self._cpu):
            raise ValueError(f"cpu must be at least {LEAST_CPU} CPUs, got {cpu}")
        cpus = sorted(os.sched_getaffinity(0))
        bound = [[cpus[host % len(cpus)]] for host in range(hosts)] if pin is True else pin
        self._pin = _per_host("pin", bound or None, hosts)
        self.slots: list[int] = _per_host("slots", slots, hosts)
        self.names = [f"host{host}" for host in range(hosts)]
        self.addresses = [f"{NETWORK}.{host + 1}" for host in range(hosts)]
        self.ssh_port = ssh_port
        self._ssh = ssh
        self._own_name_is_loopback = own_name_is_loopback
        reason = why_not(ssh)
        if reason is not None:
            raise ClusterError(f"no cluster on this machine: {reason}")
        self._holders: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []
        self._groups: list[Path | None] = []
        self._jobs: list[subprocess.Popen[Any]] = []
        remove_remains()
        self.folder = make_folder()
        self._name = self.folder.name
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.names)

    # ---- building and taking down -----------------------------------------------------------------------------------

    def _build(self) -> None:
        self._switch = self._hold("ip link add name bridge type bridge && ip link set bridge up &&")
        if self._ssh:
            self._write_ssh_files()
        for host, name in enumerate(self.names):
            self._groups.append(None if self._cpu[host] is None else self._make_group(host))
            self._pids.append(self._hold(self._host_setup(host, name)))
            self._connect(host)
            if self._ssh:
                self._start_sshd(host)
        if self._ssh:
            self._wait_for_sshd()

    def _hold(self, setup: str) -> int:
        """Make namespaces that live as long as this process or `close`. Returns the number of their first process."""
        holder = subprocess.Popen(
            [*_UNSHARE, "--kill-child", "sh", "-ec", _FIRST_PROCESS.format(setup=setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C is for the owner
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        line = holder.stdout.readline().strip()
        if not line.isdigit():
            raise ClusterError(f"namespaces could not be made: {_last_line(holder.stderr.read())}")
        return int(line)

    def _host_setup(self, host: int, name: str) -> str:
        own = "127.0.1.1" if self._own_name_is_loopback else self.addresses[host]
        entries = [f"{own if other == host else a} {self.names[other]}" for other, a in enumerate(self.addresses)]
        hosts_file = self.folder / f"{name}.hosts"
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *entries, ""]))
        steps = [
            f"hostname {name}",
            "mount -t proc proc /proc",
            "mount -t sysfs sysfs /sys",  # else it shows the network of the machine
            "mount -t tmpfs tmpfs /dev/shm",
            "mount -t tmpfs -o mode=755 tmpfs /run",
            "mkdir -p /run/sshd",
            f"mount --bind {shlex.quote(str(hosts_file))} /etc/hosts",
            "ip link set lo up",
        ]
        if self._ssh:
            home = shlex.quote(str(Path("~root").expanduser() / ".ssh"))
            folder = shlex.quote(str(self.folder))
            steps += [
                f"mount --bind {folder}/ssh_config /etc/ssh/ssh_config",
                # An account without a password is not a locked one; nobody's real password is in the box.
                f"mount --bind {folder}/shadow /etc/shadow",
                f"if [ -d {home} ]; then mount -t tmpfs -o mode=700 tmpfs {home}; fi",
            ]
        return " && ".join(steps) + " &&"

    def _connect(self, host: int) -> None:
        # Jumbo frames, as on a cluster's network: their headers are under 1 % of the rate.
        port = f"port{host}"
        self._in_switch(
            f"ip link add {port} mtu 9000 type veth peer name {INTERFACE} mtu 9000 netns {self._pids[host]} && "
            f"ip link set {port} master bridge addrgenmode none && ip link set {port} up"
        )
        self._in_host(
            host,
            f"ip link set {INTERFACE} addrgenmode none && ip link set {INTERFACE} up && "
            f"ip address add {self.addresses[host]}/24 dev {INTERFACE}",
        )
        self.set_rate(host, self._rates[host])

    def _make_group(self, host: int) -> Path:
        root, version = _cpu_groups()
        group = root / f"{self._name}-{self.names[host]}"
        group.mkdir()
        self._groups_version = version
        self._limit(group, self._cpu[host])
        return group

    def _limit(self, group: Path, cpu: float | None) -> None:
        quota = -1 if cpu is None else int(cpu * CPU_PERIOD)
        if self._groups_version == 2:
            (group / "cpu.max").write_text(f"{'max' if cpu is None else quota} {CPU_PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(CPU_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        """End every process of the hosts and remove everything. Idempotent."""
        for holder in self._holders:
            assert holder.stdin is not None
            with contextlib.suppress(OSError):
                holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(5.0)
            except subprocess.TimeoutExpired:
                holder.kill()  # its child, the first process, is killed with it
                holder.wait()
            for pipe in (holder.stdout, holder.stderr):
                assert pipe is not None
                pipe.close()
        for job in self._jobs:  # their processes are dead; no zombies
            job.wait()
        self._holders, self._jobs = [], []
        for group in self._groups:
            if group is not None:
                _remove_group(group)
        self._groups = []
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- links and CPUs, while programs run -------------------------------------------------------------------------

    def set_rate(self, host: int, rate: str | None, direction: str = "both") -> None:
        """Shape the link of `host`.

        Args:
            rate: such as "300mbit"; None lifts the limit.
            direction: "out" of the host, "in" to it, or "both".
        """
        if direction not in ("both", "out", "in"):
            raise ValueError(f'direction must be "both", "out" or "in", got {direction!r}')
        speed = bits_per_second(rate)
        if speed is None:
            command = "tc qdisc del dev {device} root 2>/dev/null || true"
        else:
            # 5 ms of the rate: what passes at once after a pause is little, and a timer that is late costs nothing.
            burst = max(32_768, int(speed / 8 * 0.002))
            command = f"tc qdisc replace dev {{device}} root tbf rate {int(speed)}bit burst {burst}b latency 5ms"
        if direction in ("both", "out"):
            self._in_host(host, command.format(device=INTERFACE))
        if direction in ("both", "in"):
            self._in_switch(command.format(device=f"port{host}"))

    def cut(self, host: int) -> None:
        """Pull the cable of `host`: nothing is refused, packets are lost."""
        self._in_switch(f"ip link set port{host} down")

    def restore(self, host: int) -> None:
        """Put the cable back."""
        self._in_switch(f"ip link set port{host} up")

    def set_cpu(self, host: int, cpu: float | None) -> None:
        """Change the CPU limit of a host that was made with one."""
        group = self._groups[host]
        if group is None:
            raise ValueError(f"{self.names[host]} was made without a CPU limit; give one (as many as there are)")
        self._limit(group, cpu)

    # ---- programs ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Variables that programs on the hosts need to find the network."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start `command` on `host`, as leader of a process group of its own (see `stop`).

        Args:
            env: on top of this process's environment and `environment()`.
            cwd: default: this process's.
            popen: further arguments of subprocess.Popen.
        """
        wrapped = [*self._enter(host), "--", "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or Path.cwd()), *command]
        process: subprocess.Popen[Any] = subprocess.Popen(
            wrapped, env={**os.environ, **self.environment(), **(env or {})}, start_new_session=True, **popen
        )
        self._jobs.append(process)
        return process

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on `host` to its end; stdout and stderr are captured as text.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds and was killed.
            subprocess.CalledProcessError: with `check`, if it failed.
        """
        process = self.start(
            host, command, env, cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            stop(process, signal.SIGKILL)
            raise
        finally:
            self._jobs.remove(process)
        result = subprocess.CompletedProcess(list(command), process.returncode, out, err)
        if check:
            result.check_returncode()
        return result

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        master_port: int = 29500,
        capture: bool = False,
    ) -> Job:
        """Start the ranks of one job, `slots` on every host, without ssh: RANK, WORLD_SIZE, MASTER_ADDR ... are set.

        Args:
            command: the program and its arguments, such as [sys.executable, "train.py"].
            capture: output of every rank into a file (`Job.output`) instead of this process's own.
        """
        where = [(host, local) for host in range(len(self)) for local in range(self.slots[host])]
        processes, logs = [], []
        for rank, (host, local) in enumerate(where):
            ranks = {
                "RANK": rank,
                "WORLD_SIZE": len(where),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": self.slots[host],
                "LOCAL_SIZE": self.slots[host],
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": master_port,
            }
            with contextlib.ExitStack() as stack:
                output: IO[bytes] | None = None
                if capture:
                    logs.append(Path(tempfile.mkstemp(prefix=f"rank{rank}-", dir=self.folder)[1]))
                    output = stack.enter_context(logs[-1].open("wb"))
                variables = {**{key: str(value) for key, value in ranks.items()}, **(env or {})}
                processes.append(
                    self.start(host, command, variables, cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                )
        return Job(processes, logs)

    def hostfile(self) -> Path:
        """A DeepSpeed hostfile of the cluster."""
        path = self.folder / "hostfile"
        lines = [f"{name} slots={slots}\n" for name, slots in zip(self.names, self.slots, strict=True)]
        path.write_text("".join(lines))
        return path

    def deepspeed(
        self,
        arguments: Sequence[str],
        launcher: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start DeepSpeed's launcher on host 0, which starts the ranks of all hosts through pdsh and ssh.

        Args:
            arguments: script and its arguments.
            launcher: further options of the launcher.
            env: variables for the ranks. DeepSpeed sends few by itself, hence a file of them (DS_ENV_FILE).
            popen: further arguments of subprocess.Popen.
        """
        if not self._ssh:
            raise ValueError("this cluster was made with ssh=False")
        # A login by ssh starts from an empty environment: the interpreter's tools (ninja) are on PATH only.
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        variables = {**inherited, "PATH": tools, **self.environment(), **(env or {})}
        file = self.folder / "deepspeed_env"
        file.write_text("\n".join(f"{name}={value}" for name, value in variables.items()))
        options = ["--hostfile", str(self.hostfile())]
        options += ["--ssh_port", str(self.ssh_port)] if self.ssh_port != 22 else []
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *options, *launcher, *arguments]
        return self.start(0, command, {**variables, "DS_ENV_FILE": str(file)}, cwd, **popen)

    # ---- details ----------------------------------------------------------------------------------------------------

    def _enter(self, host: int) -> list[str]:
        """The command line that puts what follows `--` onto `host`."""
        group, cpus = self._groups[host], self._pin[host]
        join = [] if group is None else ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs")]
        bind = [] if cpus is None else ["taskset", "-c", ",".join(map(str, cpus))]
        return [*join, *bind, "nsenter", "-t", str(self._pids[host]), "-m", "-u", "-i", "-n", "-p"]

    def _in_host(self, host: int, script: str) -> None:
        self._configure(self._pids[host], script)

    def _in_switch(self, script: str) -> None:
        self._configure(self._switch, script)

    def _configure(self, pid: int, script: str) -> None:
        result = subprocess.run(
            ["nsenter", "-t", str(pid), "-n", "sh", "-c", script], capture_output=True, text=True, timeout=START_SECONDS
        )
        if result.returncode != 0:
            raise ClusterError(f"{script}: {_last_line(result.stderr)}")

    def _write_ssh_files(self) -> None:
        for key in ("host_key", "user_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", NAME, "-f", str(self.folder / key)]
            subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
        public = (self.folder / "host_key.pub").read_text().strip()
        places = [*self.names, *self.addresses]
        places = places if self.ssh_port == 22 else [f"[{place}]:{self.ssh_port}" for place in places]
        files = {
            "authorized_keys": (self.folder / "user_key.pub").read_text(),
            "known_hosts": "".join(f"{place} {public}\n" for place in places),
            "shadow": "root:*:19000:0:99999:7:::\n",
            "ssh_config": f"IdentityFile {self.folder}/user_key\nUserKnownHostsFile {self.folder}/known_hosts\n"
            "GlobalKnownHostsFile none\nBatchMode yes\n",
            "sshd_config": f"Port {self.ssh_port}\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\nMaxStartups 100\n",
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def _start_sshd(self, host: int) -> None:
        sshd = _which("sshd")
        assert sshd is not None, "checked before"
        with (self.folder / f"{self.names[host]}.sshd.log").open("wb") as log:
            self.start(
                host,
                [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for_sshd(self) -> None:
        waiting = {name: self.folder / f"{name}.sshd.log" for name in self.names}
        deadline = time.monotonic() + START_SECONDS
        while waiting:
            waiting = {name: log for name, log in waiting.items() if "Server listening" not in log.read_text()}
            if waiting and time.monotonic() > deadline:
                raise ClusterError("; ".join(f"sshd on {name}: {log.read_text()}" for name, log in waiting.items()))
            time.sleep(0.02)


_INHERITED = ("TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS", "PYTHONPATH")


class Job:
    """The ranks of one `launch`, in rank order."""

    def __init__(self, processes: list[subprocess.Popen[Any]], logs: list[Path]) -> None:
        self.processes = processes
        self._logs = logs

    def wait(self, timeout: float, grace: float = 10.0, poll: Callable[[], None] | None = None) -> list[int]:
        """Exit codes of all ranks. `grace` seconds after one has failed the others are killed, as launchers do.

        Args:
            poll: called a few times per second meanwhile.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds; all are killed.
        """
        deadline = time.monotonic() + timeout
        failed = False
        while any(process.poll() is None for process in self.processes):
            if poll is not None:
                poll()
            if not failed and any(process.poll() for process in self.processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self.kill()
                if not failed:
                    raise subprocess.TimeoutExpired(self.processes[0].args, timeout)
            time.sleep(0.02)
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            stop(process, signal.SIGKILL)

    def output(self, rank: int) -> str:
        """What a rank has written so far (`capture`)."""
        return self._logs[rank].read_text(errors="replace")


def stop(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> None:
    """Send a signal to a process of `Cluster.start` and its group (the process itself is a child of what Popen has)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def bits_per_second(rate: str | None) -> float | None:
    """`rate` ("300mbit", "1.5gbit") as a number.

    Raises:
        ValueError: something else.
    """
    if rate is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or not float(match[1]) > 0:
        raise ValueError(f'a rate is a number with kbit, mbit or gbit, such as "300mbit", got {rate!r}')
    return float(match[1]) * _UNITS[match[2]]


def make_folder() -> Path:
    """A new temporary folder, which `remove_remains` removes if this process does not live to do so."""
    name = f"{NAME}-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700)
    return folder


def remove_remains() -> None:
    """Remove what clusters left behind whose owner is gone."""
    pattern = re.compile(rf"{NAME}-(\d+)-(\d+)-\d+(-host\d+)?")
    for kind, path in _remains():
        match = pattern.fullmatch(path.name)
        if match and _start_time(int(match[1])) != int(match[2]):
            if kind == "group":
                _remove_group(path)
                continue
            with contextlib.suppress(FileNotFoundError):  # another cluster that starts now was quicker
                if path.stat().st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)


def _remains() -> Iterator[tuple[str, Path]]:
    for path in Path(tempfile.gettempdir()).glob(f"{NAME}-*"):
        yield "folder", path
    with contextlib.suppress(ClusterError):
        for path in _cpu_groups()[0].glob(f"{NAME}-*"):
            yield "group", path


def _remove_group(group: Path) -> None:
    """Remove a CPU group whose processes are ending."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # the next cluster tries again
            time.sleep(0.02)


def _cpu_groups() -> tuple[Path, int]:
    """Where CPU groups are made, and the version of the interface (1: cfs_quota_us, 2: cpu.max)."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        root = Path(folder)
        if kind == "cgroup" and "cpu" in options.split(",") and (root / "cpu.cfs_quota_us").exists():
            return root, 1
        if kind == "cgroup" and "cpu" in options.split(",") and os.access(root, os.W_OK):
            return root, 1
        if kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split():
            control = root / "cgroup.subtree_control"
            try:
                if "cpu" not in control.read_text().split():
                    control.write_text("+cpu")
            except OSError as error:
                raise ClusterError(f"CPU limits are not available: {control}: {error}") from error
            return root, 2
    raise ClusterError("CPU limits are not available: no cgroup with the cpu controller is mounted")


def _per_host(name: str, value: Any, hosts: int) -> list[Any]:
    if value is None or isinstance(value, (str, int, float)):
        return [value] * hosts
    values = list(value)
    if len(values) != hosts:
        raise ValueError(f"{name} needs one value for all or one per host: {hosts} hosts, {len(values)} values")
    return values


def _start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None if there is none. Tells a number used twice."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin:/sbin")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


# ---- command --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a command on every host of a new cluster; the largest exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Run a command on every host of a cluster in a box (docs/cluster-in-a-box.md).",
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", nargs="+", help='link of every host, such as "300mbit": one for all, or one each')
    parser.add_argument("--cpu", nargs="+", type=float, help="CPUs that each host may use: one for all, or one each")
    parser.add_argument("--pin", action="store_true", help="bind host i to CPU i")
    parser.add_argument("--slots", nargs="+", type=int, default=[1], help="ranks per host: one for all, or one each")
    parser.add_argument("--ssh-port", type=int, default=22)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deepspeed", action="store_true", help="COMMAND goes to the deepspeed launcher on host 0")
    how.add_argument("--on-first", action="store_true", help="run COMMAND on host 0 only")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args()

    def spread(values: list[Any] | None) -> Any:
        return values[0] if values and len(values) == 1 else values

    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(128 + signal.SIGTERM))
    ssh = args.deepspeed or why_not() is None
    try:
        cluster = Cluster(
            args.hosts, spread(args.rate), spread(args.cpu), args.pin, spread(args.slots), ssh, args.ssh_port
        )
    except (ClusterError, ValueError) as error:
        parser.error(str(error))
    with cluster:
        try:
            if args.deepspeed:
                return cluster.deepspeed(args.command).wait()
            if args.on_first:
                return cluster.start(0, args.command).wait()
            job = cluster.launch(args.command)
            return max(abs(code) for code in job.wait(timeout=float("inf")))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
