"""Documents and megabytes per second of preprocess-data against a plain loop, side by side in one run.

    python benchmarks/preprocess.py [--tokenizer sentencepiece|huggingface] [--megabytes 20] [--repeats 3]

The plain loop is what tools of this kind do in one process: read a line, parse it, tokenize the document with
megatron-core's tokenizer, add it to an `IndexedDatasetBuilder`. All write the same files, which is checked. The runs
take turns; the medians are printed. The text is drawn from this machine's Python library: its files in random order,
cut into documents of 200 to 4,000 characters.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_acco.corpus import CorpusSettings, read_split_texts, standard_library
from megatron_acco.preprocess.options import PreprocessOptions
from megatron_acco.preprocess.pipeline import dataset_prefix, preprocess
from megatron_acco.preprocess.vocabulary import train_tokenizer
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer


def main() -> None:
    """Write the input, run all ways in turn, print the table."""
    args = parse_arguments()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = read_split_texts(CorpusSettings(str(standard_library())))["train"]
        tokenizer = make_tokenizer(args.tokenizer, texts[:150], folder)
        documents = write_input(folder / "in.jsonl", texts, args.megabytes)
        size = (folder / "in.jsonl").stat().st_size
        ways: dict[str, Callable[[], float]] = {"plain loop": lambda: plain_loop(tokenizer, folder)}
        for workers in args.workers:
            ways[f"ours, {workers} worker{'s'[: workers > 1]}"] = lambda w=workers: ours(tokenizer, folder, w)  # type: ignore[misc]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                seconds[name].append(way())
                if name != "plain loop":
                    check_same(folder)
        report(seconds, documents, size)


def report(seconds: dict[str, list[float]], documents: int, size: int) -> None:
    """Print medians and ratios; a ratio is taken within a turn."""
    print(f"{documents:,} documents, {size / 1e6:.1f} MB of jsonl; medians of {len(seconds['plain loop'])} turns")
    print(f"{'':16} {'documents/s':>12} {'MB/s':>8} {'ratio':>7}")
    for name, times in seconds.items():
        ratio = statistics.median(p / t for p, t in zip(seconds["plain loop"], times, strict=True))
        median = statistics.median(times)
        print(f"{name:16} {documents / median:12,.0f} {size / median / 1e6:8.2f} {ratio:6.2f}x")


def plain_loop(options: TokenizerOptions, folder: Path) -> float:
    """One document at a time; seconds without loading the tokenizer."""
    tokenizer = build_tokenizer(options)
    started = time.perf_counter()
    builder = IndexedDatasetBuilder(f"{folder}/plain.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    with open(folder / "in.jsonl") as lines:
        for line in lines:
            ids = tokenizer.tokenize(json.loads(line)["text"])
            ids.append(tokenizer.eod)
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{folder}/plain.idx")
    return time.perf_counter() - started


def ours(options: TokenizerOptions, folder: Path, workers: int) -> float:
    """preprocess-data with everything that it does: loading the tokenizer (twice), starting workers, publishing."""
    asked = PreprocessOptions(
        [f"{folder}/in.jsonl"], f"{folder}/ours", append_eod=True, workers=workers, overwrite=True
    )
    return preprocess(asked, options, lambda line: None).seconds


def check_same(folder: Path) -> None:
    """Both must have written the same files."""
    for suffix in ("bin", "idx"):
        made = Path(f"{dataset_prefix(f'{folder}/ours', 'text')}.{suffix}").read_bytes()
        if made != (folder / f"plain.{suffix}").read_bytes():
            raise SystemExit(f"the .{suffix} files differ: nothing to compare")


def write_input(path: Path, texts: list[str], megabytes: float) -> int:
    """Documents from all texts, over and over with other cuts, until the file is that long."""
    generator = random.Random(0)
    written = number = 0
    with open(path, "w") as out:
        while written < megabytes * 1e6:
            for text in generator.sample(texts, len(texts)):
                start = generator.randrange(200)
                while start < len(text) and written < megabytes * 1e6:
                    end = start + generator.randrange(200, 4000)
                    written += out.write(json.dumps({"text": text[start:end]}) + "\n")
                    number, start = number + 1, end
    return number


def make_tokenizer(kind: str, texts: list[str], folder: Path) -> TokenizerOptions:
    """A tokenizer of 4,096 pieces, trained on the text."""
    if kind == "sentencepiece":
        (folder / "sp.model").write_bytes(train_tokenizer(texts, 4096))
        return TokenizerOptions("SentencePieceTokenizer", str(folder / "sp.model"))
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / "hf")
    return TokenizerOptions("HuggingFaceTokenizer", str(folder / "hf"))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", choices=("sentencepiece", "huggingface"), default="sentencepiece")
    parser.add_argument("--megabytes", type=float, default=20.0, help="size of the input (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
