"""preprocess-data: raw text to indexed files.

The reference is the plain loop that such tools run: megatron-core's tokenizer on one document after the other, and its
`IndexedDatasetBuilder`. Files are compared byte for byte. Covers CASES B49, B50, B52.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import sentencepiece
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_acco.cli.main import main
from megatron_acco.preprocess import encode, inputs, pipeline
from megatron_acco.preprocess.encode import BatchEncoder, SentencePieceEncoder
from megatron_acco.preprocess.metadata import check_metadata, describe_tokenizer, metadata_path
from megatron_acco.preprocess.options import PreprocessOptions
from megatron_acco.preprocess.pipeline import Summary, dataset_prefix, preprocess
from megatron_acco.preprocess.vocabulary import train_tokenizer
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()  # never changes
WORDS = TEXT.split()


def sentences(number: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randrange(1, 60))) for _ in range(number)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "sp.model"
    path.write_bytes(train_tokenizer([TEXT], 600))
    return str(path)


@pytest.fixture
def tokenizer(model: str) -> TokenizerOptions:
    return TokenizerOptions("SentencePieceTokenizer", model)


def write_jsonl(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def run(
    tokenizer: TokenizerOptions, given: str | list[str], prefix: Path, log: list[str] | None = None, **more: Any
) -> Summary:
    paths = [given] if isinstance(given, str) else given
    options = PreprocessOptions(paths, str(prefix), **{"append_eod": True, "workers": 1, **more})
    return preprocess(options, tokenizer, (log if log is not None else []).append)


def refused(message: str, tokenizer: TokenizerOptions, given: str | list[str], prefix: Path, **more: Any) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError)) as caught:
        run(tokenizer, given, prefix, **more)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def plain_loop(options: TokenizerOptions, texts: Sequence[str], prefix: Path, eod: bool = True) -> None:
    tokenizer = build_tokenizer(options)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for text in texts:
        ids = tokenizer.tokenize(text)
        if ids:
            ids = [*ids, tokenizer.eod] if eod else ids
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def outputs(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return content(dataset_prefix(str(prefix), key))


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(dataset_prefix(str(prefix), key))
    return [dataset[i].tolist() for i in range(len(dataset))]


# ---- the output ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eod", [True, False])
def test_files_are_those_of_the_plain_loop(tmp_path: Path, tokenizer: TokenizerOptions, eod: bool) -> None:
    """CASES B49, with workers 1 and 4."""
    texts = ["", "a", "größer 大きい \U0001f600", TEXT, "x" * 100_000, *sentences(3000), "  ", "\n"]
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    plain_loop(tokenizer, texts, tmp_path / "plain", eod)
    for workers, partitions in ((1, None), (4, 1), (2, 17)):
        prefix = tmp_path / f"out{workers}"
        summary = run(tokenizer, path, prefix, workers=workers, partitions=partitions, append_eod=eod)
        assert outputs(prefix) == content(tmp_path / "plain")
        assert summary.counts.documents == len(texts) and summary.counts.empty == 1
    end = build_tokenizer(tokenizer).eod
    ids = documents(tmp_path / "out4")
    assert all(document.count(end) == eod and (document[-1] == end) == eod for document in ids)
    size = (tmp_path / "out4_text_document.bin").stat().st_size
    assert size == 2 * sum(map(len, ids))
    record = json.loads((tmp_path / "out4_text_document.meta.json").read_text())
    assert (
        (record["documents"], record["tokens"])
        == (len(ids), size // 2)
        == summary.prefixes[str(tmp_path / "out2_text_document")]
    )
    assert record["append_eod"] == eod and record["tokenizer"] == describe_tokenizer(build_tokenizer(tokenizer))
    assert sorted(path.name for path in tmp_path.glob("out4*")) == [
        f"out4_text_document.{suffix}" for suffix in ("bin", "idx", "meta.json")
    ]


def test_each_key_becomes_a_dataset(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    records = [{"title": f"title {i}", "body": [f"first {i}", "", f"second {i}"]} for i in range(5)]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, records)))  # empty lines, no line end at the end
    run(tokenizer, str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["title", "body"])
    built = build_tokenizer(tokenizer)
    assert documents(tmp_path / "out", "title") == [[*built.tokenize(r["title"]), built.eod] for r in records]
    body = IndexedDataset(str(tmp_path / "out_body_document"))
    assert body.document_indices.tolist() == [0, 2, 4, 6, 8, 10]
    assert body[0].tolist() == built.tokenize("first 0")
    assert body[1].tolist() == [*built.tokenize("second 0"), built.eod]


@pytest.mark.parametrize("vocabulary", [65_499, 65_500, 65_536, 70_000])
def test_token_width_holds_the_vocabulary(tmp_path: Path, vocabulary: int) -> None:
    """CASES B50: the largest id is in the data; the end-of-document id is one more."""
    null = TokenizerOptions("NullTokenizer", vocab_size=vocabulary - 1)
    path = write_jsonl(tmp_path / "in.jsonl", [f"0 1 {vocabulary - 2}"])
    run(null, path, tmp_path / "out")
    assert documents(tmp_path / "out") == [[0, 1, vocabulary - 2, vocabulary - 1]]
    dtype = json.loads((tmp_path / "out_text_document.meta.json").read_text())["dtype"]
    assert dtype == ("uint16" if vocabulary < 65_500 else "int32")
    write_jsonl(tmp_path / "in.jsonl", ["1 2", f"0 {vocabulary}"])
    refused(f"in.jsonl:2: cannot be tokenized: the tokenizer gave the id {vocabulary}", null, path, tmp_path / "bad")
    assert not list(tmp_path.glob("bad_*"))


# ---- tokenizers ---------------------------------------------------------------------------------------------------

LETTERS = "ab c  \n\t▁é日ﬁ\u0301\u00a0½x01</s>e_=.(\x00\U0001f600Å"


def fuzz(number: int) -> list[str]:
    generator = random.Random(1)
    return ["".join(generator.choices(LETTERS, k=generator.randrange(120))) for _ in range(number)]


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, "SentencePiece word table"),
        ({**IDENTITY, "byte_fallback": True}, "SentencePiece word table"),
        ({**IDENTITY, "add_dummy_prefix": False, "user_defined_symbols": ["\n"]}, "SentencePiece word table"),
        ({**IDENTITY, "user_defined_symbols": ["\n\t", "  x", "é日"]}, "SentencePiece word table"),
        ({"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False}, "SentencePiece word table"),
        ({"model_type": "unigram"}, "SentencePiece batches"),
        ({"split_by_whitespace": False}, "SentencePiece batches"),
        ({"user_defined_symbols": ["a b"]}, "SentencePiece batches"),
        ({"treat_whitespace_as_suffix": True}, "SentencePiece batches"),
    ],
)
def test_sentencepiece_in_batches_gives_its_own_ids(settings: dict[str, Any], way: str) -> None:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{"model_type": "bpe", "vocab_size": 500, "minloglevel": 2, **settings},
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=made,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    encoder = SentencePieceEncoder(processor, numpy.uint16)
    assert encoder.way == way
    texts = [*fuzz(1500), TEXT, *sentences(50)]
    for _ in range(2):  # unknown words, then known ones
        assert encoder.encode(texts) == [encoder.pack(processor.encode(text)) for text in texts]


def test_the_word_table_stays_small(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(encode, "_TABLE_ENTRIES", 100)
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    table = encode._WordTable.of(processor, SentencePieceEncoder(processor, numpy.uint16).pack_all)
    assert table is not None
    for text in sentences(300):
        assert table.encode([text]) == [numpy.array(processor.encode(text), numpy.uint16).tobytes()]
        assert len(table._table) <= 200


def huggingface(folder: Path) -> TokenizerOptions:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder / "hf")
    return TokenizerOptions("HuggingFaceTokenizer", str(folder / "hf"))


def tiktoken(folder: Path) -> TokenizerOptions:
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([i]) for i in range(256)), b"th", b" th", b"in", b" the"]
    described = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="replace")}
        for i, t in enumerate(tokens)
    ]
    (folder / "tiktoken.json").write_text(json.dumps(described))
    return TokenizerOptions("TikTokenizer", str(folder / "tiktoken.json"))


@pytest.mark.parametrize(
    ("make", "way"), [(huggingface, "Hugging Face batches"), (tiktoken, "tiktoken arrays")], ids=["hf", "tiktoken"]
)
def test_other_tokenizers_give_their_own_ids(tmp_path: Path, make: Any, way: str) -> None:
    options = make(tmp_path)
    assert BatchEncoder(build_tokenizer(options), numpy.int32).way == way
    texts = [*fuzz(300), TEXT, *sentences(50), "<|end|>"]
    plain_loop(options, texts, tmp_path / "plain")
    for workers in (1, 2):
        run(options, write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / f"out{workers}", workers=workers)
        assert outputs(tmp_path / f"out{workers}") == content(tmp_path / "plain")


def test_a_huggingface_tokenizer_puts_nothing_around_a_text(tmp_path: Path) -> None:
    """megatron-core's default differs from release to release: one would begin each text with an id of its own."""
    options = huggingface(tmp_path)
    from tokenizers import Tokenizer, processors

    plain = list(build_tokenizer(options).tokenize(TEXT))
    file = str(tmp_path / "hf" / "tokenizer.json")
    own = Tokenizer.from_file(file)
    end = own.token_to_id("<|end|>")
    own.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    own.save(file)
    assert own.encode(TEXT).ids == [end, *plain]
    assert list(build_tokenizer(options).tokenize(TEXT)) == plain


