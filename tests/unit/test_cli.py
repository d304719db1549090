"""The console command: arguments, exit codes, loss curves and plot, text from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from megatron_acco.cli import generate
from megatron_acco.cli.main import main
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tokenizer and a checkpoint as pretrain_gpt_acco.py writes it (weights as initialized)."""
    from megatron.core import parallel_state

    from megatron_acco.training.model import ModelOptions, build_model

    folder = tmp_path_factory.mktemp("trained")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text with a few words in it", "and another line of it"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=40,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    generate._one_process()
    torch.manual_seed(0)
    options = ModelOptions(num_layers=1, hidden_size=32, num_attention_heads=2, max_position_embeddings=16)
    model = build_model(dataclasses.replace(options, use_cpu_initialization=True), 128)
    identity = {"model": {**dataclasses.asdict(options), "padded_vocab_size": 128}}
    step = folder / "checkpoints" / "global_step3"
    step.mkdir(parents=True)
    torch.save(
        {"module": model.state_dict(), "megatron_acco": {"identity": identity}}, step / "mp_rank_00_model_states.pt"
    )
    (folder / "checkpoints" / "latest").write_text("global_step3")
    yield folder
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def command(trained: Path, *more: str) -> list[str]:
    return [
        *("generate", "--checkpoint", str(trained / "checkpoints")),
        *("--tokenizer-model", str(trained / "tokenizer.model"), *more),
    ]


def test_generate_repeats_with_the_seed_and_goes_past_the_longest_sequence(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(command(trained, "--prompt", "some text", "--tokens", "40", "--seed", seed)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("some text") for text in texts)


def test_generate_samples_only_ids_of_the_tokenizer_and_ends_at_the_end_of_a_document(trained: Path) -> None:
    model, longest, rows = generate.load_model(generate.find_model_file(trained / "checkpoints"))
    assert (longest, rows) == (16, 128)
    common: dict[str, Any] = {"longest": longest, "temperature": 1.0, "top_k": 0}
    ids = generate.sample(model, [2], count=300, vocabulary=40, end=-1, seed=0, **common)
    assert len(ids) == 300 and max(ids) < 40
    ended = generate.sample(model, [2], count=300, vocabulary=40, end=ids[5], seed=0, **common)
    assert ended == ids[: ids.index(ids[5])]


def test_temperature_zero_takes_the_likeliest(trained: Path) -> None:
    model, longest, _ = generate.load_model(generate.find_model_file(trained / "checkpoints"))
    ids = [2, 5, 7]
    first = generate.sample(
        model, ids, count=1, longest=longest, vocabulary=40, end=-1, temperature=0.0, top_k=0, seed=0
    )
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), torch.arange(3).unsqueeze(0), None)
    assert first == [int(logits[0, -1, :40].argmax())]
    assert first == generate.sample(
        model, ids, count=1, longest=longest, vocabulary=40, end=-1, temperature=0.5, top_k=1, seed=9
    )


def test_generate_writes_a_file(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "sample.txt"
    assert main(command(trained, "--tokens", "5", "--out", str(out))) == 0
    assert out.read_text().strip()
    assert [path.name for path in tmp_path.iterdir()] == ["sample.txt"]


def test_generate_refuses_what_it_cannot_use(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ["--tokenizer-model", str(trained / "tokenizer.model")]
    (tmp_path / "other").mkdir()
    torch.save({"model": {}}, tmp_path / "other" / "mp_rank_00_model_states.pt")
    (tmp_path / "cut").mkdir()
    whole = (trained / "checkpoints" / "global_step3" / "mp_rank_00_model_states.pt").read_bytes()
    (tmp_path / "cut" / "mp_rank_00_model_states.pt").write_bytes(whole[: len(whole) // 2])
    for folder, message in (("none", "no checkpoint there"), ("other", "was not written by"), ("cut", "damaged")):
        assert main(["generate", "--checkpoint", str(tmp_path / folder), *tokenizer]) == 2
        assert message in capsys.readouterr().err
    assert main(command(trained, "--tokens", "0")) == 2
