"""`megatron-acco report`: reading run folders of every state, the comparison, and a page that is safe and whole."""

from __future__ import annotations

import json
import math
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_acco.cli.main import main
from megatron_acco.report.comparison import common, differences, loss_at, method, micro_batches, seconds_to, summarize
from megatron_acco.report.figures import LIGHT, drawings, png
from megatron_acco.report.runs import read_records, read_runs
from megatron_acco.timeline import Span, read_trace, write_trace

HOSTILE = '<script>alert("x")</script>&<img src=http://example.org/x.png>$a_b'


def train(iteration: int, **changes: Any) -> dict[str, Any]:
    """A record of rounds: 1000 tokens and 2 s an update."""
    values = {
        "kind": "train",
        "iteration": iteration,
        "consumed_samples": 10 * iteration,
        "consumed_tokens": 1000 * iteration,
        "train_seconds": 2.0 * iteration,
        "global_batch_size": 10,
        "lm_loss": 8.0 - 0.1 * iteration,
        "grad_norm": 1.0,
        "skipped_iterations": 0,
        "tokens_per_second": 500.0 + iteration,
        "communication_ms_per_round": 40.0,
        "exposed_wait_ms_per_round": 25.0,
        "micro_batches_by_rank": [3, 2],
        "compute_ms_by_rank": [75.0, 80.0],
    }
    return {**values, **changes}


# DeepSpeed's own ZeRO-1 makes no rounds.
NO_ROUNDS: dict[str, Any] = {
    "communication_ms_per_round": None,
    "exposed_wait_ms_per_round": None,
    "micro_batches_by_rank": [],
    "compute_ms_by_rank": [],
}