def test_tiktoken_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    options = tiktoken(tmp_path)
    assert build_tokenizer(options).vocab_size == 1260
    with pytest.raises(ValueError, match="--vocab-size 5000 does not fit"):
        build_tokenizer(TokenizerOptions("TikTokenizer", options.tokenizer_model, vocab_size=5000))
    (tmp_path / "bad.json").write_text("7")
    with pytest.raises(ValueError, match="not a JSON list"):
        build_tokenizer(TokenizerOptions("TikTokenizer", str(tmp_path / "bad.json")))


def test_a_trained_tokenizer_comes_with_the_data(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [TEXT, *sentences(200), "größer 大きい"])
    wanted = TokenizerOptions("SentencePieceTokenizer", vocab_size=500)
    run(wanted, path, tmp_path / "out", train_tokenizer=True)
    trained = TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "out.model"), 500)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out.model"))
    assert processor.decode(documents(tmp_path / "out")[0][:-1]) == TEXT
    check_metadata(str(tmp_path / "out_text_document"), describe_tokenizer(build_tokenizer(trained)))
    there = TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "out.model"), vocab_size=500)
    refused("out.model exists; move it away", there, path, tmp_path / "b", train_tokenizer=True)
    refused(
        "needs --vocab-size", TokenizerOptions("SentencePieceTokenizer"), path, tmp_path / "b", train_tokenizer=True
    )
    refused("not a NullTokenizer", TokenizerOptions("NullTokenizer"), path, tmp_path / "b", train_tokenizer=True)
    big = TokenizerOptions("SentencePieceTokenizer", vocab_size=500_000)
    refused("cannot train 500000 pieces", big, path, tmp_path / "b", train_tokenizer=True)
    assert not list(tmp_path.glob("b*"))


