"""Checkpointer on two ranks with an engine that only writes files: what every rank must do together.

Covers CASES B35 (agreement of the ranks on the tag), the full disk on one rank, ranks without a common file system, and
writing beside training.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class FilesOnly:
    """The part of DeepSpeed's engine that a save needs: rank 0 writes the weights, every rank its shard."""

    def __init__(self, node_local: bool) -> None:
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        self._config = None
        self.checkpoint_engine: Any = TorchCheckpointEngine()
        self.node_local = node_local
        self.weights = torch.zeros(1000)

    def _copy_recovery_script(self, save_path: str) -> None:
        (Path(save_path) / "zero_to_fp32.py").write_text("script")

    def use_node_local_storage(self) -> bool:
        return self.node_local

    def save_checkpoint(self, save_dir: str, tag: str, client_state: Any, save_latest: bool) -> None:
        assert not save_latest
        rank, folder = dist.get_rank(), Path(save_dir) / tag
        if rank == 0 or self.node_local:
            self.checkpoint_engine.save(
                {"module": self.weights, **client_state}, str(folder / "mp_rank_00_model_states.pt")
            )
        self.checkpoint_engine.save({"step": self.weights}, str(folder / SHARD.format(rank)))
        if rank == 0:
            self._copy_recovery_script(save_dir)
        dist.barrier()


def identity() -> Any:
    from megatron_acco.training.checkpoint import Identity

    return Identity(model={}, schedule={}, order={}, ranks=2, arguments={})


def checkpointer(save: str, node_local: bool = False, **more: Any) -> Any:
    from megatron_acco.training.checkpoint import Checkpointer, CheckpointOptions

    options = CheckpointOptions(save=save, load=save, **more)
    return Checkpointer(FilesOnly(node_local), options, identity(), dist.group.WORLD)


def state(iteration: int) -> Any:
    from megatron_acco.training.checkpoint import TrainState

    return TrainState(iteration=iteration)


def agreed(load: str, **more: Any) -> tuple[str | None, tuple[str, ...]] | str:
    """The tag and warnings of what this rank is to load, or why it must not start."""
    from megatron_acco.training.checkpoint import CheckpointOptions, Reader, Refused, agree, find_checkpoint

    rank, options = dist.get_rank(), CheckpointOptions(save=load, load=load, **more)
    # Each rank is the first of its host.
    search = find_checkpoint(options, identity(), False, Reader(rank, 2, 0))
    try:
        found = agree(search, options.load_strict, dist.group.WORLD)
    except Refused as refused:
        return str(refused)
    return (None, ()) if found is None else (found.tag, found.warnings)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- one folder ---------------------------------------------------------------------------------------------------


def save_twice(save: str) -> list[Any]:
    own = checkpointer(save, save_retain=1)
    own.engine.weights += 1
    saved = own.start_save(state(3)) + own.start_save(state(3)) + own.start_save(state(5))
    own.close()
    dist.barrier()
    return [(one.iteration, one.writing_seconds) for one in saved]


def test_two_ranks_save_one_checkpoint_and_keep_one(ranks: Any, tmp_path: Path) -> None:
    left = tmp_path / ".saving-global_step1-killed"
    left.mkdir()
    assert ranks(2).run(save_twice, str(tmp_path)) == [[(3, None), (5, None)]] * 2
    assert names(tmp_path) == {"latest", "global_step5", "zero_to_fp32.py"}
    assert (tmp_path / "latest").read_text() == "global_step5"
    files = {"manifest.json", "mp_rank_00_model_states.pt", SHARD.format(0), SHARD.format(1)}
    assert names(tmp_path / "global_step5") == files
    assert ranks(2).run(agreed, str(tmp_path)) == [("global_step5", ())] * 2


def fail_on_rank_1(save: str, background: bool) -> tuple[str, str]:
    """The second save meets a full disk on rank 1."""
    from megatron_acco.training.checkpoint import SaveError, writer

    own = checkpointer(save)
    own.start_save(state(3))
    real = writer.write_file

    def full(content: Any, path: Path) -> Any:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.write_file = full if dist.get_rank() == 1 else real
    try:
        own.start_save(state(4), background)
        own.finish()
    except SaveError as error:
        return str(error), (Path(save) / "latest").read_text()
    finally:
        writer.write_file = real
    return "", ""


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_touches_nothing(
    ranks: Any, tmp_path: Path, background: bool
) -> None:
    for message, latest in ranks(2).run(fail_on_rank_1, str(tmp_path), background):
        assert "iteration 4 could not be saved" in message and "the last is of 3" in message
        assert "rank 1: " in message and "No space left on device" in message and "rank 0: " not in message
        assert latest == "global_step3"
    assert names(tmp_path) == {"latest", "global_step3", "zero_to_fp32.py"}