def validation(iteration: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    """A record of an evaluation."""
    return {**train(iteration, lm_loss=loss), "kind": "validation", **changes}


def write_run(
    folder: Path, records: list[dict[str, Any]], arguments: dict[str, Any] | None = None, tail: str = ""
) -> Path:
    """A run folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    if arguments is not None:
        (folder / "arguments.json").write_text(json.dumps(arguments))
    return folder


def arguments(acco: dict[str, Any] | None, **training: Any) -> dict[str, Any]:
    """What a start leaves beside the log."""
    json_: dict[str, Any] = {"zero_optimization": {"stage": 1}} | ({} if acco is None else {"acco": acco})
    shape = {"train_iters": 40, "global_batch_size": 10, "train_samples": None, **training}
    return {"training": shape, "deepspeed": json_, "versions": {"torch": "2.13.0"}}


def write_zero1(folder: Path) -> Path:
    """A whole run of DeepSpeed's own ZeRO-1."""
    records = [train(i, **NO_ROUNDS) for i in range(1, 41)] + [validation(i, 8.0 - 0.1 * i) for i in (10, 20, 30, 40)]
    return write_run(folder, records, arguments(None))


def write_acco(folder: Path) -> Path:
    """Faster and a little behind; still at work, two of its updates were skipped, and it was resumed at update 20."""
    records = [train(i, train_seconds=1.0 * i, tokens_per_second=1000.0) for i in range(1, 31)]
    records[10]["skipped_iterations"] = 2
    again = [train(i, train_seconds=1.0 * i, tokens_per_second=1000.0, lm_loss=1.0) for i in (21, 22)]
    records += again + [validation(i, 8.1 - 0.1 * i, train_seconds=1.0 * i) for i in (10, 20, 30)]
    write_run(folder, records, arguments({"mode": "acco"}), tail='{"kind": "train", "iter')
    spans = [
        Span(rank, row, name, 0.5 * i, 0.25, i // 2, "commit")
        for rank in (0, 1)
        for row, name in (("compute", "first half"), ("lane", "all-gather"))
        for i in range(4)
    ]
    write_trace(spans, folder / "rounds.json")
    return folder


@pytest.fixture
def zero1(tmp_path: Path) -> Path:
    return write_zero1(tmp_path / "zero1")


@pytest.fixture
def acco(tmp_path: Path) -> Path:
    return write_acco(tmp_path / "acco")


def test_a_log_that_is_being_written_and_was_resumed(acco: Path) -> None:
    records = read_records(acco / "metrics.jsonl")
    assert [r.iteration for r in records.train] == list(range(1, 31)) and records.cut
    assert [r["lm_loss"] for r in records.train[20:22]] == [1.0, 1.0]  # as last written
    (run,) = read_runs([str(acco)])
    assert len(run.spans) == 16 and "at work, or was cut off" in run.notes[0]
    whole = (acco / "metrics.jsonl").read_text().rpartition("\n")[0]
    (acco / "metrics.jsonl").write_text(whole)  # the last line is whole, its end is not there yet
    assert not read_records(acco / "metrics.jsonl").cut


def test_the_summary(zero1: Path, acco: Path) -> None:
    runs = read_runs([str(zero1), f"ours={acco / 'metrics.jsonl'}"])
    reached = common(runs)
    # The slower learner stands at 30,000 tokens and 5.1; the other one passed that between its updates 20 and 30.
    assert (reached.tokens, reached.loss) == (30_000, pytest.approx(5.1))
    first, second = (summarize(run, reached) for run in runs)
    assert (first.method, second.method) == ("ZeRO-1", "acco") and [run.name for run in runs] == ["zero1", "ours"]
    assert (first.updates, first.done, first.tokens, first.seconds) == (40, 1.0, 40_000, 80.0)
    assert (second.updates, second.done, second.skipped) == (30, 0.75, 2)
    assert first.loss == pytest.approx(4.0) and first.common_loss == pytest.approx(5.0)
    assert second.loss == second.common_loss == pytest.approx(5.1)
    assert first.seconds_to_loss == pytest.approx(58.0) and second.seconds_to_loss == pytest.approx(30.0)
    assert first.tokens_per_second == 520.5 and second.tokens_per_second == 1000.0
    assert math.isnan(first.exposed) and second.exposed == pytest.approx(0.25)
    assert micro_batches(runs[0]) == [] and micro_batches(runs[1]) == [90, 60]


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """null is how the log writes them; a log by other means may say NaN."""
    records = [train(1), train(2, lm_loss=None, grad_norm=None), validation(1, 7.0), validation(2, math.nan)]
    (run,) = read_runs([str(write_run(tmp_path / "run", records))])
    row = summarize(run, common([run]))
    assert math.isnan(row.loss) and row.diverged and math.isnan(row.done) and row.method == ""
    assert loss_at(run, 1000) == 7.0 and math.isnan(loss_at(run, 999)) and math.isnan(seconds_to(run, 6.9))
    assert any("no arguments.json" in note for note in run.notes)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (None, "ZeRO-1"),
        ({"enabled": False}, "ZeRO-1"),
        ({}, "acco"),
        ({"mode": "dpu"}, "dpu"),
        ({"mode": "acco", "accumulation": "adaptive"}, "acco, adaptive"),
    ],
)
def test_the_method_is_that_of_the_json(section: dict[str, Any] | None, name: str, tmp_path: Path) -> None:
    (run,) = read_runs([str(write_run(tmp_path / "run", [train(1)], arguments(section)))])
    assert method(run) == name


