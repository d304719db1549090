"""A trained model in one process: its loading, sampling with and without cache, scores against the formula."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from megatron_acco.cli.main import main
from megatron_acco.inference import loading, sampling, scoring
from megatron_acco.inference.sampling import SamplingOptions


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tokenizer and a checkpoint as pretrain_gpt_acco.py writes it (weights as initialized)."""
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
    own = loading.one_process()
    own.__enter__()
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
    own.__exit__(None, None, None)


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


def load(trained: Path, dtype: str | None = None) -> Any:
    return loading.load(trained / "checkpoints", {"tokenizer_model": str(trained / "tokenizer.model")}, dtype)


def test_the_loaded_model_has_a_row_per_id_of_the_tokenizer_and_samples_until_the_end(trained: Path) -> None:
    loaded = load(trained)
    size = loaded.tokenizer.vocab_size
    assert size < 128 and loaded.longest == 16 and loaded.weights.rows == 128 and loaded.weights.iteration == 3
    common: dict[str, Any] = {"longest": 16, "options": SamplingOptions(temperature=1.0, top_k=0)}
    [ids] = sampling.generate(loaded.model, [[2]], count=300, end=-1, **common)
    assert len(ids) == 300 and max(ids) < size
    [ended] = sampling.generate(loaded.model, [[2]], count=300, end=ids[5], **common)
    assert ended == ids[: ids.index(ids[5])]


PROMPTS = [[2, 5, 7], [2], [2, 9, 9, 4, 11]]


def test_with_and_without_cache_batched_and_alone_are_the_same(trained: Path) -> None:
    """Learned positions: a prompt padded on the left must still begin at position 0."""
    model = load(trained).model
    with torch.no_grad():  # no token must be far likelier than all others, whatever stands before it
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    for options in (SamplingOptions(temperature=0.0), SamplingOptions(temperature=1.0, top_k=8, top_p=0.9, seed=3)):
        common: dict[str, Any] = {"count": 9, "longest": 16, "end": -1, "options": options}
        together = sampling.generate(model, PROMPTS, **common)
        assert together == sampling.generate(model, PROMPTS, cache=False, **common)
        assert together == sampling.generate(model, PROMPTS, batch_size=2, **common)
        assert len({tuple(ids) for ids in together}) == 3
        if options.temperature == 0.0:
            alone = [sampling.generate(model, [prompt], **common)[0] for prompt in PROMPTS]
            assert together == alone
    # The oracle: the likeliest after the whole text, one token after the other.
    text = list(PROMPTS[0])
    for _ in range(9):
        with torch.inference_mode():
            text.append(int(model(torch.tensor([text]), torch.arange(len(text)).unsqueeze(0), None)[0, -1].argmax()))
    assert sampling.generate(model, PROMPTS, **{**common, "options": SamplingOptions(0.0)})[0] == text[3:]


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    draws: dict[str, set[int]] = {}
    for name, options in {
        "all": SamplingOptions(1.0, 0),
        "top_k": SamplingOptions(1.0, 2),
        "top_p": SamplingOptions(1.0, 0, 0.65),
        "both": SamplingOptions(1.0, 3, 0.3),
        "cold": SamplingOptions(1e-3, 0),
    }.items():
        generator = torch.Generator().manual_seed(0)
        draws[name] = {sampling.choose(logits, options, generator) for _ in range(200)}
    assert draws == {"all": {0, 1, 2, 3}, "top_k": {0, 1}, "top_p": {0, 1}, "both": {0}, "cold": {0}}
    with pytest.raises(ValueError, match="--top-p must be above 0"):
        SamplingOptions(top_p=0.0)