def test_a_tokenizer_without_end_of_document_is_refused_before_any_output(tmp_path: Path) -> None:
    """CASES B52."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=300,
        eos_id=-1,
        minloglevel=2,
    )
    bad = TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "sp.model"))
    refused("has no end-of-document", bad, write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_ids_of_the_tokenizer_are_its_own(tmp_path: Path) -> None:
    """CASES B52: special ids that are not the usual ones."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=300,
        unk_id=5,
        bos_id=-1,
        eos_id=7,
        pad_id=0,
        minloglevel=2,
    )
    options = TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "sp.model"))
    run(options, write_jsonl(tmp_path / "in.jsonl", ["a b", "c"]), tmp_path / "out")
    assert [document[-1] for document in documents(tmp_path / "out")] == [7, 7]
    record = json.loads(metadata_path(tmp_path / "out_text_document").read_text())["tokenizer"]
    assert (record["eod"], record["bos"], record["vocab_size"]) == (7, None, 300)


# ---- long documents -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (encode, inputs):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 4000)
    monkeypatch.setattr(inputs, "TASK_BYTES", 3000)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama", "unigram", "hf", "tiktoken"])
@pytest.mark.usefixtures("small_pieces")
def test_a_document_in_pieces_has_the_ids_of_the_whole(tmp_path: Path, model: str, kind: str) -> None:
    if kind in ("hf", "tiktoken"):
        options = huggingface(tmp_path) if kind == "hf" else tiktoken(tmp_path)
    else:
        options = TokenizerOptions("SentencePieceTokenizer", model)
    if kind in ("llama", "unigram"):  # both with SentencePiece's space before every text
        more = IDENTITY if kind == "llama" else {"model_type": "unigram"}
        sentencepiece.SentencePieceTrainer.train(
            **{"model_type": "bpe", "vocab_size": 400, "minloglevel": 2, **more},
            sentence_iterator=iter(TEXT.splitlines()),
            model_prefix=str(tmp_path / "sp"),
        )
        options = TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "sp.model"))
    text = "\n".join([TEXT, *sentences(400), "größer  大きい \t " * 300])
    (tmp_path / "in.txt").write_text(text)
    plain_loop(options, [text], tmp_path / "plain")
    encoder = BatchEncoder(build_tokenizer(options), numpy.int32)
    assert len(list(encoder.pieces(text))) > 10
    for workers in (1, 2):
        run(options, str(tmp_path / "in.txt"), tmp_path / f"text{workers}", workers=workers)
        assert outputs(tmp_path / f"text{workers}") == content(tmp_path / "plain")
    write_jsonl(tmp_path / "in.jsonl", [text])
    run(options, str(tmp_path / "in.jsonl"), tmp_path / "lines")
    assert outputs(tmp_path / "lines") == content(tmp_path / "plain")


