"""The scripts of docker/ without an image: what they refuse, and what `docker stop` does.

The entry point runs with processes, mounts and a /proc of its own, as in a container: it looks for ranks in all of it.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
REASON = cluster.why_not(ssh=False)
SSH_REASON = cluster.why_not()

needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no namespaces on this machine: {REASON}")
needs_ssh = pytest.mark.skipif(SSH_REASON is not None, reason=f"no namespaces or no ssh on this machine: {SSH_REASON}")

# As launchers do: has a rank, does not pass signals on, ends as the rank did.
LAUNCHER = """
import os, subprocess, sys
rank = subprocess.run([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": "0"})
sys.exit(rank.returncode)
"""
RANK = """
import signal, sys, time
from pathlib import Path
def save(*unused):
    time.sleep(0.5)  # longer than a launcher takes to die of the signal
    Path(sys.argv[1]).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


# Never without: the entry point would stop the ranks of other tests.
ALONE = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
ENTRY_POINT = [*ALONE, "sh", "-c", 'mount -t tmpfs tmpfs /run && exec bash "$0" "$@"', str(DOCKER / "entrypoint.sh")]


def environment(folder: Path) -> dict[str, str]:
    """HOME and keys in `folder`."""
    (folder / "home").mkdir(exist_ok=True)
    return {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "SSH_KEYS": str(folder / "ssh")}


def entry_point(
    folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The entry point with `command`."""
    return subprocess.Popen(
        [*ENTRY_POINT, *command],
        env={**environment(folder), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(process: subprocess.Popen[Any]) -> tuple[str, int]:
    """Output and exit code."""
    try:
        return process.communicate(timeout=30)[0], process.returncode
    finally:
        process.kill()  # and with it the others


def stop(process: subprocess.Popen[Any]) -> None:
    """`docker stop`: a signal to the container's first process, which is the child of `unshare`."""
    [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), 15)


@needs_namespaces
def test_a_stopped_container_ends_when_its_ranks_have_saved_and_with_the_code_of_the_command(tmp_path: Path) -> None:
    process = entry_point(tmp_path, [sys.executable, "-c", LAUNCHER, RANK, str(tmp_path / "saved")])
    assert process.stdout is not None
    while "ready" not in (line := process.stdout.readline()):
        assert line
    stop(process)
    output, code = end_of(process)
    assert code == 75 and (tmp_path / "saved").exists(), output


@needs_namespaces
def test_a_command_without_ranks_is_stopped_itself_and_its_words_and_code_are_kept(tmp_path: Path) -> None:
    process = entry_point(tmp_path, ["sh", "-c", 'trap "exit 3" TERM; echo "$0"; sleep 60 & wait', "a  b *"])
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "a  b *\n":
        assert line
    stop(process)
    assert end_of(process)[1] == 3


INTERRUPTED = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # a SIGTERM besides would end it here
    raise SystemExit(4)
"""


@needs_namespaces
def test_an_interrupt_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(ENTRY_POINT[0], [*ENTRY_POINT, sys.executable, "-c", INTERRUPTED], variables)
    output = b""
    with contextlib.suppress(OSError):  # its end
        while text := os.read(terminal, 1000):
            output += text
            if b"ready" in text:
                os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4, output
    os.close(terminal)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "ssh"
    folder.mkdir()
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_cluster")]
    subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "id_cluster.pub", folder / "authorized_keys")
    return folder


@needs_ssh
def test_keys_that_no_login_could_use_are_refused(tmp_path: Path, keys: Path) -> None:
    protect = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(keys / "id_cluster")]
    subprocess.run(protect, check=True, stdin=subprocess.DEVNULL)
    output, code = end_of(entry_point(tmp_path, ["with-sshd", "true"]))
    assert code == 1 and "id_cluster is not a private key, or one with a passphrase" in output
    (keys / "authorized_keys").write_text("ssh-ed25519 AAAA\n")
    output, code = end_of(entry_point(tmp_path, ["with-sshd", "true"]))
    assert code == 1 and f"no public key in {keys}/authorized_keys" in output
    assert not (tmp_path / "home/.sshd/ready").exists()


@needs_ssh
def test_the_sshd_of_another_container_at_the_port_is_not_taken_for_the_own_one(tmp_path: Path, keys: Path) -> None:
    """As with --network host. And every private key is offered, whatever its name."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as other:

        def greet() -> None:
            while True:
                try:
                    other.accept()[0].sendall(b"SSH-2.0-other\r\n")
                except OSError:
                    return

        threading.Thread(target=greet, daemon=True).start()
        port = str(other.getsockname()[1])
        output, code = end_of(entry_point(tmp_path, ["with-sshd", "echo", "started"], {"SSH_PORT": port}))
        assert code == 1 and f"sshd does not listen on port {port}" in output and "started" not in output
        other.shutdown(socket.SHUT_RDWR)
    output, code = end_of(entry_point(tmp_path, ["with-sshd", "echo", "started"], {"SSH_PORT": port}))
    assert code == 0 and output.endswith("started\n")
    assert "IdentityFile ~/.ssh/id_cluster\n" in (tmp_path / "home/.ssh/config").read_text()


def test_extras_come_from_this_checkout_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    for path in (DOCKER / "install.sh", ROOT / "pyproject.toml", ROOT / "constraints.txt"):
        shutil.copy(path, tmp_path)
    # Ends the script where it would make the environment.
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] || exit 9\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def install(extras: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path / "venv")}
        command = ["bash", str(tmp_path / "install.sh"), extras]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)

    wrong = install("data,hff")
    assert wrong.returncode == 1 and "there is no extra 'hff'; EXTRAS takes test, plot" in wrong.stderr
    assert install("test, data").returncode == 9
    wanted = (tmp_path / "requirements.txt").read_text()
    assert re.search("^pyarrow", wanted, re.M) and re.search("^pytest", wanted, re.M)
    assert "megatron-acco" not in wanted
