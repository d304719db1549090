"""Finetune a small causal LM on instructions with Hugging Face's Trainer and ACCO.

    deepspeed --num_gpus 2 examples/hf_finetune.py --deepspeed examples/hf_acco.json --output_dir runs/hf

Nothing is downloaded: the instructions ("upper: maple") are made on the spot, text is read as bytes, and the model is a
small Llama with random weights unless --model names a folder with a pretrained one and its tokenizer. All arguments of
transformers.TrainingArguments are accepted. What concerns ACCO is the import, `register()`, and the "acco" section of
the JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import megatron_acco

Sample = dict[str, list[int]]
IGNORE = -100  # labels of the prompt and of padding: no loss
END = 0
WORDS = "amber birch cedar delta ember flint grove heron ivory jolly koala lemon maple north olive pearl quail robin"
TASKS: dict[str, Callable[[str], str]] = {
    "repeat": lambda word: word,
    "upper": str.upper,
    "first": lambda word: word[0],
    "length": lambda word: str(len(word)),
}


@dataclass
class Options:
    """What is not a TrainingArguments.

    Attributes:
        model: folder of a pretrained causal LM and its tokenizer; empty: a small Llama with random weights.
        samples: training samples.
    """

    model: str = field(default="", metadata={"help": "folder of a pretrained model (default: a small random Llama)"})
    samples: int = field(default=1024, metadata={"help": "training samples"})


def instructions(count: int, seed: int) -> list[tuple[str, str]]:
    """(instruction, answer) pairs."""
    source = random.Random(seed)
    pairs = []
    for _ in range(count):
        task, word = source.choice(list(TASKS)), source.choice(WORDS.split())
        pairs.append((f"{task}: {word}\n", TASKS[task](word)))
    return pairs


def encode(pairs: list[tuple[str, str]], tokens: Callable[[str], list[int]], end: int) -> list[Sample]:
    """Token ids, with a loss on the answer and its end only."""
    samples = []
    for prompt, answer in pairs:
        head, tail = tokens(prompt), [*tokens(answer), end]
        samples.append({"input_ids": head + tail, "labels": [IGNORE] * len(head) + tail})
    return samples


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Pad at the right to the longest sample."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([sample[key] + [value] * (longest - len(sample[key])) for sample in samples])

    return {"input_ids": padded("input_ids", END), "labels": padded("labels", IGNORE)}


def load(name: str) -> tuple[PreTrainedModel, Callable[[str], list[int]], int]:
    """The model, a function from text to token ids, and the id that ends an answer."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        return AutoModelForCausalLM.from_pretrained(name), tokens, tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), lambda text: list(text.encode()), END


def main() -> None:
    megatron_acco.register()  # from here on DeepSpeed honours the "acco" section, whoever calls it
    parser = HfArgumentParser((Options, TrainingArguments))
    parser.set_defaults(
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=4,
        num_train_epochs=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=8,
        logging_steps=8,
        eval_strategy="epoch",
        eval_on_start=True,
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    options, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model, tokens, end = load(options.model)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=encode(instructions(options.samples, seed=1), tokens, end),
        eval_dataset=encode(instructions(128, seed=2), tokens, end),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    if trainer.is_world_process_zero():
        engine = type(trainer.model_wrapped).__name__
        result = {
            "engine": engine,
            "eval_loss_before": losses[0],
            "eval_loss": losses[-1],
            "updates": trainer.state.global_step,
        }
        Path(arguments.output_dir, "result.json").write_text(json.dumps(result) + "\n")
        print(f"{engine}: evaluation loss {losses[0]:.3f} -> {losses[-1]:.3f} in {result['updates']} updates")
    if torch.distributed.is_initialized():  # else gloo's threads may abort the interpreter as it ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