@pytest.mark.usefixtures("small_pieces")
def test_what_cannot_be_cut_has_a_limit(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    limit = 20_000 / (1 << 20)
    (tmp_path / "in.txt").write_text("x" * 30_000)
    refused(
        "in.txt: this tokenizer gives no place",
        tokenizer,
        str(tmp_path / "in.txt"),
        tmp_path / "o",
        document_limit_mb=limit,
    )
    path = write_jsonl(tmp_path / "in.jsonl", ["a", "y" * 30_000, "b"])
    refused("in.jsonl:2: longer than", tokenizer, path, tmp_path / "o", document_limit_mb=limit)
    assert not list(tmp_path.glob("o_*"))
    summary = run(tokenizer, path, tmp_path / "o", document_limit_mb=limit, skip_bad_lines=True)
    assert (summary.counts.documents, summary.counts.bad) == (2, 1)
    built = build_tokenizer(tokenizer)
    assert documents(tmp_path / "o") == [[*built.tokenize(text), built.eod] for text in ("a", "b")]


# ---- inputs -------------------------------------------------------------------------------------------------------


def test_formats_and_folders_in_the_order_of_names(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    parts = [sentences(30, seed) for seed in range(4)]
    folder = tmp_path / "in"
    (folder / "d").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", parts[0])
    lines = Path(write_jsonl(tmp_path / "b", parts[1])).read_bytes()
    # Two members in one file, as parallel compressors write them.
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:700]) + gzip.compress(lines[700:]))
    for name, text in (("1.txt", TEXT), ("2.md", "\ufeffx\r\ny\n"), ("3.txt", "")):
        (folder / "d" / name).write_bytes(text.encode())
    (folder / "d" / "4.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (folder / ".hidden.txt").write_text("no")
    (folder / "e.csv").write_text("no")
    texts = [*parts[0], *parts[1], TEXT, "x\r\ny\n", "zipped"]
    given = [str(folder)]
    if importlib.util.find_spec("zstandard"):
        import zstandard

        lines = Path(write_jsonl(tmp_path / "c", parts[2])).read_bytes()
        frames = [zstandard.compress(lines[:500]), zstandard.compress(lines[500:])]
        (tmp_path / "c.jsonl.zst").write_bytes(b"".join(frames))
        given.append(str(tmp_path / "*.zst"))
        texts += parts[2]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"id": list(range(30)), "text": parts[3]})
        pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=7)
        given.append(str(tmp_path / "d.parquet"))
        texts += parts[3]
    plain_loop(tokenizer, texts, tmp_path / "plain")
    summary = run(tokenizer, given, tmp_path / "out", partitions=30)
    assert outputs(tmp_path / "out") == content(tmp_path / "plain")
    assert summary.counts.empty == 1 and summary.counts.documents == len(texts) + 1


