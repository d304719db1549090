"""Which processes make a job and on which hosts: launchers, network addresses, the check at start, `doctor`.

Imports neither megatron-core nor DeepSpeed (`measure` imports torch), so that a host on which those are broken can
still say so.
"""