def test_seeds_share_no_random_numbers_and_extreme_temperatures_are_right() -> None:
    """A run of many prompts with seed 1 must not repeat those of seed 0, moved by one."""
    drawn = [
        tuple(torch.rand(2, generator=sampling.stream(seed, number)).tolist())
        for seed in range(4)
        for number in range(4)
    ]
    assert len(set(drawn)) == 16
    assert drawn[5] == tuple(torch.rand(2, generator=sampling.stream(1, 1)).tolist())
    logits = torch.tensor([1.0, 3.0, 2.0]) * 1e3
    for temperature in (1e-38, 1e-3, 0.0):
        assert sampling.choose(logits, SamplingOptions(temperature, 0), sampling.stream(0, 0)) == 1
    flat = {
        sampling.choose(logits, SamplingOptions(1e30, 99, 1.0), generator) for generator in [sampling.stream(0, 0)] * 64
    }
    assert flat == {0, 1, 2}
    for wrong in ({"temperature": math.nan}, {"temperature": math.inf}, {"seed": -1}, {"top_p": math.nan}):
        with pytest.raises(ValueError, match=r"--te|--seed|--top-p"):
            SamplingOptions(**wrong)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """Text may hold separators, form feeds and next-line characters, and begin with a byte order mark."""
    from megatron_acco.cli.generate import read_prompts

    text = "one\u2028two\x85three\x0cfour five"
    passages, prompts, plain = (tmp_path / name for name in ("passages.jsonl", "prompts.jsonl", "prompts.txt"))
    passages.write_text("\ufeff" + json.dumps({"text": text}, ensure_ascii=False) + "\r\n\n")
    prompts.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    plain.write_text(f"{text}\r\n\nlast")
    assert scoring.read_passages(passages, "text") == [(text.removesuffix(" five"), " five")]
    assert read_prompts(None, prompts) == [text]
    assert read_prompts(None, plain) == [text, "", "last"]
    prompts.write_text('{"prompt": "a"}\n{"prompt": ["b"]}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: not a JSON object with a text"):
        read_prompts(None, prompts)


def test_what_is_wrong_is_told_before_the_model_is_loaded(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_loading(*args: Any) -> None:
        raise AssertionError("the model has been loaded")

    monkeypatch.setattr(loading, "load", no_loading)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some text"}\n')
    evaluate = ["evaluate", "--checkpoint", str(trained / "checkpoints")]
    cases = {
        "no such file or folder": [*evaluate, "--input", str(tmp_path / "none.jsonl")],
        "does not say what it holds": [*evaluate, "--input", str(trained / "tokenizer.vocab")],
        "none.bin\n": [*evaluate, "--data-path", str(tmp_path / "none")],
        "text.jsonl.bin; it takes what `megatron-acco preprocess-data` makes": [*evaluate, "--data-path", str(text)],
        "give the name without .idx": [*evaluate, "--data-path", str(tmp_path / "none.idx")],
        "--seq-length must be 1 or more": [*evaluate, "--input", str(text), "--seq-length", "0"],
        "no folder": [*evaluate, "--input", str(text), "--out", str(tmp_path / "none" / "scores.json")],
        "is a folder": command(trained, "--out", str(tmp_path)),
    }
    for message, words in cases.items():
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_tokenizer_that_gives_other_ids_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the same number of ids; a copy of the right one elsewhere is welcome."""
    from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer, ids_digest

    right = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(trained / "tokenizer.model")))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ti fo enil rehtona dna", "sdrow wef a htiw txet emos"] * 20),
        model_prefix=str(tmp_path / "other"),
        vocab_size=right.vocab_size,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    assert ids_digest(build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=9)).tokenize) is None
    whole = torch.load(trained / "checkpoints/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    whole["megatron_acco"]["identity"]["tokenizer"] = ids_digest(right.tokenize)
    torch.save(whole, tmp_path / "mp_rank_00_model_states.pt")
    shutil.copyfile(trained / "tokenizer.model", tmp_path / "copy.model")
    words = ["generate", "--checkpoint", str(tmp_path), "--tokens", "1", "--tokenizer-model"]
    assert main([*words, str(tmp_path / "copy.model")]) == 0
    capsys.readouterr()
    gone = str(tmp_path / "gone.model")
    assert main(["evaluate", *words[1:3], "--input", __file__, "--input-format", "text", words[-1], gone]) == 2
    assert f"--tokenizer-model {gone}: no such file" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "other.model")]) == 2
    assert "was trained with another tokenizer" in capsys.readouterr().err


def test_generate_takes_prompts_from_a_file(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "some text"}\n{"prompt": "another line of it"}\n')
    out = tmp_path / "out.jsonl"
    words = ["--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "4", "--temperature", "0", "--out", str(out)]
    assert main(command(trained, *words)) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["some text", "another line of it"]
    assert all(record["text"].startswith(record["prompt"]) for record in records)


def test_evaluate_counts_every_token_once_and_agrees_with_the_formula(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw and indexed text alike; the oracle goes through the text token by token."""
    texts = ["some text with a few words", "another line", "", "few lines in it " * 6]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ["--tokenizer-model", str(trained / "tokenizer.model")]
    words = ["preprocess-data", "--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "data")]
    words += ["--tokenizer-type", "SentencePieceTokenizer", *tokenizer, "--append-eod", "--workers", "1"]
    assert main(words) == 0
    words = ["evaluate", "--checkpoint", str(trained / "checkpoints"), *tokenizer, "--seq-length", "7"]
    words += ["--input", str(tmp_path / "text.jsonl"), "--data-path", str(tmp_path / "data_text_document")]
    assert main([*words, "--batch-size", "3", "--out", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert "bits per byte" in capsys.readouterr().out

    loaded = load(trained)
    stream = [2]
    for text in filter(None, texts):
        stream += [*loaded.tokenizer.tokenize(text), 2]
    nll = 0.0
    for index in range(1, len(stream)):
        first = (index - 1) // 7 * 7
        before = torch.tensor([stream[first:index]])
        with torch.inference_mode():
            logits = loaded.model(before, torch.arange(before.shape[1]).unsqueeze(0), None)
        nll -= float(logits[0, -1].log_softmax(-1)[stream[index]])
    size = sum(len(text.encode()) for text in texts)
    for kind in ("text", "data"):
        score = scores[kind]
        assert (score["tokens"], score["documents"]) == (len(stream) - 1, 3)
        assert score["nll"] == pytest.approx(nll, rel=1e-5)
        assert score["perplexity"] == pytest.approx(math.exp(nll / (len(stream) - 1)), rel=1e-5)
    assert scores["text"]["bytes"] == size
    assert scores["text"]["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)


def test_evaluate_predicts_last_words(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of several tokens, passages longer than the model, batches with padding; one passage at a time agrees."""
    texts = ["some text with words", "few", "another line of it", "some text with a few words in it " * 3]
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["evaluate", "--checkpoint", str(trained / "checkpoints"), "--last-word", str(file)]
    words += ["--tokenizer-model", str(trained / "tokenizer.model")]
    assert main([*words, "--out", str(tmp_path / "scores.json")]) == 0
    score = json.loads((tmp_path / "scores.json").read_text())["last_word"]
    loaded = load(trained)
    total, correct = 0.0, 0
    for context, word in scoring.read_passages(file, "text"):
        assert word.lstrip(" ") and not context.endswith(" ")
        ids, count = scoring.passage_ids(loaded.tokenizer, [2], context, word)
        assert loaded.tokenizer.detokenize(ids[-count:]) == word.strip()
        hits = []
        for index in range(len(ids) - count, len(ids)):
            first = max(0, len(ids) - 17)
            before = torch.tensor([ids[first:index]])
            with torch.inference_mode():
                logits = loaded.model(before, torch.arange(before.shape[1]).unsqueeze(0), None)[0, -1]
            total += float(logits.log_softmax(-1)[ids[index]])
            hits.append(int(logits.argmax()) == ids[index])
        correct += all(hits)
    assert (score["passages"], score["correct"]) == (4, correct)
    assert score["perplexity"] == pytest.approx(math.exp(-total / 4), rel=1e-5)

    file.write_text('{"text": "a b"}\n{"txt": "a b"}\n')
    assert main(words) == 2 and "passages.jsonl:2:" in capsys.readouterr().err
    assert main(words[:3]) == 2 and "nothing to evaluate on" in capsys.readouterr().err


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
