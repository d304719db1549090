"""Which processes make a job and on which hosts: launchers, network addresses, the check at start, `doctor`.

Imports neither megatron-core nor DeepSpeed, and torch only in `meeting`, `measure` and `examination`, so that a host on
which those are broken can still say so.
"""
