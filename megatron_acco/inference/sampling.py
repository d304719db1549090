"""Sampling from a model: many prompts at a time, each token computed once.

Prompts of unequal length are padded on the left, so that the newest token of all of them is in the last column:

    pad pad  a   b | x  y ...        positions  0 0 0 1 | 2 3 ...
     c   d   e   f | x  y ...                   0 1 2 3 | 4 5 ...

Padding is hidden from every real token. With rotary embeddings a row is shifted as a whole, which changes no distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.inference.contexts import StaticInferenceContext


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0: always the likeliest token.
        top_k: sample among this many likeliest; 0: among all.
        top_p: sample among the likeliest that together have this probability; 1: among all.
        seed: of the random numbers. Each prompt has a stream of its own, whatever it shares a batch with.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf or self.top_k < 0:
            raise ValueError("--temperature and --top-k must be 0 or more")
        if self.seed < 0:
            raise ValueError(f"--seed must be 0 or more, got {self.seed}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p must be above 0 and at most 1, got {self.top_p}")


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    longest: int,
    end: int,
    options: SamplingOptions,
    batch_size: int = 8,
    cache: bool = True,
) -> list[list[int]]:
    """Continue every prompt by up to `count` tokens.

    A batch whose texts outgrow the model is computed without the cache, from the last `longest` tokens of each.

    Args:
        model: a GPTModel in evaluation mode whose output has one column per id.
        prompts: ids, one or more each.
        count: most tokens to add.
        longest: tokens that the model takes.
        end: id that ends a text and is not part of it; -1: none.
        options: how tokens are chosen.
        batch_size: prompts computed together.
        cache: keep keys and values; without, every step computes the whole texts again.

    Returns:
        The ids added to each prompt.
    """
    result: list[list[int]] = []
    for first in range(0, len(prompts), batch_size):
        group = [list(prompt) for prompt in prompts[first : first + batch_size]]
        generators = [stream(options.seed, first + row) for row in range(len(group))]
        fits = max(map(len, group)) + count <= longest
        stepper = _Cached(model, group, count) if cache and fits else _Whole(model, group, longest)
        result += _continue(stepper, len(group), count, end, options, generators)
    return result


def stream(seed: int, number: int) -> torch.Generator:
    """The random numbers of prompt `number`. Neighbouring seeds share none: runs of several seeds are independent."""
    [own] = numpy.random.SeedSequence([seed, number]).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(own))


@torch.inference_mode()
def _continue(
    stepper: _Cached | _Whole,
    rows: int,
    count: int,
    end: int,
    options: SamplingOptions,
    generators: list[torch.Generator],
) -> list[list[int]]:
    added: list[list[int]] = [[] for _ in range(rows)]
    going = [True] * rows
    logits = stepper.start()
    for step in range(count):
        # Chosen on the CPU, where each prompt's own stream of random numbers is.
        scores = logits.float().cpu()
        chosen = [choose(scores[row], options, generators[row]) for row in range(rows)]
        for row, token in enumerate(chosen):
            going[row] = going[row] and token != end
            if going[row]:
                added[row].append(token)
        if not any(going) or step == count - 1:
            break
        logits = stepper.step(chosen)
    return added


class _Cached:
    """Computes new tokens only; megatron-core's inference context keeps the keys and values of the others."""

    def __init__(self, model: Any, prompts: list[list[int]], count: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.longest = max(map(len, prompts)) + count
        self.padding = torch.tensor([max(map(len, prompts)) - len(prompt) for prompt in prompts], device=self.device)
        width = self.longest - count
        self.tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        self.context = StaticInferenceContext(len(prompts), self.longest)
        self._make_room(len(prompts))

    def _make_room(self, rows: int) -> None:
        """megatron-core would make it on the current CUDA device, wherever the model is."""
        for layer in self.model.decoder.layers:
            attention = layer.self_attention
            shape = (self.longest, rows, attention.num_query_groups_per_partition, attention.key_hidden_size)
            kind = next(layer.parameters()).dtype
            self.context.key_value_memory_dict[attention.layer_number] = tuple(
                torch.zeros(shape, dtype=kind, device=self.device) for _ in range(2)
            )

    def start(self) -> torch.Tensor:
        """Logits [prompts, ids] after the prompts."""
        return self._forward(self.tokens)

    def step(self, chosen: list[int]) -> torch.Tensor:
        """Logits after one more token of each."""
        self.context.enable_decode_mode()
        return self._forward(torch.tensor(chosen, device=self.device).unsqueeze(1))

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        before, width = self.context.sequence_len_offset, tokens.shape[1]
        columns = torch.arange(before, before + width, device=self.device)
        positions = (columns - self.padding.unsqueeze(1)).clamp(min=0)
        hidden = hidden_keys(self.padding, columns, before + width)
        logits = self.model(tokens, positions, hidden, inference_context=self.context, runtime_gather_output=True)
        self.context.sequence_len_offset += width
        return logits[:, -1]


class _Whole:
    """Computes the last `longest` tokens of every text at every step."""

    def __init__(self, model: Any, prompts: list[list[int]], longest: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.texts = prompts
        self.longest = longest

    def start(self) -> torch.Tensor:
        """Logits [prompts, ids] after the texts."""
        rows = [text[-self.longest :] for text in self.texts]
        width = max(map(len, rows))
        padding = torch.tensor([width - len(row) for row in rows], device=self.device)
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)
        columns = torch.arange(width, device=self.device)
        positions = (columns - padding.unsqueeze(1)).clamp(min=0)
        return self.model(tokens, positions, hidden_keys(padding, columns, width))[:, -1]

    def step(self, chosen: list[int]) -> torch.Tensor:
        """Logits after one more token of each."""
        self.texts = [[*text, token] for text, token in zip(self.texts, chosen, strict=True)]
        return self.start()


def hidden_keys(padding: torch.Tensor, columns: torch.Tensor, keys: int) -> torch.Tensor | None:
    """Megatron's mask: True where a query must not see a key. None where causality says all.

    Args:
        padding: [rows], columns of padding at the left of each row.
        columns: [queries], the column of each query.
        keys: columns that there are.

    Returns:
        [rows, 1, queries, keys], bool. Padding sees itself: a softmax over nothing would be NaN, and spread.
    """
    if not bool(padding.any()):
        return None
    key = torch.arange(keys, device=padding.device)
    later = key > columns.unsqueeze(1)
    is_padding = key < padding.unsqueeze(1)
    itself = key == columns.unsqueeze(1)
    return (later | (is_padding.unsqueeze(1) & ~itself)).unsqueeze(1)


def choose(logits: torch.Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """One token by its logits [ids]: temperature first, then top-k, then top-p among what is left."""
    if options.temperature == 0.0:
        return int(logits.argmax())
    # The likeliest at 0: a temperature near 0 must not overflow.
    logits = (logits - logits.max()) / options.temperature
    if 0 < options.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(options.top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if options.top_p < 1.0:
        ranked, order = probabilities.sort(descending=True)
        # Those before which there is not enough yet; the first always is one.
        ranked[ranked.cumsum(0) - ranked >= options.top_p] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ranked)
    return int(torch.multinomial(probabilities, 1, generator=generator))
