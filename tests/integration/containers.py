"""The image of docker/, really built and run without a container engine.

`Image` builds it with buildah, on a base that mmdebstrap makes from this machine's own distribution. `Container` runs
it on a host of the cluster in a box: a file system of its own above the image's, its own /proc, /sys and /dev/shm, and
only the image's variables, user and working directory; network, names and processes are those of the host. What Docker
would refuse (system calls, devices) is not refused here.

Everything is mounted in namespaces that end with their processes, and kept in one temporary folder, which the next
cluster removes if this process could not.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster as box
from benchmarks.cluster import Cluster

ROOT = Path(__file__).parents[2]
APT = Path("/etc/apt")
# mmdebstrap makes the same system as debootstrap --variant=minbase in half the time, and goes by this machine's apt.
TOOLS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "setpriv": "util-linux"}
BUILD_SECONDS = 600.0
# As the official Debian images are made.
_SLIM = ["force-unsafe-io", *(f"path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info"))]


def why_not() -> str | None:
    """Why this machine cannot build and run the image (one line), or None if it can."""
    reason = box.why_not(ssh=False)
    if reason is not None:
        return reason
    missing = sorted(package for tool, package in TOOLS.items() if shutil.which(tool) is None)
    if missing:
        return f"needs {', '.join(missing)} (apt-get install {' '.join(missing)})"
    if not _apt_sources():
        return "needs apt's sources of a Debian or Ubuntu, from which the base is made"
    return None


class Image:
    """Builds the image; a context manager.

    Attributes:
        config: what the Dockerfile says about containers (Docker's names: Env, User, Entrypoint, Healthcheck ...).
        folder: holds everything.

    Raises:
        subprocess.CalledProcessError: it cannot be built; `output` has what was said.
    """

    def __init__(self, extras: str = "") -> None:
        box.remove_remains()
        self.folder = box.make_folder()
        (self.folder / "tmp").mkdir()
        self._tool = ["buildah", "--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        try:
            self._make_base()
            self.log = self._build(extras)
            described = json.loads(self._alone([*self._tool, "inspect", "--type", "image", "image"]))
        except BaseException:
            self.close()
            raise
        self.config: dict[str, Any] = described["Docker"]["config"]

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. The clusters whose hosts run it must be closed before."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def mount_command(self) -> str:
        """A shell command that mounts a new container's file system where it runs, and prints where that is."""
        tool = shlex.join(self._tool)
        return f"{tool} mount $({tool} from --pull-never image)"

    def _alone(self, command: Sequence[str]) -> str:
        """Run with mounts and processes of its own, which end with this process at the latest. Returns output."""
        alone = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--mount-proc",
            "--kill-child",
            "--fork",
        ]
        result = subprocess.run(
            [*alone, *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self.folder / "tmp")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
        )
        if result.returncode != 0:
            raise subprocess.CalledProcessError(
                result.returncode, command, result.stdout[-6000:] + result.stderr[-6000:]
            )
        return result.stdout

    def _make_base(self) -> None:
        tool = shlex.join(self._tool)
        options = [f"--aptopt={setting}" for setting in _apt_settings()] + [f"--dpkgopt={option}" for option in _SLIM]
        make = shlex.join(["mmdebstrap", "--variant=apt", *options, _release()])
        self._alone(
            [
                *("sh", "-ec"),
                f'container=$({tool} from scratch); {make} "$({tool} mount $container)" {shlex.join(_apt_sources())}; '
                f"{tool} commit --rm $container base",
            ]
        )

    def _build(self, extras: str) -> str:
        settings, volumes = _pip_settings()
        (self.folder / "pip.conf").write_text(settings)
        return self._alone(
            [
                *self._tool,
                *(
                    "bud",
                    "--isolation",
                    "chroot",
                    "--format",
                    "docker",
                    "--tag",
                    "image",
                    "--file",
                    "docker/Dockerfile",
                ),
                *("--build-arg", "BASE=localhost/base", "--build-arg", f"EXTRAS={extras}"),
                *("--secret", f"id=pip.conf,src={self.folder}/pip.conf"),
                *(word for outside, inside in volumes.items() for word in ("--volume", f"{outside}:{inside}:ro")),
                ".",
            ]
        )


