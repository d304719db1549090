"""Data: order on resume, disjoint shares, bad ids, too few documents, missing files, the sample index cache.

Covers CASES B48 (index cache), B46 (waiting for its builder), B53 (consumed samples on resume), B50 and B52 for the
training side.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_acco.preprocess.metadata import describe_tokenizer, metadata_path, write_metadata
from megatron_acco.training.batches import ConsumedSampleSampler, EvaluationSampler, build_loader
from megatron_acco.training.data import DataOptions, Datasets, build_datasets, check_token_ids
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer

VOCAB, SEQUENCE = 64, 8
TOKENIZER = build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=VOCAB - 1))


def write(prefix: Path, lengths: list[int], dtype: Any = numpy.uint16, top: int = VOCAB) -> str:
    generator = numpy.random.default_rng(len(lengths))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in lengths:
        builder.add_document(torch.from_numpy(generator.integers(0, top, length)), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus", [50 + i % 7 for i in range(40)])


def options(corpus: str, **more: Any) -> DataOptions:
    return DataOptions(data_path=[corpus], split="90,10,0", **more)


def build(options: DataOptions, samples: tuple[int, int, int] = (100, 16, 16), seed: int = 1) -> Datasets:
    return build_datasets(options, TOKENIZER, SEQUENCE, seed, samples)


def batches(dataset: Any, total: int, consumed: int, rank: int, ranks: int, workers: int = 0) -> list[torch.Tensor]:
    sampler = ConsumedSampleSampler(total, consumed, 2, rank, ranks)
    return [batch["tokens"] for batch in build_loader(dataset, sampler, VOCAB, workers, seed=0)]


# ---- order --------------------------------------------------------------------------------------------------------


def test_every_rank_gets_its_own_share_of_every_global_batch() -> None:
    drawn = [list(ConsumedSampleSampler(48, 0, 2, rank, 3)) for rank in range(3)]
    for k in range(8):
        assert sorted(i for rank in drawn for i in rank[k]) == list(range(6 * k, 6 * k + 6))
    assert len(ConsumedSampleSampler(48, 0, 2, 0, 3)) == 8


def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(corpus: str) -> None:
    # 40 documents of about 53 tokens hold about 260 samples: 480 go over an epoch's end.
    dataset = build(options(corpus), samples=(480, 16, 16)).train
    for rank in range(2):
        whole = batches(dataset, 480, 0, rank, 2)
        resumed = batches(dataset, 480, 208, rank, 2)
        assert len(whole) == 120 and all(map(torch.equal, whole[52:], resumed))


def test_loader_processes_change_nothing_and_draw_no_random_numbers(corpus: str) -> None:
    dataset = build(options(corpus)).train
    state = torch.get_rng_state()
    alone, helped = batches(dataset, 40, 0, 0, 1), batches(dataset, 40, 0, 0, 1, workers=2)
    assert all(map(torch.equal, alone, helped)) and torch.equal(state, torch.get_rng_state())


def test_the_order_depends_on_the_seed(corpus: str) -> None:
    first, second = (build(options(corpus), seed=seed).train for seed in (1, 2))
    assert any(not torch.equal(first[i]["tokens"], second[i]["tokens"]) for i in range(20))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_evaluation_takes_every_sample_once(ranks: int) -> None:
    shares = [[i for batch in EvaluationSampler(16, 3, rank, ranks) for i in batch] for rank in range(ranks)]
    assert sorted(i for share in shares for i in share) == list(range(16))


def test_validation_is_one_epoch_at_most(corpus: str) -> None:
    # The last 4 of the 40 documents are held out.
    tokens = sum(50 + i % 7 for i in range(36, 40))
    assert len(build(options(corpus), samples=(100, 10000, 8)).valid) == (tokens - 1) // SEQUENCE
    assert 8 <= len(build(options(corpus), samples=(100, 8, 8)).valid) <= (tokens - 1) // SEQUENCE


def test_labels_are_the_next_tokens(corpus: str) -> None:
    sample = build(options(corpus)).train[3]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["tokens"].shape == (SEQUENCE,) and "attention_mask" not in sample


def test_weighted_blend_and_separate_splits(corpus: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [60] * 30)
    blended = build(DataOptions(data_path=["0.3", corpus, "0.7", other], split="80,20,0"))
    assert len(blended.train) >= 100 and blended.test is None
    separate = build(DataOptions(train_data_path=[corpus], valid_data_path=[other]))
    assert len(separate.train) >= 100 and len(separate.valid) >= 16 and separate.test is None
    assert not torch.distributed.is_initialized()


# ---- where the data comes from --------------------------------------------------------------------------------------


def samples_of(dataset: Any) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(20)]


def test_a_file_of_arguments_is_what_it_holds(corpus: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [60] * 30)
    words = ["0.3", corpus, "0.7", other]
    (tmp_path / "args").write_text("\n".join(words) + "\n")
    spelled = build(DataOptions(data_path=words, split="80,20,0"))
    read = build(DataOptions(data_args_path=str(tmp_path / "args"), split="80,20,0"))
    assert samples_of(read.train) == samples_of(spelled.train)

    (tmp_path / "split.json").write_text(json.dumps({"train": words, "valid": [other]}))
    separate = build(DataOptions(train_data_path=words, valid_data_path=[other]))
    read = build(DataOptions(per_split_data_args_path=str(tmp_path / "split.json")))
    assert samples_of(read.train) == samples_of(separate.train) and len(read.valid) == len(separate.valid)
    assert read.test is None


def test_a_blend_draws_by_its_weights(tmp_path: Path) -> None:
    low = write(tmp_path / "low", [90] * 60, top=8)
    builder = IndexedDatasetBuilder(f"{tmp_path}/high.bin", dtype=numpy.uint16)
    for _ in range(60):
        builder.add_document(torch.randint(40, 60, (90,)), [90])
    builder.finalize(f"{tmp_path}/high.idx")
    drawn = build(DataOptions(data_path=["30", low, "70", f"{tmp_path}/high"], split="1,0,0"), (400, 1, 1)).train
    high = sum(int(drawn[i]["tokens"].min()) >= 40 for i in range(400))
    assert abs(high - 280) <= 2


def test_each_validation_set_has_a_name_and_its_own_samples(corpus: str, tmp_path: Path) -> None:
    small = write(tmp_path / "small", [30] * 3, top=9)
    built = build(
        DataOptions(train_data_path=[corpus], valid_data_path=[small, f"web={corpus}"], multiple_validation_sets=True)
    )
    assert built.valid is None and list(built.validation) == ["small", "web"]
    assert len(built.validation["small"]) == (90 - 1) // SEQUENCE  # an epoch at most
    assert len(built.validation["web"]) >= 16
    assert max(int(sample["tokens"].max()) for sample in built.validation["small"]) < 9
    single = build(DataOptions(train_data_path=[corpus], valid_data_path=[small]))
    assert list(single.validation) == [""] and single.valid is single.validation[""]


def test_mock_data_needs_no_files(tmp_path: Path) -> None:
    first, second = (build(DataOptions(mock_data=True), (50, 8, 8)) for _ in range(2))
    assert len(first.train) >= 50 and len(first.valid) >= 8 and len(first.test) >= 8
    assert samples_of(first.train) == samples_of(second.train)
    assert max(int(first.train[i]["tokens"].max()) for i in range(50)) < VOCAB
    cached = build(DataOptions(mock_data=True, data_cache_path=str(tmp_path)), (50, 8, 8))
    assert samples_of(cached.train) == samples_of(first.train) and list(tmp_path.glob("*/*.npy"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no training data"),
        ({"valid_data_path": ["a"]}, "no training data"),
        ({"data_path": ["a"], "mock_data": True}, "--data-path contradicts --mock-data"),
        ({"data_path": ["a"], "train_data_path": ["a"]}, "--data-path contradicts --train-data-path"),
        ({"data_path": ["a"], "data_args_path": "b"}, "--data-path contradicts --data-args-path"),
        ({"train_data_path": ["a"], "split": "1,1,1"}, "--split needs"),
        ({"data_path": ["a"], "multiple_validation_sets": True}, "--multiple-validation-sets needs"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataOptions(**given)


def test_blends_that_say_nothing_clear_are_refused(corpus: str, tmp_path: Path) -> None:
    for words in (["0.3", corpus, corpus, "0.7"], ["0.3", corpus, "0.7"], [corpus, "0.7"]):
        refused(DataOptions(data_path=words), "give prefixes only, or a weight before each prefix")
    for weight in ("0", "-1", "inf", "nan"):
        refused(DataOptions(data_path=[weight, corpus, "1", corpus]), "must be above 0")
    sets = {"train_data_path": [corpus], "multiple_validation_sets": True}
    refused(DataOptions(**sets, valid_data_path=["0.3", corpus]), "takes no weights")
    refused(DataOptions(**sets, valid_data_path=[corpus, f"corpus={corpus}"]), "two validation sets have the name")
    refused(DataOptions(**sets), "there is no validation set")
    refused(DataOptions(data_args_path=str(tmp_path / "none")), "cannot be read")
    (tmp_path / "bad").write_text("")
    refused(DataOptions(data_args_path=str(tmp_path / "bad")), "is empty")
    for content in ("", "[]", '{"valid": []}', '{"train": "a"}', '{"train": ["a"], "eval": ["a"]}'):
        (tmp_path / "bad").write_text(content)
        refused(DataOptions(per_split_data_args_path=str(tmp_path / "bad")), "--per-split-data-args-path")


def test_data_of_another_tokenizer_is_refused(corpus: str) -> None:
    """CASES B52: ids are compared with those that wrote the data, where that is known."""
    described = describe_tokenizer(TOKENIZER)
    path = metadata_path(corpus)
    write_metadata(path, described, append_eod=True)
    build(options(corpus))
    for name, message in (("eod", "end-of-document id is 7"), ("vocab_size", "vocabulary size is 7")):
        write_metadata(path, {**described, name: 7}, append_eod=True)
        refused(options(corpus), message)
    path.write_text("{")
    refused(options(corpus), "is not readable metadata")


# ---- bad data -----------------------------------------------------------------------------------------------------


def refused(options: DataOptions, message: str, samples: tuple[int, int, int] = (100, 16, 16)) -> None:
    with pytest.raises(ValueError) as caught:
        build(options, samples)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_data_is_named(tmp_path: Path, corpus: str) -> None:
    refused(DataOptions(data_path=[str(tmp_path / "none")]), f"--data-path {tmp_path}/none: no file")
    Path(corpus + ".idx").unlink()
    refused(options(corpus), "no file")


def test_damaged_data_is_named(corpus: str) -> None:
    Path(corpus + ".idx").write_bytes(b"not an index")
    refused(options(corpus), "not a readable indexed dataset")


@pytest.mark.parametrize("bad", [VOCAB, 65535])
def test_token_ids_beyond_the_vocabulary_are_found(tmp_path: Path, bad: int) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/d.bin", dtype=numpy.uint16)
    for document in range(5):
        builder.add_document(torch.tensor([1, 2, bad if document == 3 else 4, 5] * 10), [40])
    builder.finalize(f"{tmp_path}/d.idx")
    message = f"token id {bad} in document 3 is beyond the vocabulary of {VOCAB} ids"
    refused(DataOptions(data_path=[f"{tmp_path}/d"], split="1,0,0"), message)


def test_negative_token_ids_are_found(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/d.bin", dtype=numpy.int32)
    builder.add_document(torch.tensor([1, -2, 3]), [3])
    builder.finalize(f"{tmp_path}/d.idx")
    with pytest.raises(ValueError, match="token id -2 in document 0"):
        check_token_ids(f"{tmp_path}/d", VOCAB)


@pytest.mark.parametrize("top", [65499, 65536, 70000])
def test_token_width_comes_from_the_index(tmp_path: Path, top: int) -> None:
    dtype = numpy.uint16 if top <= 65536 else numpy.int32
    prefix = write(tmp_path / "wide", [200], dtype, top=top)
    check_token_ids(prefix, top)
    with pytest.raises(ValueError, match="beyond the vocabulary of 1000 ids"):
        check_token_ids(prefix, 1000)


def test_the_loader_refuses_ids_that_a_partial_scan_missed() -> None:
    dataset = [{"tokens": torch.tensor([1, 2]), "labels": torch.tensor([2, VOCAB])}] * 4
    with pytest.raises(ValueError, match=f"token id {VOCAB} in the data is beyond the vocabulary"):
        batches(dataset, 4, 0, 0, 1)


def test_fewer_documents_than_the_split_needs(tmp_path: Path) -> None:
    prefix = write(tmp_path / "few", [50, 50, 50])
    refused(DataOptions(data_path=[prefix], split="98,1,1"), "leaves 0 documents with 0 tokens for valid")
    short = write(tmp_path / "short", [3])
    refused(DataOptions(data_path=[short], split="1,0,0"), "fewer than the 9 tokens of one sample")


@pytest.mark.parametrize("split", ["x", "1,2,3,4", "0,1,0", "-1,2,0", "", "nan,1,0"])
def test_bad_split_is_refused(corpus: str, split: str) -> None:
    refused(DataOptions(data_path=[corpus], split=split), f"--split {split}")


def test_unweighted_blend_of_too_little_is_refused(corpus: str, tmp_path: Path) -> None:
    other, third = (write(tmp_path / name, [60] * 10) for name in ("other", "third"))
    refused(DataOptions(data_path=[corpus, other, third], split="1,0,0"), "training wants 5000", (5000, 1, 1))


def test_tokenizer_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "none.model")))
    (tmp_path / "bad.model").write_text("not a model")
    with pytest.raises(ValueError, match="cannot be loaded"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(tmp_path / "bad.model")))
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer"))
    with pytest.raises(ValueError, match="needs --vocab-size"):
        build_tokenizer(TokenizerOptions("NullTokenizer"))


def sentencepiece_model(folder: Path, **more: Any) -> str:
    import sentencepiece

    (folder / "text").write_text(
        "".join(f"the {i} quick brown fox jumps over the lazy dog {i * i}\n" for i in range(99))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sp"), vocab_size=60, minloglevel=2, **more
    )
    return str(folder / "sp.model")


def test_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path, eos_id=-1)
    with pytest.raises(ValueError, match="no end-of-document"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer", model))


def test_tokenizer_of_another_size_than_asked_for_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path)
    assert build_tokenizer(TokenizerOptions("SentencePieceTokenizer", model)).vocab_size == 60
    with pytest.raises(ValueError, match="--vocab-size 61 contradicts the 60 ids"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer", model, vocab_size=61))


def test_loader_processes_end_with_the_iterator_though_the_loader_lives_on(corpus: str) -> None:
    """Whatever still holds the loader when the process exits would otherwise make it wait for them without end."""
    loader = build_loader(build(options(corpus)).train, ConsumedSampleSampler(40, 0, 2, 0, 1), VOCAB, 1, seed=0)
    iterator = iter(loader)
    next(iterator)
    [process] = multiprocessing.active_children()
    del iterator
    assert not process.is_alive() and len(loader) == 20


# ---- the sample index cache ---------------------------------------------------------------------------------------


def first_tokens(queue: Any, options: DataOptions) -> None:
    queue.put(build(options).train[0]["tokens"].tolist())


def test_processes_that_share_a_cache_build_it_once_and_agree(corpus: str, tmp_path: Path) -> None:
    cached = options(corpus, data_cache_path=str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=first_tokens, args=(queue, cached)) for _ in range(4)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert all(result == results[0] for result in results)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_who_waits_for_the_builder_says_so(corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CASES B46."""
    root = tmp_path / "shared"
    key = build(options(corpus)).key
    root.mkdir()
    waiting = threading.Thread(target=build, args=(options(corpus, data_cache_path=str(root)),))
    with open(root / f"{key}.lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting.start()
        said, deadline = "", time.monotonic() + 60.0
        while f"waiting for the process that builds the sample index {key}" not in said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said += capfd.readouterr().err
        assert not (root / key).exists()
    waiting.join(60.0)
    assert (root / key).is_dir()


def test_a_killed_builder_leaves_nothing_that_is_taken_for_an_index(corpus: str, tmp_path: Path) -> None:
    cached = options(corpus, data_cache_path=str(tmp_path / "cache"))
    before = build(cached)
    index, sample = tmp_path / "cache" / before.key, before.train[5]["tokens"].clone()
    # As after a kill in the middle of a write: the private folder, with a file cut short, and no published index.
    builder = subprocess.Popen(["true"])
    builder.wait()
    host = re.sub(r"\W", "_", socket.gethostname())
    leftover = index.with_name(f"{index.name}.building-{host}-{builder.pid}-x")
    index.rename(leftover)
    for path in leftover.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:20])
    assert torch.equal(build(cached).train[5]["tokens"], sample)
    assert not leftover.exists()


