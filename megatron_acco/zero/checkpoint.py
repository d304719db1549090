"""Saving and loading: the half of AccoEngine that meets DeepSpeedEngine's checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from megatron_acco.config import NODE, AccoConfig
from megatron_acco.zero import shards

ACCO_GROUPS = "acco_groups"


class CheckpointEngine(DeepSpeedEngine):
    """DeepSpeedEngine with an AccoZeroOptimizer: its checkpoints hold theta_t, and are loaded whole or not at all."""

    acco: AccoConfig
    loaded_checkpoint_dp_world_size: int
    _shard: Any = None

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the base; the module file holds theta_t. Collective over all ranks.

        Raises:
            RuntimeError: in the middle of an update, whose gradients no checkpoint holds.
        """
        if self.optimizer.micro_batches_in_update:
            raise RuntimeError(
                f"save_checkpoint in the middle of an update ({self.optimizer.micro_batches_in_update} of "
                f"{self.gradient_accumulation_steps()} micro-batches accumulated); call it after the step() that "
                f"ends an update"
            )
        with self.optimizer.real_parameters():
            return super().save_checkpoint(*args, **kwargs)

    def _common_checkpoint_state(self, module_state_dict: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the base, which in stage 1 leaves frozen weights out of what zero_to_fp32 reads."""
        state: dict[str, Any] = super()._common_checkpoint_state(module_state_dict, *args, **kwargs)
        frozen = {
            name: module_state_dict[name]  # the same tensors: torch.save writes them once
            for name, tensor in self._untrained().items()
            if isinstance(tensor, torch.nn.Parameter) and name in module_state_dict
        }
        shapes = {name: tensor.shape for name, tensor in frozen.items()}
        # The ranks among which the optimizer state is cut, which is what all readers take it for.
        parts, levels = dist.get_world_size(self.optimizer.dp_process_group), self.optimizer.levels
        state |= {"frozen_param_shapes": shapes, "frozen_param_fragments": frozen, "dp_world_size": parts}
        # Groups of which there are files: on hosts that keep their own, each has those of the first.
        apart = levels is not None and not self.use_node_local_storage()
        return {**state, ACCO_GROUPS: len(levels.groups) if apart else 1}

    def _configure_checkpointing(self) -> None:
        """As the base, which knows by its numbers which ranks are of the first group that holds all shards.

        Raises:
            ValueError: groups of ranks that are no hosts, and hosts that keep their own files.
        """
        super()._configure_checkpointing()
        levels = getattr(self.optimizer, "levels", None)
        if levels is None:
            return
        if self.use_node_local_storage() and self.acco.estimate_group != NODE:
            raise ValueError(
                f'"checkpoint.use_node_local_storage" needs all optimizer files of a group on one host: give '
                f'"acco.estimate_group": "{NODE}" instead of {self.acco.estimate_group}'
            )
        self.save_zero_checkpoint = levels.index == 0 or self.use_node_local_storage()

    def _save_checkpoint(self, save_dir: str, tag: str, *args: Any, **kwargs: Any) -> None:
        """As the base; groups of ranks whose shards another one saves add the estimate that only they have."""
        super()._save_checkpoint(save_dir, tag, *args, **kwargs)
        if not self.save_zero_checkpoint:
            state = {shards.EXTRAS_KEY: self.optimizer.shown_state()}
            self.checkpoint_engine.save(state, self._group_file(save_dir, tag))

    def _group_file(self, folder: str, tag: str) -> str:
        """Of this rank, beside DeepSpeed's files."""
        levels, rank = self.optimizer.levels, dist.get_rank(self.optimizer.dp_process_group)
        name = f"acco_group_{levels.index}_rank_{rank}_mp_rank_{self.checkpoint_mp_rank:02d}_estimate.pt"
        return str(Path(folder) / str(tag) / name)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the base; then compute is shown what it was shown at the save (theta~ and its kin), else theta.

        The checkpoint may be of ACCO or of plain ZeRO, of this or another number of data-parallel ranks, or (with
        `checkpoint.load_universal`) in DeepSpeed's universal form. Gradients accumulated before the call are forgotten.

        Raises:
            ValueError: on all ranks and with the training as it was, if files are missing or damaged, or are of another
                model or tensor-parallel size.
        """
        result = super().load_checkpoint(*args, **kwargs)
        if result[0] is None:
            self.optimizer.abandon()
        # DeepSpeed keeps the micro-batches of an update that was begun before the load.
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self.optimizer.restore(self.global_steps, loaded=result[0] is not None)
        return result

    def _load_checkpoint(self, load_dir: str, tag: str, *args: Any, **kwargs: Any) -> Any:
        """As the base, after everything that it will need has been found and read, or refused, on all ranks."""
        universal = self.load_universal_checkpoint()
        header = shards.on_all_ranks(lambda: self._read_header(load_dir, tag))
        if universal:
            shards.on_all_ranks(lambda: self._check_universal(load_dir, tag, header["module"]))
        elif kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False):
            self._shard = self._read_shard(load_dir, tag, header["dp_world_size"], header.get(ACCO_GROUPS, 1))
        self.optimizer.abandon()
        result = super()._load_checkpoint(load_dir, tag, *args, **kwargs)
        if universal:
            self._load_untrained(header["module"])
        return result

    def _read_header(self, load_dir: str, tag: str) -> Any:
        name = self._get_ckpt_name(load_dir, tag)
        if self.load_universal_checkpoint():  # of any tensor-parallel size: as the base chooses
            names = self._get_all_ckpt_names(load_dir, tag)
            name = names[self.checkpoint_mp_rank * len(names) // self.mp_world_size] if names else name
        header = shards.load(name, mapped=True)
        saved, mine = header["mp_world_size"], self.mp_world_size
        if saved != mine and not self.load_universal_checkpoint():
            raise ValueError(
                f"the checkpoint {load_dir}/{tag} has {saved} tensor-parallel parts, this run has {mine}; convert it "
                f'with DeepSpeed\'s ds_to_universal and load the result with "checkpoint": {{"load_universal": true}}'
            )
        return header

    def _read_shard(self, load_dir: str, tag: str, saved_ranks: int, saved_groups: int) -> Any:
        """This rank's optimizer state, cut anew unless every rank finds it in its own layout. Collective.

        Args:
            saved_ranks: ranks of a group, among which the state was cut.
            saved_groups: groups that saved an estimate; further ones take the first group's.
        """
        layout, rank = shards.layout_of(self.optimizer), dist.get_rank(group=self.optimizer.dp_process_group)
        own_name = self.bfloat16_enabled()

        def files(ranks: Sequence[int]) -> list[str]:
            return shards.existing_files(
                [
                    [self._get_rank_zero_ckpt_name(load_dir, tag, self.checkpoint_mp_rank, r, bf16) for r in ranks]
                    for bf16 in (own_name, not own_name)
                ]
            )

        def own() -> Any:
            if saved_ranks != dist.get_world_size(group=self.optimizer.dp_process_group):
                return None
            state = shards.load(files([rank])[0], mapped=False)[shards.OPTIMIZER_STATE_DICT]
            levels = self.optimizer.levels
            if levels is None or not 0 < levels.index < saved_groups:
                return state
            return {**state, **shards.load(self._group_file(load_dir, tag), mapped=False)}

        def all_cut() -> Any:
            every = (shards.load(name, mapped=True)[shards.OPTIMIZER_STATE_DICT] for name in files(range(saved_ranks)))
            return shards.cut(every, layout, self.optimizer.optimizer.state_dict()["param_groups"])

        shard = shards.on_all_ranks(own)
        if not self.optimizer.agree(shard is not None and shards.fits(shard, layout)):
            log_dist(f"cutting the optimizer state of {saved_ranks} data-parallel ranks to this run's partitions", [0])
            shard = shards.on_all_ranks(all_cut)
        shards.on_all_ranks(lambda: self.optimizer.check_saved(shard))
        return shard

    def _get_all_zero_checkpoints(self, load_dir: str, tag: str) -> Any:
        """As the base, which reads them here; only this rank's entry is used."""
        ranks = dist.get_world_size(group=self.optimizer.dp_process_group)
        shard, self._shard = self._shard, None
        return [shard] * ranks

    def _load_zero_checkpoint(self, load_dir: str, tag: str, load_optimizer_states: bool = True) -> Any:
        """As the base, which refuses another number of ranks; the state that was read has this run's layout."""
        saved = self.loaded_checkpoint_dp_world_size
        self.loaded_checkpoint_dp_world_size = self.seq_dp_world_size
        try:
            return super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        finally:
            self.loaded_checkpoint_dp_world_size = saved

    def _check_universal(self, load_dir: str, tag: str, saved: Mapping[str, torch.Tensor]) -> None:
        shards.check_universal(Path(load_dir) / tag / "zero", shards.layout_of(self.optimizer))
        for name, tensor in self._untrained().items():
            if name in saved and saved[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} is not trained and has the shape {tuple(saved[name].shape)} in the checkpoint, "
                    f"{tuple(tensor.shape)} here; the universal form does not hold it for another tensor-parallel size"
                )

    def _untrained(self) -> dict[str, torch.Tensor]:
        """Frozen weights and buffers by name."""
        trained = {id(param) for group in self.optimizer.bit16_groups for param in group}
        tensors = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        return {name: tensor for name, tensor in tensors if id(tensor) not in trained}

    @torch.no_grad()
    def _load_untrained(self, saved: Mapping[str, torch.Tensor]) -> None:
        """DeepSpeed's load of the universal form restores what the optimizer holds, and nothing else."""
        for name, tensor in self._untrained().items():
            if name in saved:
                tensor.copy_(saved[name])