class Container:
    """A container of `image` on a host of `cluster`, ended by the end of the cluster.

    Attributes:
        root: its root folder, as the host sees it.
    """

    def __init__(
        self,
        image: Image,
        cluster: Cluster,
        host: int,
        volumes: Mapping[Path, str] | None = None,
        shared_memory: str = "64m",
        variables: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            volumes: folders of this machine, and where the container finds them.
            shared_memory: size of /dev/shm; Docker's default.
            variables: on top of the image's.
            names: further hosts: name, address.
        """
        self._cluster, self._host = cluster, host
        self._config = image.config
        self._variables = {**dict(entry.split("=", 1) for entry in image.config["Env"]), **(variables or {})}
        hosts = image.folder / f"{cluster.folder.name}.{host}.hosts"
        known = dict(zip(cluster.names, cluster.addresses, strict=True)) | dict(names or {})
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in known.items()))
        steps = [
            f"root=$({image.mount_command()})",
            'mount -t proc proc "$root/proc"',
            'mount -t sysfs -o ro sysfs "$root/sys"',
            'mount --rbind /dev "$root/dev"',
            f'mount -t tmpfs -o size={shared_memory},mode=1777 tmpfs "$root/dev/shm"',
            f'mount --bind {shlex.quote(str(hosts))} "$root/etc/hosts"',
        ]
        for outside, inside in (volumes or {}).items():
            steps += [f'mkdir -p "$root{inside}"', f'mount --bind {shlex.quote(str(outside))} "$root{inside}"']
        steps += ['echo "$root"', f'chroot "$root" getent passwd {self._config["User"]} | cut -d : -f 6']
        self.root, self._home = cluster.run(host, ["sh", "-ec", "\n".join(steps)], check=True).stdout.split()[-2:]

    def start(self, command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """The container's process: `command` under the entry point (`docker run`)."""
        return self.execute([*self._config["Entrypoint"], *command], **popen)

    def execute(self, command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """A further process (`docker exec`)."""
        return self._cluster.start(self._host, self._enter(command), **{"stdin": subprocess.DEVNULL, **popen})

    def run(self, command: Sequence[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """`execute` to its end."""
        return self._cluster.run(self._host, self._enter(command), timeout=timeout)

    def healthy(self) -> bool:
        """What the image's health check says."""
        kind, *check = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(check).returncode == 0

    def _enter(self, command: Sequence[str]) -> list[str]:
        user = self._config["User"]
        variables = {"HOME": self._home, **self._variables}
        return [
            *("chroot", f"--userspec={user}", self.root, "env", "-i", f"--chdir={self._config['WorkingDir']}"),
            *(f"{name}={value}" for name, value in variables.items()),
            *command,
        ]


# ---- how this machine reaches its packages --------------------------------------------------------------------------


def _release() -> str:
    return dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line).get(
        "VERSION_CODENAME", "stable"
    )


def _apt_sources() -> list[str]:
    """Those of the distribution itself: the others may need packages or keys that the base does not have."""
    files = [APT / "sources.list", *sorted((APT / "sources.list.d").glob("*.sources"))]
    files += sorted((APT / "sources.list.d").glob("*.list"))
    suites = re.compile(rf"^(deb .*|Suites:.*)\b{_release()}\b", re.MULTILINE)
    texts = {path: path.read_text() for path in files if path.is_file()}
    return [str(path) for path, text in texts.items() if suites.search(text) and re.search(r"\bmain\b", text)]


def _apt_settings() -> list[str]:
    """Proxies, time limits, certificates ... of this machine's apt."""
    lines = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
    wanted = re.compile(r'Acquire::(https?|ftp|Retries|Check-|ForceIPv|Languages)[\w:.-]* ".+";')
    return [line.rstrip(";") for line in lines.splitlines() if wanted.fullmatch(line)]


def _pip_settings() -> tuple[str, dict[str, str]]:
    """What this machine's pip goes by, as one pip.conf, and the files and folders that it names: outside, inside.

    All keep their place but the certificates: where the image installs its own nothing may be mounted.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = [line.partition("=") for line in listed.splitlines()]
    found.sort(key=lambda part: part[0].startswith(":env:"))  # variables win
    values = {
        name.rpartition(".")[2]: str(ast.literal_eval(value))
        for name, _, value in found
        if name.startswith(("global.", "install.", ":env:."))
    }
    values.pop("cache-dir", None)
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        if variable in os.environ:
            values.setdefault("cert", os.environ[variable])
    volumes: dict[str, str] = {}
    if "cert" in values:
        volumes[values["cert"]] = "/run/build-certificates.pem"
    for word in " ".join(value for key, value in values.items() if key != "cert").split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index of its own has its files beside it.
            path = path.parent if word.startswith("file://") else path
            volumes[str(path)] = str(path)
    values["cert"] = volumes.get(values.get("cert", ""), "")
    return "[global]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in values.items()), volumes