def test_hugging_face_datasets(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    datasets = pytest.importorskip("datasets")
    texts = sentences(600)
    part = datasets.Dataset.from_dict({"text": texts, "n": list(range(600))})
    datasets.DatasetDict({"train": part}).save_to_disk(tmp_path / "saved")
    plain_loop(tokenizer, texts, tmp_path / "plain")
    refused("holds several datasets; name one", tokenizer, str(tmp_path / "saved"), tmp_path / "o")
    refused("holds int64, not text", tokenizer, str(tmp_path / "saved/train"), tmp_path / "o", json_keys=["n"])
    run(tokenizer, str(tmp_path / "saved/train"), tmp_path / "o", workers=2)
    assert outputs(tmp_path / "o") == content(tmp_path / "plain")


def test_inputs_that_cannot_be_are_refused_before_any_output(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["a"])
    (tmp_path / "data.csv").write_text("a")
    (tmp_path / "folder").mkdir()
    out = tmp_path / "out"
    refused("nothing.jsonl: no such file", tokenizer, [good, str(tmp_path / "nothing.jsonl")], out)
    refused("data.csv: its name does not say", tokenizer, str(tmp_path / "data.csv"), out)
    refused("no file with a known suffix", tokenizer, str(tmp_path / "folder"), out)
    refused("is a folder; add the beginning", tokenizer, good, tmp_path / "folder")
    (tmp_path / "a.txt").write_text("a")
    refused("which has no fields", tokenizer, str(tmp_path / "a.txt"), out, json_keys=["a", "b"])
    refused("a key is given twice", tokenizer, good, out, json_keys=["a", "a"])
    refused("--workers must be above 0", tokenizer, good, out, workers=0)
    refused("no such file", TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "none")), good, out)
    refused("cannot be written", tokenizer, good, tmp_path / "a.txt" / "out")
    assert not list(tmp_path.glob("out*"))
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "t.parquet")
        refused("no column 'text', only body, n", tokenizer, str(tmp_path / "t.parquet"), out)
        refused("holds int64, not text", tokenizer, str(tmp_path / "t.parquet"), out, json_keys=["n"])
        (tmp_path / "u.parquet").write_text("a")
        refused("not a readable parquet file", tokenizer, str(tmp_path / "u.parquet"), out)


def test_a_damaged_archive_is_named(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    whole = gzip.compress(b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(9999)))
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    refused("in.jsonl.gz cannot be read to its end", tokenizer, str(tmp_path / "in.jsonl.gz"), tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))


