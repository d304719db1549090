"""DeepSpeed's launchers over ssh and MPI, with words and values that arrive as they were given.

DeepSpeed 0.19 puts arguments with `"`, `'`, `$`, `;` or `%` bare into a command line that pdsh and the shells of the
hosts read once more, and gives Open MPI, which reads nothing, values in quotes.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from deepspeed.launcher.multinode_runner import OpenMPIRunner, PDSHRunner

from megatron_acco.cli.launch import is_secret


def _own(name: str, value: str) -> bool:
    """Whether a value is that of this process. The other source is `.deepspeed_env`, whose $PATH the hosts expand."""
    return os.environ.get(name) == value


class PlainPDSHRunner(PDSHRunner):
    """Everything that reaches a host passes through pdsh, which reads %h, %n and %u, and through a shell."""

    def __init__(self, args: Any, world_info_base64: str) -> None:
        super().__init__(args, world_info_base64)
        self.user_script = _quoted(args.user_script)

    def parse_user_args(self) -> list[str]:
        """Replaces the base's, which quotes words with a space only, and in a way that lets the shell read them."""
        return [_quoted(word) for word in self.args.user_args]

    def add_export(self, key: str, var: str) -> None:
        """Replaces the base's double quotes for values of this process; sends no secret of it."""
        if not _own(key, var):
            super().add_export(key, var)
            self.exports[key.strip()] = self.exports[key.strip()].replace("%", "%%")
        elif not is_secret(key):
            self.exports[key] = _quoted(var)

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> tuple[list[str], list[str], Any]:
        """As the base's, with the folder and the interpreter quoted."""
        command, kill, environment = super().get_cmd(environment, active_resources)
        here = os.path.abspath(".")
        bare = {f"cd {here};": f"cd {_quoted(here)};", sys.executable: _quoted(sys.executable)}
        return [bare.get(word, word) for word in command], kill, environment


class PlainOpenMPIRunner(OpenMPIRunner):
    """mpirun is started without a shell and quotes for the hosts itself."""

    def add_export(self, key: str, var: str) -> None:
        """Replaces the base's quotes, which would become a part of the value; sends no secret of this process."""
        if not (_own(key, var) and is_secret(key)):
            self.exports[key.strip()] = var if _own(key, var) else var.strip()


def _quoted(word: str) -> str:
    return shlex.quote(word).replace("%", "%%")
