"""The --save folder and the search in it, without processes: every fault that a folder can have, and what is done.

Covers CASES B35 (a partial or damaged checkpoint is found, named and passed over; `latest` is cut off), the full disk,
retention, leftovers of killed saves, and checkpoints of earlier releases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_acco.training.batches import OwnStreamSampler
from megatron_acco.training.checkpoint import (
    CheckpointOptions,
    Identity,
    Reader,
    Search,
    TrainState,
    find_checkpoint,
    refuse_other_writers,
    store,
    writer,
)
from megatron_acco.training.loop import last_iteration
from megatron_acco.training.setup import engine_config

JOB, NOBODY = "0123", 65534
IDENTITY = Identity(
    model={"hidden_size": 32},
    schedule={"lr": 0.1},
    order={"data": ("a", "b")},
    ranks=2,
    arguments={"deepspeed": {"train_batch_size": 8}},
)


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


MODEL = "mp_rank_00_model_states.pt"


def put(save: Path, step: int, identity: Identity = IDENTITY, latest: bool = True) -> Path:
    """A checkpoint as `Checkpointer` makes it. Returns its folder."""
    tag = store.tag_of(step)
    staging = store.staging_folder(save, tag, JOB)
    (staging / tag).mkdir(parents=True)
    (staging / "zero_to_fp32.py").write_text("script")
    names = [MODEL, *map(shard, range(identity.ranks))]
    header = {"megatron_acco": {"identity": dataclasses.asdict(identity), "format": store.FORMAT}}
    content = {"step": step, "x": torch.ones(100), **header}
    files = [writer.write_file(content, staging / tag / name) for name in names]
    store.write_manifest(staging / tag, step, dataclasses.asdict(identity), files)
    staged = store.stage_latest(save, tag, JOB)
    store.publish(save, staging, tag, JOB)
    if latest:
        store.move_latest(save, staged)
    else:
        staged.unlink()
    return save / tag


def search(folder: Path, identity: Identity = IDENTITY, reader: Reader | None = None, **more: Any) -> Search | None:
    options = CheckpointOptions(load=str(folder), **{"save": str(folder), **more})
    return find_checkpoint(options, identity, False, reader)


def chosen(folder: Path, **more: Any) -> tuple[str, tuple[str, ...]]:
    result = search(folder, **more)
    assert result is not None and result.found is not None
    return result.found.tag, result.found.warnings


def refusal(folder: Path, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        search(folder, **more)
    return str(caught.value)


# ---- publishing ---------------------------------------------------------------------------------------------------


def test_a_published_checkpoint_is_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = put(tmp_path, 3)
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "global_step3", "zero_to_fp32.py"}
    manifest = store.read_manifest(folder)
    assert set(manifest.files) == {MODEL, shard(0), shard(1)} and manifest.iteration == 3
    read = store.check_checksums(folder, manifest.files.values())
    assert read == sum((folder / name).stat().st_size for name in manifest.files)
    assert torch.load(folder / MODEL, weights_only=True)["step"] == 3
    assert chosen(tmp_path) == ("global_step3", ())


def test_a_file_that_no_rank_reported_stops_the_save(tmp_path: Path) -> None:
    (tmp_path / "stray").touch()
    with pytest.raises(store.Damaged, match="stray"):
        store.write_manifest(tmp_path, 3, {}, [])


def test_a_checkpoint_of_the_same_name_is_replaced_and_one_without_manifest_kept(tmp_path: Path) -> None:
    (put(tmp_path, 3) / "mark").touch()
    assert not (put(tmp_path, 3) / "mark").exists()
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mark").touch()
    put(tmp_path, 5)
    assert (tmp_path / "global_step5.before.1" / "mark").exists() and chosen(tmp_path)[0] == "global_step5"


def test_leftovers_of_killed_saves_are_removed_and_a_half_replaced_checkpoint_comes_back(tmp_path: Path) -> None:
    put(tmp_path, 3)
    for name in (".saving-global_step4-ab/global_step4", ".deleting-global_step1-ab", ".replaced-global_step3-ab"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".latest-ab").touch()
    (tmp_path / ".lock").touch()
    put(tmp_path, 5, latest=False).rename(tmp_path / ".replaced-global_step5-ab")
    gone = store.remove_leftovers(tmp_path)
    assert len(gone) == 4 and store.list_tags(tmp_path) == ["global_step5", "global_step3"]
    assert {p.name for p in tmp_path.glob(".*")} == {".lock"}


def test_links_to_checkpoints_elsewhere_stand_in_nobodys_way(tmp_path: Path) -> None:
    """Somebody has moved checkpoints to a larger disk and left links."""
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    for step in (2, 4, 6):
        put(save, step)
    elsewhere.mkdir()
    for step in (2, 4):
        (save / f"global_step{step}").rename(elsewhere / f"global_step{step}")
        (save / f"global_step{step}").symlink_to(elsewhere / f"global_step{step}")
    assert store.delete_older(save, 1, "global_step6", JOB) == []
    put(save, 4)  # takes the place of the link
    shutil.rmtree(elsewhere / "global_step2")
    put(save, 2)  # and of one that leads to nothing
    assert {path.name for path in save.iterdir() if path.is_dir()} == {"global_step2", "global_step4", "global_step6"}
    assert (elsewhere / "global_step4" / MODEL).is_file()
    assert [path.name for path in save.iterdir() if path.is_symlink()] == ["global_step2.before.1"]
    (save / ".deleting-global_step3-89ab").symlink_to(elsewhere)  # of a release that took links for folders
    assert store.remove_leftovers(save) == [".deleting-global_step3-89ab"] and elsewhere.is_dir()


def test_retention_deletes_the_oldest_saves_and_only_those_that_were_made_here(tmp_path: Path) -> None:
    for step in (20, 2, 4, 6):  # 20: of a course that was given up
        put(tmp_path, step)
    damaged = put(tmp_path, 1)
    (damaged / store.MANIFEST).write_text("{")
    for foreign in ("global_step0", "mine"):
        (tmp_path / foreign).mkdir()
    assert sorted(store.delete_older(tmp_path, 2, "global_step6", JOB)) == ["global_step2", "global_step20"]
    assert store.delete_older(tmp_path, 1, "global_step4", JOB) == ["global_step6"]  # whatever the clock says
    kept = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert kept == {"global_step4", "global_step1", "global_step0", "mine"}


# ---- damage -------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(manifest: Path) -> None:
    """As a release would whose `Identity` has one field more."""
    content = json.loads(manifest.read_text())
    files = [store.FileRecord(name, f["size"], int(f["crc32"], 16)) for name, f in content["files"].items()]
    manifest.unlink()
    store.write_manifest(manifest.parent, content["iteration"], {**content["identity"], "later": 1}, files)


FAULTS = {
    "missing shard": (lambda folder: (folder / shard(1)).unlink(), "no file"),
    "truncated shard": (lambda folder: truncate(folder / shard(1)), "bytes instead of"),
    "flipped byte in a shard": (lambda folder: flip(folder / shard(1)), "its checksum is"),
    "flipped byte in the weights": (lambda folder: flip(folder / MODEL), "its checksum is"),
    "missing manifest": (lambda folder: (folder / store.MANIFEST).unlink(), "manifest.json"),
    "truncated manifest": (lambda folder: truncate(folder / store.MANIFEST), "cannot be read"),
    "altered manifest": (
        lambda folder: (folder / store.MANIFEST).write_text(
            (folder / store.MANIFEST).read_text().replace('"iteration": 6', '"iteration": 7')
        ),
        "its checksum is wrong",
    ),
    "manifest of a program unknown": (lambda folder: (folder / store.MANIFEST).write_text("[]"), "cannot be read"),
    "manifest of another release": (lambda folder: rewrite(folder / store.MANIFEST), "is of another release"),
    "missing folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_taken(tmp_path: Path, fault: str) -> None:
    for step in (2, 4, 6):
        put(tmp_path, step)
    damage, message = FAULTS[fault]
    damage(tmp_path / "global_step6")
    # A world of one rank of a checkpoint of two reads and compares all.
    reader = Reader(0, 1, 0)
    tag, warnings = chosen(tmp_path, identity=IDENTITY, reader=reader)
    assert tag == "global_step4" and message in warnings[0] and "global_step6" in warnings[0]
    assert "resuming from global_step4" in warnings[-1]
    assert message in refusal(tmp_path, reader=reader, load_strict=True)
    # Both of the others are damaged too: nothing to start from, and never a fresh start.
    for step in (2, 4):
        truncate(tmp_path / f"global_step{step}" / MODEL)
    assert "no other whole checkpoint" in refusal(tmp_path, reader=reader)


@pytest.mark.parametrize("content", [None, "", "global_step", "../global_step4", "global_step9", "x" * 300])
def test_a_latest_that_names_nothing_is_told_and_the_newest_whole_one_taken(
    tmp_path: Path, content: str | None
) -> None:
    for step in (2, 4):
        put(tmp_path, step)
    if content is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(content)
    tag, warnings = chosen(tmp_path)
    assert tag == "global_step4" and "latest" in warnings[0]
    assert "latest" in refusal(tmp_path, load_strict=True)


def test_what_may_not_be_read_is_named_and_no_crash(tmp_path: Path) -> None:
    """Root may read everything, so this becomes another user for a moment, in a folder of that user's."""
    folder = Path(tempfile.mkdtemp())
    try:
        for step in (2, 4):
            put(folder, step)
        for path in [folder, *folder.rglob("*")] if os.geteuid() == 0 else []:
            os.chown(path, NOBODY, NOBODY)
        with as_nobody():
            (folder / "global_step4").chmod(0)
            tag, warnings = chosen(folder)
            assert tag == "global_step2" and "global_step4" in warnings[0] and "Permission denied" in warnings[0]
            # Another rank sees that checkpoint; this one must answer, for the others wait.
            result = search(folder)
            assert result is not None and "Permission denied" in str(result.require("global_step4"))
            folder.chmod(0)
            assert f"--load {folder}: " in (text := refusal(folder)) and "Permission denied" in text
    finally:
        folder.chmod(0o700)
        (folder / "global_step4").chmod(0o700)
        shutil.rmtree(folder)
    assert "File name too long" in refusal(tmp_path / ("x" * 300))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_latest_set_back_by_the_user_is_obeyed_and_its_elders_come_first(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        put(tmp_path, step)
    (tmp_path / "latest").write_text("global_step4")
    assert chosen(tmp_path) == ("global_step4", ())
    truncate(tmp_path / "global_step4" / MODEL)
    assert chosen(tmp_path)[0] == "global_step2"
    truncate(tmp_path / "global_step2" / MODEL)
    assert chosen(tmp_path)[0] == "global_step6"


def test_every_checksum_is_compared_by_a_rank_that_reads_the_file(tmp_path: Path) -> None:
    put(tmp_path, 2)
    flip(tmp_path / "global_step2" / shard(1))
    whole = [chosen_or_none(tmp_path, Reader(rank, 2, rank)) for rank in range(2)]
    assert whole == ["global_step2", None]
    # On four ranks each file is read by all of them, and compared once.
    found = [chosen_or_none(tmp_path, Reader(rank, 4, rank)) for rank in range(4)]
    assert found == ["global_step2", None, "global_step2", "global_step2"]


def chosen_or_none(save: Path, reader: Reader) -> str | None:
    try:
        result = search(save, reader=reader)
    except ValueError as error:
        assert f"rank {reader.rank} on " in str(error)
        return None
    assert result is not None and result.found is not None
    return result.found.tag


def test_a_rank_that_lacks_what_it_reads_on_its_host_says_so(tmp_path: Path) -> None:
    folder = put(tmp_path, 2)
    (folder / shard(1)).unlink()
    manifest = store.read_manifest(folder)
    (folder / store.MANIFEST).unlink()
    files = [record for record in manifest.files.values() if record.name != shard(1)]
    store.write_manifest(folder, 2, manifest.identity, files)
    assert chosen_or_none(tmp_path, Reader(0, 2, 0)) == "global_step2"
    assert "no optimizer file of data-parallel rank 1" in refusal(tmp_path, reader=Reader(1, 2, 0))


# ---- what is not ours, or of another run --------------------------------------------------------------------------


def test_an_empty_save_folder_starts_fresh_and_any_other_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "metrics.jsonl").touch()
    assert search(tmp_path) is None and search(tmp_path / "none") is None
    assert "no checkpoint there" in refusal(tmp_path, save=None)
    assert "is not a folder" in refusal(tmp_path / "metrics.jsonl")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert "latest_checkpointed_iteration.txt" in refusal(tmp_path)