BAD = [
    (b'{"text": "a"', "not JSON"),
    (b"[1]", "not a JSON object but a list"),
    (b'{"title": "a"}', "no key 'text', only 'title'"),
    (b'{"text": null}', "the value of 'text' is null, not text"),
    (b'{"text": 7}', "the value of 'text' is a number, not text"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (rb'{"text": "\ud800"}', "holds half of a surrogate pair"),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_reported_with_file_and_number(
    tmp_path: Path, tokenizer: TokenizerOptions, line: bytes, message: str, workers: int
) -> None:
    """CASES B49."""
    good = [json.dumps({"text": f"text {i}"}).encode() for i in range(6)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*good[:3], b"", line, *good[3:]]))
    refused(f"in.jsonl:5: {message}", tokenizer, str(path), tmp_path / "out", workers=workers)
    assert not list(tmp_path.glob("out_*"))
    log: list[str] = []
    summary = run(tokenizer, str(path), tmp_path / "out", log, workers=workers, skip_bad_lines=True)
    assert (summary.counts.bad, summary.counts.documents) == (1, 6) and len(documents(tmp_path / "out")) == 6
    assert any("left out" in entry and f"in.jsonl:5: {message}" in entry for entry in log)


def test_input_without_text_makes_no_dataset(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    refused(
        "the input holds no text for 'text'", tokenizer, write_jsonl(tmp_path / "in.jsonl", ["", ""]), tmp_path / "o"
    )
    assert not list(tmp_path.glob("o*"))


# ---- interruptions ------------------------------------------------------------------------------------------------


def test_a_run_continues_at_the_last_finished_partition(
    tmp_path: Path, tokenizer: TokenizerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "TASK_BYTES", 5000)
    # Python 3.12 reads 128 KiB of a compressed file at once, all of this one.
    monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", io.DEFAULT_BUFFER_SIZE, raising=False)
    texts = sentences(600)
    gz, plain = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    gz.write_bytes(gzip.compress(Path(write_jsonl(tmp_path / "a", texts[:300])).read_bytes()))
    write_jsonl(plain, texts[300:])
    plain_loop(tokenizer, texts, tmp_path / "whole")
    given = [str(gz), str(plain)]
    tokenized: list[int] = []
    real = pipeline.Worker.run

    def interrupt_after(number: int) -> None:
        tokenized.clear()

        def worker(self: Any, task: Any) -> Any:
            if len(tokenized) == number:
                raise KeyboardInterrupt
            tokenized.append(task.first)
            return real(self, task)

        monkeypatch.setattr(pipeline.Worker, "run", worker)

    interrupts = 0
    while True:
        interrupt_after(9)  # more tasks than one partition has
        log: list[str] = []
        try:
            summary = run(tokenizer, given, tmp_path / "out", log, partitions=40)
            break
        except KeyboardInterrupt:
            interrupts += 1
            assert not list(tmp_path.glob("out_*")) and (tmp_path / "out.preprocess").is_dir()
            assert interrupts < 40
        if interrupts > 1:
            assert "continuing an interrupted run" in log[0]
    assert interrupts >= 3 and summary.resumed and summary.counts.documents == 600
    assert outputs(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out.preprocess").exists()


@pytest.mark.parametrize("change", ["input", "eod", "lost file"])
def test_an_interrupted_run_of_something_else_is_not_continued(
    tmp_path: Path, tokenizer: TokenizerOptions, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(inputs, "TASK_BYTES", 2000)
    texts = sentences(100)
    path = tmp_path / "in.jsonl"
    write_jsonl(path, texts)
    with path.open("a") as handle:
        handle.write("bad\n")
    refused("in.jsonl:101: not JSON", tokenizer, str(path), tmp_path / "out", partitions=20)
    assert (tmp_path / "out.preprocess" / "state.json").exists()
    if change == "input":
        texts[0] = "another text"
        write_jsonl(path, texts)
    if change == "lost file":
        (tmp_path / "out.preprocess" / "text.bin").unlink()
    log: list[str] = []
    run(tokenizer, str(path), tmp_path / "out", log, skip_bad_lines=True, append_eod=change != "eod")
    assert any("starting over" in entry for entry in log)
    plain_loop(tokenizer, texts, tmp_path / "plain", change != "eod")
    assert outputs(tmp_path / "out") == content(tmp_path / "plain")


def test_a_killed_run_leaves_no_process_and_is_continued(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    texts = sentences(12_000)
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    plain_loop(tokenizer, texts, tmp_path / "plain")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=run_slowly, args=(tokenizer, path, tmp_path / "out"))
    child.start()
    state = tmp_path / "out.preprocess" / "state.json"
    deadline = time.monotonic() + 60
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = children_of(child.pid)
    assert len(workers) == 2
    os.kill(child.pid, signal.SIGKILL)
    child.join(timeout=30)
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(running, workers)) and not list(tmp_path.glob("out_*"))
    assert run(tokenizer, path, tmp_path / "out", workers=2).resumed
    assert outputs(tmp_path / "out") == content(tmp_path / "plain")


def run_slowly(tokenizer: TokenizerOptions, path: str, prefix: Path) -> None:
    inputs.TASK_BYTES = 20_000
    real = pipeline._Job._keep

    def keep(self: Any) -> None:
        real(self)
        time.sleep(1)

    pipeline._Job._keep = keep  # type: ignore[method-assign]
    run(tokenizer, path, prefix, workers=2, partitions=20)


def children_of(pid: int | None) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_outputs_appear_together_and_are_not_overwritten_by_accident(
    tmp_path: Path, tokenizer: TokenizerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["a b"])
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        run(tokenizer, path, tmp_path / "out")
    assert not (tmp_path / "out_text_document.idx").exists()  # no reader takes it for a dataset
    run(tokenizer, path, tmp_path / "out")
    before = outputs(tmp_path / "out")
    write_jsonl(tmp_path / "in.jsonl", ["c d e"])
    refused("exists; move it away or give --overwrite", tokenizer, path, tmp_path / "out")
    assert outputs(tmp_path / "out") == before
    run(tokenizer, path, tmp_path / "out", overwrite=True)
    assert outputs(tmp_path / "out") != before


def test_two_runs_do_not_write_the_same_files(tmp_path: Path, tokenizer: TokenizerOptions) -> None:
    (tmp_path / "out.preprocess").mkdir()
    path = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pipeline._locked(tmp_path / "out.preprocess"):
        refused("in use by another preprocess-data", tokenizer, path, tmp_path / "out")


MEMORY = """
import json, re, sys
from pathlib import Path
from megatron_acco.preprocess.options import PreprocessOptions
from megatron_acco.preprocess.pipeline import preprocess
from megatron_acco.training.tokenizer import TokenizerOptions
folder, model = sys.argv[1:]
peaks = []
for name in ("small", "large"):
    options = PreprocessOptions([f"{folder}/{name}.jsonl"], f"{folder}/{name}", workers=1, append_eod=True)
    preprocess(options, TokenizerOptions("SentencePieceTokenizer", model), lambda line: None)
    peaks.append(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)))
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path, model: str) -> None:
    # Short documents: the builder's lists of them alone would be 18 MB.
    line = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXT.splitlines() if 20 < len(text) < 60)
    for name, size in (("small", 8e6), ("large", 24e6)):
        (tmp_path / f"{name}.jsonl").write_bytes(line * int(size / len(line)))
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), model], capture_output=True, text=True, timeout=300, check=True
    )
    small, large = json.loads(result.stdout.splitlines()[-1])
    assert large - small < 6_000, f"peak memory grew from {small} to {large} kB"


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", sentences(2500))
    command = ["preprocess-data", "--input", path, "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    assert main([*command, "--append-eod", "--log-interval", "1000"]) == 0
    printed = capsys.readouterr().out
    assert "2,500 documents read" in printed and "documents/s" in printed and "100.0 %" in printed
    assert len(documents(tmp_path / "out")) == 2500
    assert main(command) == 2
    assert "exists; move it away" in capsys.readouterr().err
