"""Theta in the module on demand, and what a checkpoint holds beside DeepSpeed's: AccoZeroOptimizer at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import log_dist, logger
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor

from megatron_acco.config import AccoConfig, Mode
from megatron_acco.zero.advice import Adviser
from megatron_acco.zero.buffers import GradBuffers
from megatron_acco.zero.estimate import BaseOptimizer
from megatron_acco.zero.lane import Lane
from megatron_acco.zero.rounds import Rounds
from megatron_acco.zero.schedule import COMMIT, PREDICTED, RoundSpec
from megatron_acco.zero.shards import EXTRAS_KEY, EXTRAS_VERSION, group_state

REAL = "real"


class RestorableOptimizer(DeepSpeedZeroOptimizer):
    """What compute is shown, theta, and checkpoints of both. Rounds and accumulation are the subclass's.

    Attributes:
        update: 0-based number of the update in progress.
        lane, adviser: see the subclass.
    """

    acco: AccoConfig
    update: int
    lane: Lane
    adviser: Adviser
    _base: BaseOptimizer
    _rounds: Rounds
    _buffers: GradBuffers
    # The round whose weights wait in the lane's buffer to be shown, and whether those shown now are theta.
    _pending: RoundSpec | None
    _shows_real: bool
    # What compute was shown before theta was put in its place, and who has asked for that.
    _stash: list[Tensor] | None
    _held_real: int
    # The outcome of a commit of which the loss scaler has not heard; ACCO's part of a loaded checkpoint.
    _skipped: bool | None
    _extras: Mapping[str, Any] | None

    def drain(self) -> None:
        """Wait for the round in flight and settle it; its weights are installed at the next boundary."""
        raise NotImplementedError

    # ---- theta in the module ----------------------------------------------------------------------------------------

    @contextmanager
    def real_parameters(self) -> Iterator[None]:
        """`show_real`, then `show_for_compute` unless theta_t was shown before."""
        nested = self._stash is not None
        self.show_real()
        self._held_real += 1
        try:
            yield
        finally:
            self._held_real -= 1
            if not nested:
                self.show_for_compute()

    def show_real(self) -> None:
        """Show theta_t in the module (draining what is in flight), until `show_for_compute`.

        Theta is there already as the result of the last commit, except in mode wp, which gathers it (collective).
        """
        self.drain()
        if self._shows_real or self._stash is not None:
            return
        self._stash = [flat.clone() for flat in self.bit16_groups_flat]
        if self._pending is not None and self._pending.shows_real_parameters:
            self._copy(self._buffers.gathered_weights(), self.bit16_groups_flat)
        else:
            self._in_lane("the gathering of theta", lambda: self._rounds.gather_masters(self.bit16_groups_flat))

    def show_for_compute(self) -> None:
        """Put back what compute was shown before `show_real`. Changes made to the parameters since are lost.

        Not inside `real_parameters()`.
        """
        if self._stash is not None and not self._held_real:
            self._copy(self._stash, self.bit16_groups_flat)
            self._stash = None

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state (theta, optimizer state), and this rank's shard of what compute was shown."""
        self.drain()
        return {**super().state_dict(), EXTRAS_KEY: self.shown_state()}

    def shown_state(self) -> dict[str, Any]:
        """This rank's shard of what compute was shown, and what else a resumed run needs; nothing may be in flight."""
        shown = self._stash if self._stash is not None else self.bit16_groups_flat
        pending: Any = None
        if self._pending is not None:
            real = self._pending.shows_real_parameters
            pending = REAL if real else self._shards_to_save(self._buffers.gathered_weights())
        return {
            "version": EXTRAS_VERSION,
            "mode": self.acco.mode.value,
            "shown": REAL if self._shows_real else self._shards_to_save(shown),
            "pending": pending,
            # Told where it would have been without the save, so that saving does not change the training.
            "untold": self._skipped,
            "fraction": self.adviser.fraction(self.update),
        }

    def check_saved(self, shard: Mapping[str, Any]) -> None:
        """Raise ValueError if a saved state of this rank's layout is not one that the base optimizer can go on from."""
        self._base.check_state([group_state(shard, index) for index in range(len(self.bit16_groups))])

    def load_state_dict(self, state_dict_list: Any, *args: Any, **kwargs: Any) -> None:
        """Load DeepSpeed's state and remember ACCO's extras for `restore`, if the checkpoint has them."""
        super().load_state_dict(state_dict_list, *args, **kwargs)
        rank = dist.get_rank(group=self.dp_process_group)
        own = state_dict_list[rank] if state_dict_list is not None and rank < len(state_dict_list) else None
        self._extras = own.get(EXTRAS_KEY) if isinstance(own, Mapping) else None

    def _load_universal_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the base, which fails where this rank has no part of a parameter group: it gets one of no elements."""
        nothing = fragment_address(numel=0, start=0)
        without = [
            (group, params[0])
            for group, params in enumerate(self.bit16_groups)
            if all(param._hp_mapping is None for param in params)
        ]
        for group, param in without:
            own, master = param.flatten()[:0], self.single_partition_of_fp32_groups[group][:0]
            param._hp_mapping = tensor_fragment(own, nothing, master, nothing, {}, {}, False, group)
        try:
            super()._load_universal_checkpoint(*args, **kwargs)
        finally:
            for _, param in without:
                param._hp_mapping = None

    def restore(self, update: int, loaded: bool) -> None:
        """Continue at the start of update `update`. Collective.

        Args:
            update: its number.
            loaded: weights, masters and state were loaded; otherwise compute starts at the theta that is there.

        Without ACCO's extras (a checkpoint of plain ZeRO-1 or of a later release, weights only) compute starts at
        theta itself.
        """
        if not loaded:
            self._gather_loaded(None, self.bit16_groups_flat)
        self.update = update
        self.adviser.restart(self.acco.mode)
        extras, self._extras = self._extras, None
        self._shows_real = True
        if extras is not None and extras.get("version") != EXTRAS_VERSION:
            if dist.get_rank() == 0:
                logger.warning(
                    f"ACCO's own state in the checkpoint has version {extras.get('version')}, this release reads "
                    f"{EXTRAS_VERSION}: it is left out, and compute starts at theta"
                )
            extras = None
        self._skipped = extras["untold"] if extras is not None else None
        # Weights shown under another mode's rule mean nothing to this one's.
        if not self.agree(extras is not None and extras["mode"] == self.acco.mode.value):
            if loaded and update > self.acco.warmup_updates and self.acco.mode is not Mode.SYNC:
                log_dist("compute starts at theta: the checkpoint has no estimate for this mode of ACCO", ranks=[0])
            return
        assert extras is not None
        if self.acco.auto_fraction and self.agree(extras.get("fraction") is not None):
            self.adviser.restart(self.acco.mode, extras["fraction"])
        shown, pending = extras["shown"], extras["pending"]
        if shown != REAL:
            self._gather_loaded(shown, self.bit16_groups_flat)
            self._shows_real = False
        if pending is not None:
            real = pending == REAL
            self._gather_loaded(None if real else pending, self._buffers.gathered_weights())
            self._pending = COMMIT if real else PREDICTED

    def agree(self, flag: bool) -> bool:
        """Whether `flag` holds on all ranks. Collective."""
        tensor = torch.tensor([int(flag)], dtype=torch.int32, device=self.bit16_groups_flat[0].device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)  # tensor-parallel ranks of a replica, too
        return bool(tensor.item())

    def _shards_to_save(self, weights: list[Tensor]) -> list[Tensor]:
        shards = self._get_groups_without_padding(self._rounds.own_shards(weights))
        return [shard.clone() for shard in shards]

    def _gather_loaded(self, shards: list[Tensor] | None, weights: list[Tensor]) -> None:
        def gather() -> None:
            if shards is None:
                self._rounds.gather_masters(weights)
                return
            padded = []
            for shard, own in zip(shards, self._rounds.own_shards(weights), strict=True):
                padded.append(torch.zeros_like(own))
                padded[-1][: shard.numel()].copy_(shard)
            self._rounds.gather_shards(padded, weights)

        self._in_lane("the gathering of loaded weights", gather)

    def _in_lane(self, label: str, work: Callable[[], None]) -> None:
        self.lane.submit(label, work).wait()

    @staticmethod
    @torch.no_grad()
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
