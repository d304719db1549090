"""Checkpoints at update boundaries: what is stored, how it gets onto the disk whole, how it is found again.

state.py      what a checkpoint holds besides DeepSpeed's own state, and what it is compared by
store.py      the --save folder: staging, manifest, publishing by rename, `latest`, retention (no processes)
writer.py     one rank's files: checksum and fsync while writing, or a snapshot and a writer thread
search.py     the checkpoint that --load means: checks, fall-back to an older whole one, agreement of the ranks
weights.py    the weights alone, whole: for evaluation, export and the start of another run
saving.py     Checkpointer: the collective half of save and load
"""

from __future__ import annotations

from megatron_acco.training.checkpoint.saving import Checkpointer, Saved, SaveError
from megatron_acco.training.checkpoint.search import Found, Reader, Refused, Search, agree, find_checkpoint
from megatron_acco.training.checkpoint.state import (
    PADDED_VOCABULARY,
    CheckpointOptions,
    Identity,
    TrainState,
    describe_schedule,
    random_state,
    refuse_other_writers,
    set_random_state,
)
from megatron_acco.training.checkpoint.store import lock_folder

__all__ = [
    "PADDED_VOCABULARY",
    "CheckpointOptions",
    "Checkpointer",
    "Found",
    "Identity",
    "Reader",
    "Refused",
    "SaveError",
    "Saved",
    "Search",
    "TrainState",
    "agree",
    "describe_schedule",
    "find_checkpoint",
    "lock_folder",
    "random_state",
    "refuse_other_writers",
    "set_random_state",
]