def test_a_damaged_checkpoint_falls_back_to_one_of_an_earlier_release_but_not_to_a_stranger(tmp_path: Path) -> None:
    put(tmp_path, 8)
    truncate(tmp_path / "global_step8" / MODEL)
    for tag, header in {
        "global_step3": {"megatron_acco": {"identity": dataclasses.asdict(IDENTITY)}},
        "other5": {},
    }.items():
        (tmp_path / tag).mkdir()
        for name in (MODEL, shard(0), shard(1)):
            torch.save(header, tmp_path / tag / name)
    tag, warnings = chosen(tmp_path)
    assert tag == "global_step3" and "other5 was not written by pretrain_gpt_acco.py" in " ".join(warnings)


def test_another_model_schedule_or_batch_is_refused_and_another_number_of_ranks_noted(tmp_path: Path) -> None:
    put(tmp_path, 2)

    def other(**more: Any) -> Identity:
        return dataclasses.replace(IDENTITY, **more)

    assert "of another model" in refusal(tmp_path, identity=other(model={"hidden_size": 64}))
    assert "learning-rate schedule" in refusal(tmp_path, identity=other(schedule={"lr": 0.2}))
    message = refusal(tmp_path, identity=other(tensor_parallel=2))
    assert "--tensor-model-parallel-size 1, this run has 2" in message
    assert f"ds_to_universal --input_folder {tmp_path}/global_step2 --output_folder" in message
    assert '"checkpoint": {"load_universal": true}' in message
    batch = {"deepspeed": {"train_batch_size": 16}}
    assert "--global-batch-size 8" in refusal(tmp_path, identity=other(ranks=4, arguments=batch))
    result = search(tmp_path, identity=other(ranks=4), reader=Reader(3, 4, 3))
    assert result is not None and result.found is not None
    assert ["saved by 2 data-parallel ranks" in notice for notice in result.found.notices] == [True]