def test_only_what_differs_in_the_configurations(zero1: Path, acco: Path, tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", [train(1)])  # one without its configuration differs in nothing
    assert differences(read_runs([str(zero1), str(acco), str(bare)])) == [
        ("deepspeed.acco.mode", [None, '"acco"', None])
    ]
    assert differences(read_runs([str(zero1), str(bare)])) == []


def test_counts_are_of_the_ranks_that_the_run_has_now(tmp_path: Path) -> None:
    records = [train(1, micro_batches_by_rank=[9, 9, 9]), train(2), train(3), train(4, micro_batches_by_rank=[])]
    (run,) = read_runs([str(write_run(tmp_path / "run", records))])
    assert micro_batches(run) == [6, 4]


def test_a_trace_comes_back_as_it_was_written(acco: Path, tmp_path: Path) -> None:
    spans = read_trace(acco / "rounds.json")
    assert spans[3] == Span(0, "compute", "first half", 1.5, 0.25, 1, "commit") and len(spans) == 16
    (acco / "rounds.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    (run,) = read_runs([str(acco)])
    assert not run.spans and "its profile rounds.json cannot be read" in run.notes[-1]


class Page(HTMLParser):
    """What a page would load, its tags, and its text by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text: dict[str, str] = {}
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "section":
            self._section = str(values["id"])
        self.links += [str(values[name]) for name in ("src", "srcset", "href") if name in values]

    def handle_data(self, data: str) -> None:
        self.text[self._section] = self.text.get(self._section, "") + data + " "


def test_the_page_is_whole_and_nothing_in_it_leads_out(
    zero1: Path, acco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = write_run(
        tmp_path / "hostile",
        [train(i) for i in (1, 2)],
        {**arguments({"mode": HOSTILE}, **{HOSTILE: HOSTILE}), "versions": {HOSTILE: HOSTILE}},
    )
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(validation(2, 7.0, kind="validation_set", set=HOSTILE)) + "\n")
    out = tmp_path / "new" / "report.html"
    words = [str(zero1), str(acco), f"_{HOSTILE}={hostile}", "--out", str(out), "--png", "--title", HOSTILE]
    assert main(["report", *words]) == 0
    text = out.read_text()
    page = Page(text)
    pictures = ["loss", "throughput", "communication", "gradient", "batch", "ranks", "timeline-2"]
    assert list(page.text)[1:] == ["summary", *pictures, "configuration", "versions"]
    assert page.tags.count("img") == page.tags.count("figure") == len(pictures) and "script" not in page.tags
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert "url(" not in text and "@import" not in text
    for section in ("summary", "configuration", "versions"):
        assert HOSTILE in page.text[section]
    assert "no validation" in page.text["summary"] and "at work, or was cut off" in page.text["summary"]
    assert "-1.96%" not in page.text["summary"] and "+2.00%" in page.text["summary"]  # 5.1 to 5.0 at 30,000 tokens
    assert "1.933 x" in page.text["summary"] and "1.921 x" in page.text["summary"]  # 58 s to 30 s; 1000 to 520.5
    names = {path.name for path in out.parent.iterdir()}
    assert names == {"report.html", *(f"report-{key}.png" for key in pictures)}
    assert capsys.readouterr().out.count("wrote ") == len(names)


def test_many_ranks_updates_and_colors(tmp_path: Path) -> None:
    """256 ranks, no two alike, as lines; a name that matplotlib would take for a formula."""
    records = [train(i, micro_batches_by_rank=list(range(1, 257))) for i in range(1, 4)]
    folders = [write_run(tmp_path / f"$run_{i}", records) for i in range(10)]
    made = {drawing.key: drawing for drawing in drawings(read_runs([str(folder) for folder in folders]))}
    assert set(made) == {"loss", "throughput", "communication", "gradient", "batch", "ranks"}
    assert png(made["ranks"], LIGHT).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--out", "r.html"], "nowhere: no such file or folder"),
        (["empty", "--out", "r.html"], "empty: no metrics.jsonl in this folder"),
        (["run", "--out", "r.pdf"], "must name a file that ends in .html"),
        (["run", "--out", "folder.html"], "must name a file that ends in .html"),
        (["run", "--out", "run/metrics.jsonl/r.html"], "cannot write"),
        (["run", "other/run", "a=run", "a=other/run", "--out", "r.html"], 'two runs are called "a"'),
        (["damaged", "--out", "r.html"], "line 2 is not a record of a training log"),
        (["started", "--out", "r.html"], "holds no records of training yet"),
        (["binary", "--out", "r.html"], "line 1 is not a record of a training log"),
    ],
)
def test_bad_input_gives_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other/run"):
        write_run(Path(name), [train(1)])
    write_run(Path("damaged"), [train(1)], tail="[]\n" + json.dumps(train(3)) + "\n")
    write_run(Path("started"), [])
    write_run(Path("binary"), [])
    Path("binary/metrics.jsonl").write_bytes(os.urandom(400).replace(b"\n", b"") + b"\n\n\n")
    Path("empty").mkdir()
    Path("folder.html").mkdir()
    assert main(["report", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not Path("r.html").exists()


def test_values_that_python_cannot_hold_are_no_crash(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train(1, grad_norm=10**400)])
    (folder / "arguments.json").write_text('{"a":' * 100_000)
    run = read_runs([str(folder)])[0]
    assert math.isnan(run.records.train[0].number("grad_norm")) and "arguments.json cannot be read" in run.notes[0]
    (folder / "metrics.jsonl").write_text("[" * 100_000 + "\n" + json.dumps(train(1)) + "\n")
    with pytest.raises(ValueError, match="line 1 is not a record"):
        read_runs([str(folder)])


def test_two_folders_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run"):
        write_run(Path(name), [train(1)])
    assert [run.name for run in read_runs(["a/run", "b/run"])] == ["a/run", "b/run"]
    monkeypatch.chdir("a/run")
    assert read_runs(["."])[0].name == "run"