def fail_in_the_scripts(save: str) -> str:
    """Rank 0 has room for the files of a checkpoint of the real engine, but not for DeepSpeed's scripts."""
    import resource

    from megatron.core import tensor_parallel

    from megatron_acco.training.checkpoint import Checkpointer, CheckpointOptions, SaveError
    from tests.distributed.training import Net, client_optimizer, engine_for, json_config, parameter_groups

    tracker = tensor_parallel.get_cuda_rng_tracker()
    generators = tracker.get_states()
    tracker.reset()  # generators of earlier tests would make the checkpoint larger
    model = Net()
    optimizer = client_optimizer("torch_adamw", parameter_groups(model))
    with engine_for(model, json_config("acco"), optimizer) as (engine, _):
        own = Checkpointer(engine, CheckpointOptions(save=save), identity(), dist.group.WORLD)
        own.start_save(state(3))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max(path.stat().st_size for path in (Path(save) / "global_step3").iterdir())
        assert largest < (Path(save) / "zero_to_fp32.py").stat().st_size
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
        try:
            own.start_save(state(4))
        except SaveError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            tracker.set_states(generators)
    return ""


def test_a_disk_that_fills_with_the_scripts_is_one_message_too(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(fail_in_the_scripts, str(tmp_path)):
        assert "iteration 4 could not be saved" in message and "rank 0: [Errno 27]" in message, message
        assert "rank 1: " not in message
    assert names(tmp_path) == {"latest", "global_step3", "zero_to_fp32.py", "zero_to_torch.py"}


# ---- beside training ----------------------------------------------------------------------------------------------


def train_while_rank_1_writes(save: str) -> list[tuple[int, int, str]]:
    """Updates of a run that saves at 2 while rank 1's disk is slow: what the votes say and what `latest` names."""
    from megatron_acco.training.checkpoint import writer
    from megatron_acco.training.control import StopVote

    own = checkpointer(save)
    own.start_save(state(1))
    real, go_on = writer.write_file, threading.Event()

    def slow(content: Any, path: Path) -> Any:
        assert go_on.wait(60.0)
        return real(content, path)

    writer.write_file = slow if dist.get_rank() == 1 else real
    vote, seen = StopVote(dist.group.WORLD, None), []
    try:
        for update in range(2, 9):
            own.engine.weights.fill_(update)
            if update == 6:
                go_on.set()
                own._writer.result()  # so that the votes of update 6 say so, whatever the machine does
            verdict = vote.exchange(own.progress(), own.iteration_in_flight)
            saved = own.settle(verdict)
            dist.barrier()
            seen.append((update, len(saved), (Path(save) / "latest").read_text()))
            if update == 2:
                own.start_save(state(2), background=True)
    finally:
        writer.write_file = real
        go_on.set()
    vote.finish()
    own.close()
    return seen


def test_a_save_beside_training_counts_when_the_slowest_rank_has_written(ranks: Any, tmp_path: Path) -> None:
    before, after = "global_step1", "global_step2"
    expected = [(u, 0, before) for u in range(2, 7)] + [(7, 1, after), (8, 0, after)]
    assert ranks(2).run(train_while_rank_1_writes, str(tmp_path)) == [expected] * 2
    # The files hold what was there at the save, although training went on.
    for rank in range(2):
        content = torch.load(tmp_path / after / SHARD.format(rank), weights_only=True)
        assert content["step"].unique().tolist() == [2.0]
    assert ranks(2).run(agreed, str(tmp_path)) == [(after, ())] * 2


# ---- damage that one rank sees, folders that one host sees --------------------------------------------------------


def test_damage_that_one_rank_sees_takes_all_ranks_to_the_checkpoint_before(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_steps, [str(tmp_path)] * 2)
    shard = tmp_path / "global_step4" / SHARD.format(1)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    first, second = ranks(2).run(agreed, str(tmp_path))
    assert first == second and first[0] == "global_step2"
    assert f"{shard} is damaged" in " ".join(first[1]) and "resuming from global_step2" in " ".join(first[1])


def save_steps(folders: list[str], node_local: bool = False) -> list[str]:
    own = checkpointer(folders[dist.get_rank()], node_local)
    for step in (2, 4):
        own.start_save(state(step))
    own.close()
    return own.take_notices()


def on_own_folder(job: Callable[..., Any], folders: list[str], *args: Any) -> Any:
    return job(folders[dist.get_rank()], *args)


def test_hosts_without_a_common_folder_save_and_load_their_parts(ranks: Any, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    paths = [str(folder) for folder in folders]
    (warning,) = {notice for notices in ranks(2).run(save_steps, paths) for notice in notices}
    assert "2 different --save folders" in warning and "use_node_local_storage" in warning

    assert ranks(2).run(save_steps, paths, True) == [[], []]
    for rank, folder in enumerate(folders):
        assert (folder / "latest").read_text() == "global_step4"
        model = "mp_rank_00_model_states.pt"
        assert names(folder / "global_step4") == {"manifest.json", model, SHARD.format(rank)}
    assert ranks(2).run(on_own_folder, agreed, paths) == [("global_step4", ())] * 2

    # One host has lost its newest: all go back. One host has nothing: nobody starts.
    os.truncate(folders[1] / "global_step4" / SHARD.format(1), 10)
    (tag, warnings), again = ranks(2).run(on_own_folder, agreed, paths)
    assert tag == "global_step2" and again == (tag, warnings)
    assert "rank 1 on " in " ".join(warnings) and "bytes instead of" in " ".join(warnings)
    messages = ranks(2).run(on_own_folder, agreed, [paths[0], str(tmp_path / "c")])
    assert messages[0] == messages[1]
    assert "rank 0 on " in messages[0] and "rank 1 on " in messages[0] and "found no checkpoint" in messages[0]
