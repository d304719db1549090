"""Checkpointer: the collective half of save and load."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megatron_acco.training.checkpoint import store
from megatron_acco.training.checkpoint.search import Found, Refused
from megatron_acco.training.checkpoint.state import (
    CLIENT_STATE,
    CheckpointOptions,
    Identity,
    TrainState,
    random_state,
    set_random_state,
)
from megatron_acco.training.checkpoint.writer import CheckpointWriter, Written
from megatron_acco.training.control import Saving, Verdict


class SaveError(RuntimeError):
    """A checkpoint could not be saved; raised on all ranks. The last good one and `latest` are untouched."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and named by `latest`.

    Attributes:
        iteration: its update.
        folder: its folder.
        writing_seconds: how long this rank's files took beside training; None if training waited for them.
    """

    iteration: int
    folder: Path
    writing_seconds: float | None


@dataclass
class _InFlight:
    """A save whose files are being written beside training."""

    iteration: int
    staging: Path
    background: bool


class Checkpointer:
    """Saves and loads. Saving and loading are collective over all ranks, at an update boundary.

    A save is written under a temporary name by DeepSpeed, through `CheckpointWriter`; once every rank's files are on
    the disk, one rank per folder writes the manifest and renames; once that is done everywhere, `latest` moves.
    """

    def __init__(self, engine: Any, options: CheckpointOptions, identity: Identity, control: dist.ProcessGroup) -> None:
        """Collective.

        Raises:
            SaveError: if a rank cannot write to its --save folder.
        """
        self.engine = engine
        self.options = options
        self.identity = identity
        self.control = control
        self.saved_iteration: int | None = None
        self.notices: list[str] = []
        self._in_flight: _InFlight | None = None
        self._generators: dict[str, Any] | None = None
        if options.save is not None:
            self._open_folder(Path(options.save))

    def _open_folder(self, folder: Path) -> None:
        self.folder = folder
        self._job = self._same_on_all(secrets.token_hex(4))
        rank = dist.get_rank()
        self._raise_errors(f"cannot write to --save {folder}", self._try(store.leave_token, folder, self._job, rank))
        # Ranks that see one folder are led by the lowest of them.
        self._leader = store.lowest_token(folder, self._job, rank)
        leaders = set(self._gather(self._leader))
        self._raise_errors(f"cannot write to --save {folder}", self._try(self._clean_up))
        if len(leaders) > 1 and not self.engine.use_node_local_storage():
            self.notices.append(
                f"the ranks see {len(leaders)} different --save folders: each holds a part of a checkpoint, and only "
                f'the first has the weights; give "checkpoint": {{"use_node_local_storage": true}} in the DeepSpeed '
                f"JSON to resume from them"
            )
        inner = self.engine.checkpoint_engine
        if type(inner) is not TorchCheckpointEngine:
            raise ValueError(
                f'the "checkpoint" section of the DeepSpeed JSON chooses {type(inner).__name__}, which writes past '
                f"the checks of --save; remove that choice, and give --async-save to write beside training"
            )
        self._writer = CheckpointWriter(self.engine._config)
        # DeepSpeed's own place for an engine that writes its files.
        self.engine.checkpoint_engine = self._writer
        # DeepSpeed copies its scripts on rank 0, while the others are on the way to a barrier.
        copy_scripts = self.engine._copy_recovery_script
        self.engine._copy_recovery_script = lambda folder: self._writer.attempt(copy_scripts, folder)

    def _clean_up(self) -> None:
        token = store.token_of(self.folder, self._job, dist.get_rank())
        token.unlink(missing_ok=True)  # the leader may have been here already
        if self._leads() and (gone := store.remove_leftovers(self.folder)):
            self.notices.append(f"removed what interrupted saves left in {self.folder}: {', '.join(gone)}")

    # ---- save -------------------------------------------------------------------------------------------------------

    def start_save(self, state: TrainState, background: bool = False) -> list[Saved]:
        """Save a checkpoint unless this iteration's is there already. Collective over all ranks.

        A save in flight is finished first.

        Args:
            state: what to save besides the engine's state.
            background: write beside training; `progress` and `settle` finish it.

        Returns:
            The checkpoints that are whole now and were not before.

        Raises:
            SaveError: on all ranks, if a rank's files or a folder could not be written.
        """
        if self.options.save is None:
            return []
        saved = self.finish()
        if self.saved_iteration == state.iteration:
            return saved
        tag = store.tag_of(state.iteration)
        staging = store.staging_folder(self.folder, tag, self._job)
        generators = self._gather(random_state())
        content = {
            "format": store.FORMAT,
            "state": dataclasses.asdict(state),
            "generators": generators,
            "identity": dataclasses.asdict(self.identity),
        }
        made = self._try((staging / tag).mkdir, parents=True, exist_ok=True)
        self._raise_errors(self._failed(state.iteration), made, lambda: store.discard(staging, self._job))
        self._writer.start(background)
        try:
            self.engine.save_checkpoint(str(staging), tag=tag, client_state={CLIENT_STATE: content}, save_latest=False)
        except OSError as error:
            store.discard(staging, self._job)
            raise SaveError(f"{self._failed(state.iteration)}: rank {dist.get_rank()}: {error}") from error
        self._in_flight = _InFlight(state.iteration, staging, background)
        return saved if background else [*saved, *self.finish()]

    def progress(self) -> Saving:
        """How far this rank's files of the save in flight are; its vote in `StopVote`."""
        if self._in_flight is None:
            return Saving.NONE
        if self._writer.failed():
            return Saving.FAILED
        return Saving.WRITTEN if self._writer.done() else Saving.WRITING

    @property
    def iteration_in_flight(self) -> int | None:
        """The update whose checkpoint is being written, the same on all ranks."""
        return None if self._in_flight is None else self._in_flight.iteration

    def settle(self, verdict: Verdict) -> list[Saved]:
        """Finish the save in flight if the ranks' votes on it say that all files are written, or that one failed.

        Collective if they do. Raises as `start_save`.
        """
        about_this = self._in_flight is not None and verdict.about == self._in_flight.iteration
        return self.finish() if about_this and verdict.saving in (Saving.WRITTEN, Saving.FAILED) else []

    def finish(self) -> list[Saved]:
        """Wait for the files of the save in flight and make it the checkpoint to resume from. Collective.

        Raises:
            SaveError: as `start_save`.
        """
        if self._in_flight is None:
            return []
        saving, self._in_flight = self._in_flight, None
        written = self._writer.result()
        self._publish(saving, written)
        self.saved_iteration = saving.iteration
        tag = store.tag_of(saving.iteration)
        if self._leads() and self.options.save_retain is not None:
            self._writer.later(self._retain, self.options.save_retain, tag)
        return [Saved(saving.iteration, self.folder / tag, written.seconds if saving.background else None)]

    def close(self) -> None:
        """Finish what is in flight, deletions too. Collective."""
        self.finish()
        if self.options.save is not None:
            self._writer.close()

    def _retain(self, keep: int, tag: str) -> None:
        """In the writer thread: many files may take their time to go."""
        if (error := self._try(store.delete_older, self.folder, keep, tag, self._job)) is not None:
            self.notices.append(f"--save-retain could not delete all older checkpoints: {error}")

    def take_notices(self) -> list[str]:
        """What the user should know, once."""
        notices, self.notices = self.notices, []
        return notices

    def _publish(self, saving: _InFlight, written: Written) -> None:
        """Manifest, rename, `latest`; every step on all ranks that lead a folder before the next on any."""
        tag, failed = store.tag_of(saving.iteration), self._failed(saving.iteration)

        def discard() -> None:
            if self._leads():
                store.discard(saving.staging, self._job)

        reports = self._gather((self._leader, written.files, written.error))
        self._raise_errors(failed, written.error, discard, [error for _, _, error in reports])
        files = [record for leader, records, _ in reports if leader == self._leader for record in records]

        def prepare() -> None:
            folder = saving.staging / tag
            store.write_manifest(folder, saving.iteration, dataclasses.asdict(self.identity), files)
            self._latest = store.stage_latest(self.folder, tag, self._job)
            store.publish(self.folder, saving.staging, tag, self._job)

        self._raise_errors(failed, self._try(prepare) if self._leads() else None, discard)
        moved = self._try(lambda: store.move_latest(self.folder, self._latest)) if self._leads() else None
        self._raise_errors(failed, moved)

    def _failed(self, iteration: int) -> str:
        last = "there is no checkpoint" if self.saved_iteration is None else f"the last is of {self.saved_iteration}"
        return f"the checkpoint of iteration {iteration} could not be saved to {self.options.save} ({last})"

    # ---- load -------------------------------------------------------------------------------------------------------

    def load(self, found: Found) -> TrainState:
        """Load everything but the random generators; `restore_generators` comes after all that draws from them.

        The ranks have agreed on `found` (`megatron_acco.training.checkpoint.search.agree`). Collective.

        Raises:
            Refused: if files turn out to be missing or damaged, where no manifest could say so before.
        """
        try:
            path, client_state = self.engine.load_checkpoint(str(found.folder), tag=found.tag)
        except ValueError as error:
            raise Refused(f"--load {found.folder}: {error}") from error
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {found.folder / found.tag}")
        # The optimizer's state brings the rates of the save; with another schedule they would stand for one update.
        self.engine.lr_scheduler.step(0)
        content = client_state[CLIENT_STATE]
        generators, saved_parts = content["generators"], content["identity"].get("tensor_parallel", 1)
        # On another tensor-parallel size a rank's number means another place in the model.
        if saved_parts == self.identity.tensor_parallel and dist.get_rank() < len(generators):
            self._generators = generators[dist.get_rank()]
        state = TrainState(**content["state"])
        in_save_folder = self.options.save is not None and found.folder.resolve() == Path(self.options.save).resolve()
        if in_save_folder and found.tag == store.tag_of(state.iteration):
            self.saved_iteration = state.iteration
        return state

    def restore_generators(self) -> None:
        """Set every random generator of this rank as it was at the save; a rank that was not there keeps its seed."""
        if self._generators is not None:
            set_random_state(self._generators)

    # ---- the ranks --------------------------------------------------------------------------------------------------

    def _leads(self) -> bool:
        return self._leader == dist.get_rank()

    def _gather(self, value: Any) -> list[Any]:
        result: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(result, value, group=self.control)
        return result

    def _same_on_all(self, value: Any) -> Any:
        return self._gather(value)[0]

    @staticmethod
    def _try(step: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
        """The reason why `step` failed: it travels to all ranks before anybody raises."""
        try:
            step(*args, **kwargs)
        except (OSError, store.Damaged) as error:
            return str(error)
        return None

    def _raise_errors(
        self,
        what: str,
        mine: str | None,
        clean_up: Callable[[], None] | None = None,
        errors: list[str | None] | None = None,
    ) -> None:
        """Raise SaveError on all ranks if a step failed on any. Collective unless `errors` are known already."""
        errors = self._gather(mine) if errors is None else errors
        reasons = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if reasons:
            if clean_up is not None:
                clean_up()
            more = f"; and {len(reasons) - 4} more ranks" if len(reasons) > 4 else ""
            raise SaveError(f"{what}: {'; '.join(reasons[:4])}{more}")