def test_a_builder_on_another_host_is_left_alone(corpus: str, tmp_path: Path) -> None:
    """CASES B48: locks do not reach over hosts on every file system."""
    cached = options(corpus, data_cache_path=str(tmp_path / "own"))
    other = tmp_path / "own" / f"{build(options(corpus)).key}.building-elsewhere-1-x"
    other.mkdir(parents=True)
    build(cached)
    assert other.exists()


@pytest.mark.parametrize("damage", ["cut", "overwritten", "lost", "no manifest"])
def test_a_damaged_index_is_built_again(corpus: str, tmp_path: Path, damage: str) -> None:
    """CASES B48."""
    cached = options(corpus, data_cache_path=str(tmp_path / "cache"))
    before = build(cached)
    samples = [before.train[i]["tokens"].clone() for i in range(20)]
    folder = tmp_path / "cache" / before.key
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    for path in folder.glob("*shuffle_index.npy"):
        if damage == "lost":
            path.unlink()
        elif damage != "no manifest":
            content = path.read_bytes()
            path.write_bytes(content[:20] if damage == "cut" else b"\0" * len(content))
    after = build(cached)
    assert (after.key, after.digest) == (before.key, before.digest)
    assert all(torch.equal(after.train[i]["tokens"], sample) for i, sample in enumerate(samples))
    assert not list((tmp_path / "cache").glob("*.building-*"))


def test_a_cache_that_is_whole_is_only_read(corpus: str, tmp_path: Path) -> None:
    """CASES B48."""
    cached = options(corpus, data_cache_path=str(tmp_path / "cache"))
    build(cached)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    build(cached)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}


def test_ranks_with_caches_of_their_own_can_compare_them(corpus: str, tmp_path: Path) -> None:
    """CASES B48: what setup compares over ranks is the same for the same index and differs for another."""
    built = [build(options(corpus, data_cache_path=str(tmp_path / name))) for name in ("a", "b")]
    assert built[0].digest == built[1].digest != ""
    assert build(options(corpus, data_cache_path=str(tmp_path / "c")), seed=2).digest != built[0].digest


def test_changed_data_gets_an_index_of_its_own(corpus: str, tmp_path: Path) -> None:
    before = build(options(corpus)).key
    write(tmp_path / "corpus", [70] * 40)
    assert build(options(corpus)).key != before


def test_a_cache_that_cannot_be_written_is_named(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(options(corpus, data_cache_path=str(tmp_path / "file")), "set --data-cache-path")
