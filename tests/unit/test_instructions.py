"""Finetuning data: what carries loss, packing, and that packed examples are computed as examples alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_acco.training.batches import ConsumedSampleSampler, EvaluationSampler, build_loader
from megatron_acco.training.blends import DataOptions
from megatron_acco.training.evaluate import token_losses
from megatron_acco.training.instructions import InstructionDataset, build_instruction_sets, pack, read_examples
from megatron_acco.training.model import build_model
from megatron_acco.training.token_weights import TokenWeights
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer
from tests.unit.test_model import GPT2, LLAMA

EOD = 50


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    from megatron_acco.inference.loading import one_process
    from megatron_acco.training.environment import seed_everything

    with one_process():
        seed_everything(0)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Its text is numbers."""
    return build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=EOD))


def write(path: Path, *pairs: tuple[str, str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs))
    return str(path)


def test_loss_is_on_the_response_and_its_end(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", ("1 2 3", "4 5"), ("6", "7 8 9 10 11 12 13 14 15"), ("1 2 3 4 5 6 7 8", "9"))
    found = read_examples([file], tokenizer, 8)
    assert [e.ids.tolist() for e in found.kept] == [[EOD, 1, 2, 3, 4, 5, EOD], [EOD, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert (found.cut, found.dropped) == (1, 1)
    row = InstructionDataset(found.kept[:1], 8, 1, seed=0, pad=EOD, packing=False)[0]
    assert row["tokens"].tolist() == [EOD, 1, 2, 3, 4, 5, EOD, EOD]
    assert row["labels"].tolist() == [1, 2, 3, 4, 5, EOD, EOD, EOD]
    assert row["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_what_cannot_be_used_is_refused_with_its_place(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.jsonl"
    for line, message in (
        ('{"prompt": "1"}', "a.jsonl:2: no key 'response'"),
        ('{"prompt": "1", "response": ""}', "a.jsonl:2: the response is empty"),
        ("{", "a.jsonl:2: not JSON"),
    ):
        file.write_text('{"prompt": "1", "response": "2"}\n' + line + "\n")
        with pytest.raises(ValueError, match=message):
            read_examples([str(file)], tokenizer, 8)
    for name, message in (
        ("none.jsonl", "^--train-data-path .*none.jsonl: no such file"),
        ("b.data", "^--train-data-path .*b.data: its name does not say what it holds [^;]*$"),
        ("b.txt", "b.txt is plain text, which has no fields, and 2 are asked for .prompt, response.$"),
    ):
        if name != "none.jsonl":
            (tmp_path / name).write_text("1")
        with pytest.raises(ValueError, match=message):
            read_examples([str(tmp_path / name)], tokenizer, 8, "--train-data-path")
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"^--data-path .*a.jsonl: no examples there$"):
        read_examples([str(file)], tokenizer, 4)
    write(file, ("1 2 3 4", "5"))
    with pytest.raises(ValueError, match="no example whose prompt is shorter than --seq-length 4"):
        read_examples([str(file)], tokenizer, 4)
    with pytest.raises(ValueError, match="--sft takes jsonl files by --data-path or --train-data-path; remove --mock"):
        DataOptions(sft=True, mock_data=True)
    with pytest.raises(ValueError, match="--sft-packing needs --sft"):
        DataOptions(data_path=["a"], sft_packing=True)


def test_packing_takes_every_example_once_and_fills_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (500,), generator=generator).tolist()
    rows = pack(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 64
    assert len(rows) <= 1.02 * -(-sum(lengths) // 64)
    assert rows == pack(lengths, 64)


def test_sets_are_shares_of_one_file_or_files_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", *[(str(i), str(i + 1)) for i in range(10)])
    options = DataOptions(data_path=[file], split="80,20,0", sft=True)
    made = build_instruction_sets(options, tokenizer, 8, 1, (25, 100, 100))
    train, valid = made.sets["train"], made.sets["valid"]
    assert train is not None and valid is not None and made.sets["test"] is None
    assert (len(train), len(train.rows), len(valid)) == (25, 8, 2)
    epochs = [[int(train[i]["tokens"][1]) for i in range(first, first + 8)] for first in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8)) and epochs[0] != epochs[1]
    again = build_instruction_sets(options, tokenizer, 8, 1, (25, 100, 100))
    assert again.key == made.key and "8 examples to train on in 8 rows" in made.notice
    assert build_instruction_sets(options, tokenizer, 8, 2, (25, 100, 100)).key != made.key
    own = DataOptions(train_data_path=[file], valid_data_path=[file], sft=True)
    both = build_instruction_sets(own, tokenizer, 8, 1, (25, 100, 100))
    assert both.sets["train"] is not None and len(both.sets["train"].rows) == 10
    long = write(tmp_path / "long.jsonl", ("1", "2"), ("1", "2 3 4 5 6 7 8 9"), ("1 2 3 4 5 6 7 8", "9"))
    own = DataOptions(train_data_path=[file], valid_data_path=[long], sft=True)
    assert build_instruction_sets(own, tokenizer, 8, 1, (25, 100, 100)).notice == (
        "10 examples to train on in 10 rows; 1 of the valid data were longer than a row and have lost their end; "
        "1 of the valid data have been left out, because their prompts alone fill a row"
    )


@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_packed_padded_and_alone_are_the_same_losses(tmp_path: Path, tokenizer: Any, options: Any) -> None:
    """Gradients too. Padded micro-batches are only as long as their longest example."""
    pairs = [("1 2 3", "4 5"), ("6", "7 8 9"), ("10 11", "12"), ("13", "14"), ("15", "16 17 18 19 20")]
    file = write(tmp_path / "a.jsonl", *pairs)
    examples = read_examples([file], tokenizer, 16).kept
    model = build_model(options, EOD + 1).eval()

    def scored(packing: bool, together: int) -> tuple[float, float, dict[str, torch.Tensor], int]:
        dataset = InstructionDataset(examples, 16, 99, seed=0, pad=EOD, packing=packing)
        rows = len(dataset.rows)
        loader = build_loader(dataset, EvaluationSampler(rows, together, 0, 1), EOD + 1, 0, 0, trim_multiple=4)
        model.zero_grad()
        loss, tokens, widest = torch.zeros(()), 0.0, 0
        for batch in loader:
            loss = loss + (token_losses(model, batch) * batch["loss_mask"]).sum()
            tokens += float(batch["loss_mask"].sum())
            widest = max(widest, batch["tokens"].shape[1])
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return loss.item(), tokens, gradients, widest

    alone, packed, padded = scored(False, 1), scored(True, 2), scored(False, 5)
    assert padded[3] == 8 and packed[3] == 16
    for other in (packed, padded):
        assert other[1] == alone[1] == sum(len(response.split()) + 1 for _, response in pairs)
        assert other[0] == pytest.approx(alone[0], rel=1e-5)
        for name, gradient in alone[2].items():
            torch.testing.assert_close(other[2][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_reading_ahead_changes_neither_samples_nor_weights_at_a_resume(tmp_path: Path, tokenizer: Any) -> None:
    """A run that ends has read the next update's micro-batches; the one that resumes it takes the same ones again."""
    file = write(tmp_path / "a.jsonl", *[(str(i), " ".join(["9"] * (1 + i % 4))) for i in range(10)])
    dataset = InstructionDataset(read_examples([file], tokenizer, 8).kept, 8, 99, seed=3, pad=EOD, packing=False)
    micro_batches, updates = 3, 5

    def updates_from(first: int, last: int) -> list[tuple[list[list[int]], float]]:
        order = ConsumedSampleSampler(len(dataset), 2 * micro_batches * first, 2, 0, 1)
        batches = iter(build_loader(dataset, order, EOD + 1, 0, 0))
        weights = TokenWeights(batches, micro_batches, updates - first, torch.distributed.group.WORLD)
        taken = []
        for _ in range(first, last):
            own, factor = weights.take()
            for _ in own:
                weights.read_ahead()
            taken.append(([row for batch in own for row in batch["tokens"].tolist()], factor))
            assert factor == micro_batches / sum(float(batch["loss_mask"].sum()) for batch in own)
        weights.finish()
        return taken

    whole = updates_from(0, updates)
    assert updates_from(0, 2) + updates_from(2, updates) == whole
    assert len({factor for _, factor in whole}) > 1


def test_adaptive_accumulation_is_refused() -> None:
    from megatron_acco.training.arguments import parse_arguments, resolve

    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 8 --seq-length 8 --lr 1"
    words += " --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --data-path a.jsonl --sft"
    words += " --tokenizer-type NullTokenizer --vocab-size 9 --deepspeed_config x"
    config = {"zero_optimization": {"stage": 1}, "acco": {"mode": "acco", "accumulation": "adaptive"}}
    with pytest.raises(ValueError, match="--sft and --calculate-per-token-loss need"):
        resolve(parse_arguments(words.split()), config, 1)
