"""The embedded corpus.

Covers: which files are taken, the split by file, byte-for-byte repetition, the round trip text -> tokens -> text,
the end-of-document token, the width of token ids, reuse and re-making, and an interruption at every stage.
"""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from pathlib import Path

import numpy
import pytest
import sentencepiece
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_acco import corpus as corpus_module
from megatron_acco.corpus import (
    CorpusSettings,
    find_sources,
    is_validation,
    load_corpus,
    prepare_corpus,
    read_split_texts,
    standard_library,
    train_tokenizer,
    write_indexed,
)

VOCABULARY = 500


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of real Python sources, with what must be left out beside them."""
    root = tmp_path_factory.mktemp("sources")
    names = sorted(path for path in standard_library().glob("*.py") if not path.is_symlink())[:40]
    for path in names:
        (root / path.name).write_bytes(path.read_bytes())
    for folder in ("test", "site-packages/other", "package/tests", "encodings"):
        (root / folder).mkdir(parents=True)
        (root / folder / "left_out.py").write_text("left = 'out'\n")
    (root / "package" / "inside.py").write_text("# größer, 大きい\n\tx  =  1\r\n")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe4\n")
    (root / "empty.py").write_text("\n")
    (root / "linked.py").symlink_to(root / names[0].name)
    return root


@pytest.fixture
def settings(sources: Path) -> CorpusSettings:
    return CorpusSettings(str(sources), VOCABULARY, 20)


def quiet(line: str) -> None:
    """No progress."""


def test_sources_are_the_librarys_own_text(sources: Path) -> None:
    found = [path.relative_to(sources).as_posix() for path in find_sources(sources)]
    assert found == sorted(found)
    assert "package/inside.py" in found
    assert not [name for name in found if "left_out" in name or "linked" in name]


def test_this_machines_library_is_enough() -> None:
    root = standard_library()
    assert root == Path(sysconfig.get_path("stdlib"))
    texts = read_split_texts(CorpusSettings(str(root)))
    assert sum(map(len, texts["train"])) > 3_000_000
    assert len(texts["valid"]) >= 5


def test_a_file_stays_in_its_split_whatever_else_there_is() -> None:
    names = [f"package/module_{number}.py" for number in range(2000)]
    held_out = {name for name in names if is_validation(name, 5)}
    assert 60 <= len(held_out) <= 140
    assert held_out <= {name for name in names if is_validation(name, 10)}


def test_files_in_another_encoding_and_empty_files_are_left_out(sources: Path, settings: CorpusSettings) -> None:
    texts = read_split_texts(settings)
    everything = texts["train"] + texts["valid"]
    assert len(everything) == len(find_sources(sources)) - 2
    assert all(text.strip() for text in everything)


def test_no_character_is_lost(settings: CorpusSettings) -> None:
    texts = read_split_texts(settings)
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_proto=train_tokenizer(texts["train"][:10], settings.vocab_size)
    )
    samples = [*texts["valid"], "\n\n  two  spaces \t tab\n", "日本 \U0001f600 \x00", " leading", "trailing "]
    for text in samples:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size() == settings.vocab_size
    assert [tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()] == [0, 1, 2, 3]
    assert 2 not in tokenizer.encode("</s>"), "text must not be able to end a document"


def test_indexed_files_hold_the_documents(tmp_path: Path, settings: CorpusSettings) -> None:
    lines: list[str] = []
    made = prepare_corpus(tmp_path / "corpus", settings, lines.append)
    assert not made.reused and any("tokenizer" in line for line in lines)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(made.tokenizer))
    texts = read_split_texts(settings)
    for split, size in (("train", made.train), ("valid", made.valid)):
        dataset = IndexedDataset(str(made.prefix(split)))
        assert dataset.index.dtype is numpy.uint16
        assert len(dataset) == len(dataset.document_indices) - 1 == size.documents == len(texts[split])
        assert int(dataset.sequence_lengths.sum()) == size.tokens
        assert made.prefix(split).with_suffix(".bin").stat().st_size == 2 * size.tokens
        for document, text in zip(range(len(dataset)), texts[split], strict=True):
            ids = dataset[document].tolist()
            assert ids[-1] == tokenizer.eos_id() and ids.count(tokenizer.eos_id()) == 1
            assert tokenizer.decode(ids[:-1]) == text


def test_made_twice_it_is_the_same_byte_for_byte(tmp_path: Path, settings: CorpusSettings) -> None:
    first, second = (prepare_corpus(tmp_path / name, settings, quiet) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint
    for path in sorted(first.folder.iterdir()):
        assert path.read_bytes() == (second.folder / path.name).read_bytes(), path.name


def test_a_corpus_is_reused_or_made_again(tmp_path: Path, settings: CorpusSettings) -> None:
    folder = tmp_path / "corpus"
    first = prepare_corpus(folder, settings, quiet)
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare_corpus(folder, settings, quiet) == dataclasses.replace(first, reused=True)
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    smaller = prepare_corpus(folder, dataclasses.replace(settings, vocab_size=400), quiet)
    assert not smaller.reused and smaller.fingerprint != first.fingerprint

    with (folder / "train.bin").open("r+b") as handle:
        handle.truncate(10)
    assert load_corpus(folder) is None
    assert not prepare_corpus(folder, settings, quiet).reused


@pytest.mark.parametrize("stage", ["train_tokenizer", "write_indexed"])
def test_an_interrupted_build_leaves_nothing_that_breaks_the_next(
    tmp_path: Path, settings: CorpusSettings, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "corpus"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus_module, stage, interrupt)
        prepare_corpus(folder, settings, quiet)
    assert not folder.exists() and not list(tmp_path.glob(".corpus.tmp-*"))

    killed = tmp_path / ".corpus.tmp-killed"  # SIGKILL runs no clean-up
    killed.mkdir()
    (killed / "train.bin").write_bytes(b"half")
    assert not prepare_corpus(folder, settings, quiet).reused
    assert not killed.exists()


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path, settings: CorpusSettings) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and holds no corpus"):
        prepare_corpus(tmp_path / "mine", settings, quiet)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"bytes of training text.*--source"):
        prepare_corpus(tmp_path / "corpus", CorpusSettings(str(tmp_path)), quiet)
    with pytest.raises(ValueError, match="does not exist"):
        prepare_corpus(tmp_path / "corpus", CorpusSettings(str(tmp_path / "nowhere")), quiet)
    assert not (tmp_path / "corpus").exists()


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary size"):
        CorpusSettings("x", vocab_size=100)
    with pytest.raises(ValueError, match="percent"):
        CorpusSettings("x", validation_percent=0)


def test_more_pieces_than_the_text_gives_are_refused(settings: CorpusSettings) -> None:
    texts = read_split_texts(settings)["train"]
    with pytest.raises(ValueError, match="cannot train 900000 pieces"):
        train_tokenizer(texts[:2], 900_000)


def test_a_tokenizer_without_end_of_document_is_refused_before_any_output(tmp_path: Path) -> None:
    model = tmp_path / "no_eos"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text with a few words in it"] * 20),
        model_prefix=str(model),
        vocab_size=30,
        eos_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    with pytest.raises(ValueError, match="end-of-document"):
        write_indexed(tmp_path / "out", ["text"], model.with_suffix(".model").read_bytes())
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("vocabulary", [65_499, 65_500, 65_536, 70_000])
def test_token_width_follows_the_vocabulary(tmp_path: Path, vocabulary: int) -> None:
    """The width that megatron-core chooses holds the largest id, and its reader takes it from the index."""
    prefix = tmp_path / "data"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    builder.add_document(torch.tensor([0, 1, vocabulary - 1]), [3])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(str(prefix))  # what it returns lives only as long as the dataset
    assert dataset[0].tolist() == [0, 1, vocabulary - 1]


def test_the_manifest_says_what_was_read(tmp_path: Path, settings: CorpusSettings) -> None:
    made = prepare_corpus(tmp_path / "corpus", settings, quiet)
    manifest = json.loads((made.folder / "corpus.json").read_text())
    assert manifest["settings"] == dataclasses.asdict(settings)
    assert manifest["train"] == dataclasses.asdict(made.train)
    assert f"{made.train.documents:,} files" in made.describe()