def test_a_checkpoint_of_an_earlier_release_is_found_and_checked(tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    header = {"megatron_acco": {"identity": dataclasses.asdict(IDENTITY)}}
    for name in (MODEL, shard(0), f"bf16_{shard(1)}"):
        torch.save(header if name == MODEL else {}, folder / name)
    (tmp_path / "latest").write_text("global_step7")
    assert chosen(tmp_path) == ("global_step7", ())
    assert "of another model" in refusal(tmp_path, identity=dataclasses.replace(IDENTITY, model={}))
    os.truncate(folder / shard(0), 50)
    assert "is damaged (cut off?)" in refusal(tmp_path)
    (folder / shard(0)).unlink()
    assert "no optimizer file of rank 0" in refusal(tmp_path)
    (folder / "zero").mkdir()
    assert "is a universal checkpoint" in refusal(tmp_path)
    universal = {"deepspeed": {"train_batch_size": 8, "checkpoint": {"load_universal": True}}}
    mine = dataclasses.replace(IDENTITY, arguments=universal)
    assert chosen(tmp_path, identity=mine)[0] == "global_step7"
    # The universal form is of any tensor-parallel size, the vocabulary is not.
    mine = dataclasses.replace(mine, tensor_parallel=2)
    result = search(tmp_path, identity=mine)
    assert result is not None and result.found is not None and result.found.universal
    assert any("--tensor-model-parallel-size 1, continued with 2" in notice for notice in result.found.notices)
    section = universal["deepspeed"]
    assert engine_config(section, result.found) == section
    # A run that has saved since goes on from its own checkpoint with the same JSON.
    own = dataclasses.replace(result.found, universal=False)
    assert engine_config(section, own) == {**section, "checkpoint": {"load_universal": False}}
    header["megatron_acco"]["identity"]["model"]["padded_vocab_size"] = 1024
    torch.save(header, folder / MODEL)
    mine = dataclasses.replace(mine, model={**IDENTITY.model, "padded_vocab_size": 1280})
    assert "--make-vocab-size-divisible-by 512 pads" in refusal(tmp_path, identity=mine)
    torch.save({}, folder / MODEL)
    assert "was not written by pretrain_gpt_acco.py" in refusal(tmp_path)


def test_the_same_command_goes_on_from_what_was_saved_after_the_universal_form_was_loaded(tmp_path: Path) -> None:
    put(tmp_path, 20)
    converted = tmp_path / "global_step20_universal"
    (converted / "zero").mkdir(parents=True)
    header = {"megatron_acco": {"identity": dataclasses.asdict(IDENTITY)}, "global_steps": 20}
    torch.save(header, converted / MODEL)
    (tmp_path / "latest_universal").write_text(converted.name)
    universal = {"deepspeed": {"train_batch_size": 8, "checkpoint": {"load_universal": True}}}
    identity = dataclasses.replace(IDENTITY, arguments=universal)

    def found() -> tuple[str, bool]:
        result = search(tmp_path, identity=identity)
        assert result is not None and result.found is not None
        return result.found.tag, result.found.universal

    assert found() == (converted.name, True) and chosen(tmp_path)[0] == "global_step20"
    put(tmp_path, 25)
    put(tmp_path, 30)
    assert found() == ("global_step30", False)
    truncate(tmp_path / "global_step30" / MODEL)
    assert found() == ("global_step25", False)


@pytest.mark.parametrize(
    "given",
    [{"save_retain": 0, "save": "x"}, {"save_retain": 2}, {"async_save": True}, {"load_strict": True}],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        CheckpointOptions(**given)


def test_writers_that_would_write_past_the_checksums_are_refused() -> None:
    options = CheckpointOptions(save="x")
    refuse_other_writers(options, {"checkpoint": {"use_node_local_storage": True}})
    with pytest.raises(ValueError, match=r"checkpoint\.writer"):
        refuse_other_writers(options, {"checkpoint": {"writer": {}}})


# ---- the writer ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_the_save_with_its_reason_and_without_a_partial_file(
    small_disk: Path, background: bool
) -> None:
    own = writer.CheckpointWriter()
    own.start(background)
    own.save({"x": torch.ones(1000)}, str(small_disk / "fits"))
    own.save({"x": torch.ones(1 << 20)}, str(small_disk / "does not"))
    own.save({"x": torch.ones(1000)}, str(small_disk / "not tried"))
    written = own.result()
    assert own.failed() and "does not: [Errno 28] No space left on device" in (written.error or "")
    assert [path.name for path in small_disk.iterdir()] == ["fits"]
    own.start(background)
    own.save({"x": torch.ones(1000)}, str(small_disk / "again"))
    assert own.result().error is None
    own.close()


def test_a_failed_write_in_the_middle_of_a_file_is_reported_by_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, content: Any) -> int:
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise self.error

    monkeypatch.setattr(writer._SummingFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        writer.write_file({"x": torch.ones(10)}, tmp_path / "x")


def test_what_is_written_in_the_background_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    scaler = SimpleNamespace(scale=4)
    state = {"module": OrderedDict(a=flat[:6].view(2, 3), b=flat[6:]), "scaler": scaler, "more": [(flat, 1)]}
    state["module"]._metadata = {"": {"version": 1}}
    own = writer.CheckpointWriter()
    own.start(background=True)
    own.save(state, str(tmp_path / "late"))
    flat.zero_()
    scaler.scale = 8
    (record,) = own.result().files
    own.close()
    assert store.check_checksums(tmp_path, [record]) == record.size
    loaded = torch.load(tmp_path / "late", weights_only=False)
    assert torch.equal(loaded["module"]["a"], torch.arange(6.0).view(2, 3)) and loaded["scaler"].scale == 4
    assert loaded["module"]._metadata == {"": {"version": 1}}
    # Views of one storage are in the file once, as views of one storage.
    pointers = {t.untyped_storage().data_ptr() for t in (*loaded["module"].values(), loaded["more"][0][0])}
    assert len(pointers) == 1


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    content = json.loads((put(tmp_path, 3) / store.MANIFEST).read_text())
    assert content["files"][MODEL].keys() == {"size", "crc32"} and content["identity"]["order"]["data"] == ["a", "b"]


# ---- the end of the data ------------------------------------------------------------------------------------------


def test_an_update_whose_data_is_not_all_there_is_not_begun() -> None:
    def run(micro_batches: int, iteration: int) -> Any:
        arguments = SimpleNamespace(num_microbatches=4, train_iters=10, adaptive=False)
        return SimpleNamespace(
            arguments=arguments, train=range(micro_batches), state=SimpleNamespace(iteration=iteration)
        )

    assert last_iteration(run(40, 0)) == 10 and last_iteration(run(11, 3)) == 5 and last_iteration(run(3, 3)) == 3


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 2), (1, 2), (2, 1), (2, 4), (3, 1)])
@pytest.mark.parametrize("positions", [[7, 4], [3, 3], []])
def test_B53_streams_that_are_cut_anew_bring_no_sample_twice(positions: list[int], ranks: int, size: int) -> None:
    """Adaptive accumulation, 2 samples per micro-batch at the save (or 23 of fixed accumulation), resumed otherwise."""

    def stream(position: int, rank: int, of: int, micro_batch: int) -> Iterator[list[int]]:
        return iter(OwnStreamSampler(10_000, position, micro_batch, rank, of))

    used = set(range(23)) if not positions else set()
    for rank, done in enumerate(positions):
        used.update(*itertools.islice(stream(0, rank, 2, 2), done))
    state = TrainState(0, 23, micro_batches_by_rank=positions, micro_batch_size=2 if positions else 0)
    coming = [
        sample
        for rank in range(ranks)
        for batch in itertools.islice(stream(state.position(rank, ranks, size), rank, ranks, size), 9)
        for sample in batch
    ]
    assert len(set(coming)) == len(coming) and not used & set(coming)
    assert min(coming) <= len(used) + 2 * 2 * (7 - 4) + ranks * size, "not much is left out"


