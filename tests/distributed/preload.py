"""Imported by the server that the ranks are forks of: what each of them would ask an interpreter of its own for."""

import cpuinfo

from megatron_acco.ops import ask_cpu_info_once

ask_cpu_info_once()
cpuinfo.get_cpu_info()
