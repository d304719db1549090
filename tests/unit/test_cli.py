"""The console command: arguments, exit codes, loss curves and plot."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_acco.cli.main import build_parser, main
from megatron_acco.corpus import standard_library
from megatron_acco.curves import Point, read_curves

PNG = b"\x89PNG\r\n\x1a\n"


def record(kind: str, iteration: int, loss: float | None) -> str:
    """One line of a metrics.jsonl."""
    return json.dumps(
        {
            "kind": kind,
            "iteration": iteration,
            "consumed_tokens": iteration * 8192,
            "train_seconds": iteration * 1.5,
            "lm_loss": loss,
        }
    )


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    lines = [record("train", step, 8.0 - 0.1 * step) for step in range(1, 31)]
    lines += [record("validation", step, 8.1 - 0.1 * step) for step in range(10, 31, 10)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SUBCOMMAND"),
        (["plott"], "invalid choice"),
        (["plot", "nowhere.jsonl", "--out", "x.png"], "nowhere.jsonl: no such file"),
        (["prepare-corpus", "--out", "x", "--vocab-size", "12"], "vocabulary size"),
        (["prepare-corpus", "--out", "x", "--source", "/nowhere"], "does not exist"),
        (["generate", "--checkpoint", "x", "--tokenizer-model", "nowhere.model"], "no such file"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert not captured.out


def test_prepare_corpus_says_what_it_made_and_reuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in sorted(standard_library().glob("*.py"))[:40]:
        (source / path.name).write_bytes(path.read_bytes())
    command = ["prepare-corpus", "--source", str(source), "--out", str(tmp_path / "corpus"), "--vocab-size", "400"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "tokens" in first and str(tmp_path / "corpus" / "train") in first and "reusing" not in first
    assert main(command) == 0
    assert "reusing" in capsys.readouterr().out


def test_curves_hold_the_records_in_order(metrics: Path) -> None:
    curves = read_curves(metrics, "run")
    assert [point.iteration for point in curves.training] == list(range(1, 31))
    assert curves.validation[0] == Point(10, 81920, 15.0, pytest.approx(7.1))


def test_a_repeated_iteration_counts_as_last_written(metrics: Path) -> None:
    with metrics.open("a") as handle:
        handle.write(record("validation", 20, 3.0) + "\n")
    assert [point.loss for point in read_curves(metrics, "run").validation] == pytest.approx([7.1, 3.0, 5.1])


def test_a_line_cut_off_by_a_crash_and_missing_losses_are_left_out(metrics: Path) -> None:
    with metrics.open("a") as handle:
        handle.write(record("train", 31, None) + "\n" + record("test", 31, 1.0) + "\n" + record("train", 32, 1.0)[:25])
    assert len(read_curves(metrics, "run").training) == 30


def test_damage_in_the_middle_is_reported_with_its_line(metrics: Path) -> None:
    lines = metrics.read_text().splitlines()
    lines[4] = "{"
    metrics.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 5"):
        read_curves(metrics, "run")
    metrics.write_text("")
    with pytest.raises(ValueError, match="no losses yet"):
        read_curves(metrics, "run")


def test_plot_of_two_runs(metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "loss.png"
    assert main(["plot", f"acco={metrics}", str(metrics), "--out", str(out), "--title", "two runs"]) == 0
    data = out.read_bytes()
    assert data.startswith(PNG) and len(data) > 20_000
    assert [path.name for path in out.parent.iterdir()] == ["loss.png"], "nothing half-written stays behind"
    assert str(out) in capsys.readouterr().out


def test_plot_with_an_unknown_suffix_leaves_nothing(metrics: Path, tmp_path: Path) -> None:
    assert main(["plot", str(metrics), "--out", str(tmp_path / "plots" / "loss.pgn")]) == 2
    assert not list((tmp_path / "plots").iterdir())


DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))


def documented_commands(name: str) -> list[list[str]]:
    """The commands that begin with `name` in the fenced parts of README and docs."""
    found = []
    for page in [*DOCS, Path(__file__).parents[2] / "README.md"]:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == [name] and "..." not in words:
                    found.append(words[1:])
    return found


def test_the_commands_in_the_documentation_are_understood() -> None:
    commands = documented_commands("megatron-acco")
    assert {words[0] for words in commands} >= {"preprocess-data", "evaluate", "generate", "export", "import"}
    for words in commands:
        build_parser().parse_args(words)