def test_data_options_that_a_checkpoint_does_not_know_have_their_defaults() -> None:
    """Checkpoints from before --sft tell of no change where there is none; a real one is told by its flag."""
    from megatron_acco.training.blends import DataOptions
    from megatron_acco.training.checkpoint.state import compare

    def with_data(**options: Any) -> Identity:
        return dataclasses.replace(IDENTITY, order={"seed": 1, "data": options})

    now = dataclasses.asdict(DataOptions(data_path=["a"]))
    before = {name: value for name, value in now.items() if not name.startswith("sft")}
    assert compare(with_data(**before), with_data(**now), "here", False) == ()
    assert compare(with_data(**{**now, "num_workers": None}), with_data(**now), "here", False) == ()
    [notice] = compare(with_data(**before), with_data(**{**now, "sft": True}), "here", False)
    assert notice.endswith("changes at the resume: --sft is False in the checkpoint and True here")
    [notice] = compare(with_data(**before), with_data(**{**now, "data_path": ["b"]}), "here", False)
    assert notice.endswith("--data-path is ['a'] in the checkpoint and ['b'] here")


def test_a_resume_with_another_tokenizer_is_refused() -> None:
    from megatron_acco.training.checkpoint.state import compare

    known, other = (dataclasses.replace(IDENTITY, tokenizer=digest) for digest in ("aa", "bb"))
    assert compare(known, known, "here", False) == compare(IDENTITY, known, "here", False) == ()
    with pytest.raises(ValueError, match="--load here was trained with another tokenizer"):
        compare(known, other, "here", False)
