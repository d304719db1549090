"""Adaptive accumulation, the profile of rounds and the figures of all ranks through the real launcher (B53, B61)."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron_acco.report.comparison import common, summarize
from megatron_acco.report.figures import drawings
from megatron_acco.report.runs import read_runs
from tests.integration.test_pretrain import (
    command,
    data,  # noqa: F401 (a fixture)
    records,
    succeed,
    write_json,
)

pytestmark = pytest.mark.alone


def saved_state(folder: Path, iteration: int) -> dict:
    path = folder / f"global_step{iteration}" / "mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)["megatron_acco"]["state"]


@pytest.mark.slow
def test_adaptive_run_ends_by_samples_and_goes_on_where_its_streams_were(
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = write_json(tmp_path, "acco", gradient_accumulation_steps=2)
    section = {"mode": "acco", "accumulation": "adaptive"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "acco": section}))
    save, trace = tmp_path / "run", tmp_path / "rounds.json"
    words = command(data, config, "--save", str(save), "--load", str(save), "--lr-decay-iters", "100")
    words = [word for word in words if word not in ("--train-iters", "20")] + ["--train-samples", "400"]
    profile = ["--profile-rounds", str(trace), "--profile-start", "2", "--profile-updates", "3"]
    output = succeed([*words, "--exit-interval", "12", *profile])
    assert "training from sample 0 to 400" in output and "at most 64 per half" in output
    first = saved_state(save, 12)
    # One sample per micro-batch; each rank did at least its two per update.
    positions = first["micro_batches_by_rank"]
    assert first["consumed_train_samples"] == sum(positions) and min(positions) >= 24

    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["update"] for event in events} == {2, 3, 4}
    rows = {(event["pid"], event["cat"]) for event in events}
    assert rows == {(rank, row) for rank in (0, 1) for row in ("compute", "lane")}
    names = {event["name"] for event in events}
    assert names == {"first half", "second half", "reduce-scatter", "optimizer", "all-gather"}
    assert trace.with_suffix(".png").stat().st_size > 1000

    output = succeed([*words, "--profile-rounds", str(tmp_path / "none.json"), "--profile-start", "1000"])
    assert "no profile of the rounds: training ended before update 1012" in output
    assert f"training from sample {sum(positions)} to 400" in output
    assert 400 <= records(save, "validation")[-1]["consumed_samples"] < 600
    counts = [record["micro_batches_by_rank"] for record in records(save) if record["micro_batches_by_rank"]]
    assert all(len(by_rank) == 2 for by_rank in counts)
    # Also of the first update after the resume, whose samples are counted when its commit is done.
    assert all(record["global_batch_size"] >= 4 and record["tokens_per_second"] > 0 for record in records(save))
    assert all(len(record["exposed_wait_ms_by_rank"]) == 2 for record in records(save)[1:5])
    # The samples of a record are those that its weights have seen, of an evaluation too.
    seen, trained = 0, {0: 0}
    for record in records(save):
        seen = trained[record["iteration"]] = seen + record["global_batch_size"]
        assert record["consumed_samples"] == seen and record["consumed_tokens"] == 32 * seen
    assert trained[12] == sum(positions)
    assert all(trained[record["iteration"]] == record["consumed_samples"] for record in records(save, "validation"))

    (run,) = read_runs([str(save)])
    assert [record.iteration for record in run.records.train] == [record["iteration"] for record in records(save)]
    summary = summarize(run, common([run]))
    assert (summary.method, summary.done) == ("acco, adaptive", records(save)[-1]["consumed_samples"] / 400)
    assert not math.isnan(summary.loss + summary.exposed) and run.section("versions")["torch"] == torch.__version__
    shutil.copy(trace, save)
    assert {span.rank for span in read_runs([str(save)])[0].spans} == {0, 1}
    assert len(drawings(read_runs([str(save)]))) == 7
