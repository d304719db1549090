"""How well a model predicts text: perplexity, bits per byte, the last word of a passage."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_acco.preprocess.inputs import Position, Source, check_sources, find_sources, read_lines, read_tasks
from megatron_acco.training.evaluate import token_losses


@dataclass
class Document:
    """Ids of a text, with the end-of-document id where the data has one, and its size in UTF-8."""

    tokens: Sequence[int]
    bytes: int


@dataclass
class TextScore:
    """Sums over all tokens of all documents; `nll` in nats."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nll: float = 0.0

    @property
    def loss(self) -> float:
        """Mean negative log likelihood of a token, in nats."""
        return self.nll / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits that a code made from the model takes per byte of text, ends of documents included."""
        return self.nll / math.log(2) / max(1, self.bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**asdict(self), **derived}


def windows(tokens: Iterable[int], before: Sequence[int], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and labels that cover a stream without overlap: every token is a label once.

    Args:
        tokens: the stream.
        before: what stands before its first token, one id; without it the first token is not predicted.
        length: labels of each window; the last one has what is left.
    """
    stream = itertools.chain(before, tokens)
    carried = list(itertools.islice(stream, 1))
    while labels := list(itertools.islice(stream, length)):
        yield [*carried, *labels[:-1]], labels
        carried = labels[-1:]


@torch.inference_mode()
def score_documents(
    model: Any, documents: Iterable[Document], before: Sequence[int], length: int, batch_size: int
) -> TextScore:
    """Perplexity and bits per byte of documents, one after the other as in training.

    Args:
        model: a GPTModel in evaluation mode.
        documents: what to score.
        before: id before the first document, or none.
        length: tokens of a window.
        batch_size: windows computed together.
    """
    score = TextScore()

    def stream() -> Iterator[int]:
        for document in documents:
            score.documents += 1
            score.bytes += document.bytes
            yield from document.tokens

    device = next(model.parameters()).device
    pending: list[tuple[list[int], list[int]]] = []

    def flush() -> None:
        if not pending:
            return
        tokens, labels = (torch.tensor(part, device=device) for part in zip(*pending, strict=True))
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        losses = token_losses(model, {"tokens": tokens, "labels": labels, "position_ids": positions})
        score.nll += float(losses.double().sum())
        score.tokens += labels.numel()
        pending.clear()

    for window in windows(stream(), before, length):
        if pending and len(window[1]) != len(pending[0][1]):
            flush()
        pending.append(window)
        if len(pending) == batch_size:
            flush()
    flush()
    return score


def check_indexed(prefix: str) -> None:
    """Raise ValueError if there is no Megatron dataset of this prefix."""
    from megatron_acco.training.data import check_prefix

    check_prefix(prefix, "--data-path")


def text_sources(paths: Sequence[str], form: str, key: str) -> list[Source]:
    """Files of raw text in the formats that `preprocess-data` reads.

    Args:
        paths: files, folders or patterns.
        form: what they hold; `auto`: by their names.
        key: field of the text, where there are fields.

    Raises:
        ValueError: a file that is missing or cannot be used.
    """
    sources = find_sources(paths, form)
    check_sources(sources, [key])
    return sources


def indexed_documents(prefix: str, tokenizer: Any) -> Iterator[Document]:
    """Documents of a Megatron dataset. Their bytes are those of the text that the ids stand for.

    Raises:
        ValueError: the dataset is of another tokenizer.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_acco.preprocess.metadata import check_metadata, describe_tokenizer
    from megatron_acco.training.data import check_token_ids

    check_metadata(prefix, describe_tokenizer(tokenizer))
    check_token_ids(prefix, tokenizer.vocab_size)
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    for first, last in itertools.pairwise(bounds.tolist()):
        sequences = [dataset[number] for number in range(first, last)]
        ids = numpy.concatenate(sequences).tolist() if sequences else []
        text = tokenizer.detokenize([token for token in ids if token != tokenizer.eod])
        yield Document(ids, len(text.encode()))


def text_documents(sources: Sequence[Source], key: str, tokenizer: Any) -> Iterator[Document]:
    """Documents of raw text, with the ids that `preprocess-data` would write.

    Each ends with the end-of-document id; empty ones are left out.

    Args:
        sources: what `text_sources` gives.
        key: field of the text, where there are fields.
        tokenizer: of the model.

    Raises:
        ValueError: a file or a line that cannot be used, with its place.
    """
    from megatron.core.datasets.indexed_dataset import DType

    from megatron_acco.preprocess.encode import BatchEncoder
    from megatron_acco.preprocess.work import documents_of

    encoder = BatchEncoder(tokenizer, DType.optimal_dtype(tokenizer.vocab_size))
    for task in read_tasks(sources, [key], Position(), 1 << 31, lambda text, start, before: None):
        if task.kind == "piece":  # never cut here: a whole text
            found: Iterable[tuple[str, Any]] = [(task.source, [[task.payload]])]
        else:
            found = documents_of(task, [key])
        for place, value in found:
            if isinstance(value, str):
                raise ValueError(f"{place}: {value}")
            texts = [text for text in value[0] if text]
            ids = [
                token
                for packed in encoder.encode(texts)
                for token in numpy.frombuffer(packed, dtype=encoder.dtype).tolist()
            ]
            if ids:
                yield Document([*ids, int(tokenizer.eod)], sum(len(text.encode()) for text in texts))


# ---- the last word --------------------------------------------------------------------------------------------------


@dataclass
class LastWordScore:
    """Passages, those whose last word the model would write itself, and the words' sum of log likelihoods in nats."""

    passages: int = 0
    correct: int = 0
    log_likelihood: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """With accuracy, and perplexity per word."""
        passages = max(1, self.passages)
        perplexity = math.exp(min(-self.log_likelihood / passages, 700.0))
        return {**asdict(self), "accuracy": self.correct / passages, "perplexity": perplexity}


def read_passages(path: Path, key: str) -> list[tuple[str, str]]:
    """Context and last word, with the space before it, of every line of a jsonl file.

    Raises:
        ValueError: naming the line that is wrong.
    """
    passages = []
    for number, line in enumerate(read_lines(path, "--last-word"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key].strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a JSON object with a text under {key!r}: {error}") from error
        context, space, word = text.rpartition(" ")
        if not word:
            raise ValueError(f"{path}:{number}: no text")
        passages.append((context, space + word))
    if not passages:
        raise ValueError(f"--last-word {path} holds no passages")
    return passages


def passage_ids(tokenizer: Any, before: Sequence[int], context: str, word: str) -> tuple[list[int], int]:
    """Ids of a passage, and how many of them at its end are the last word.

    The passage is tokenized as a whole, because a word's pieces depend on what stands before it.

    Raises:
        ValueError: nothing stands before the word, so that it cannot be predicted.
    """
    whole = list(tokenizer.tokenize(context + word))
    alone = list(tokenizer.tokenize(context)) if context else []
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, alone, strict=False))))
    if not before and not shared:
        raise ValueError(f"nothing stands before {word!r}; choose another --text-start")
    return [*before, *whole], len(whole) - shared


@torch.inference_mode()
def score_last_words(
    model: Any, passages: Sequence[tuple[list[int], int]], longest: int, batch_size: int
) -> LastWordScore:
    """Accuracy and perplexity of last words, in the manner of LAMBADA.

    A word counts as correct if each of its tokens is the likeliest one where it stands.

    Args:
        model: a GPTModel in evaluation mode.
        passages: what `passage_ids` gives.
        longest: tokens that the model takes; of longer passages the beginning is left out.
        batch_size: passages computed together, padded on the right, where causality hides the padding.
    """
    score = LastWordScore()
    device = next(model.parameters()).device
    # Of like length together: little padding.
    ordered = sorted(passages, key=lambda passage: len(passage[0]))
    for first in range(0, len(ordered), batch_size):
        group = [(ids[-(longest + 1) :], size) for ids, size in ordered[first : first + batch_size]]
        width = max(len(ids) for ids, _ in group) - 1
        tokens = torch.tensor([ids[:-1] + [0] * (width + 1 - len(ids)) for ids, _ in group], device=device)
        positions = torch.arange(width, device=device).expand_as(tokens)
        logits = model(tokens, positions, None)
        for row, (ids, size) in enumerate(group):
            size = min(size, len(ids) - 1)
            targets = torch.tensor(ids[-size:], device=device)
            own = logits[row, len(ids) - 1 - size : len(ids) - 1].float().log_softmax(dim=-1)
            score.passages += 1
            score.correct += int(bool((own.argmax(dim=-1) == targets).all()))
            score.log_likelihood += float(own.gather(1, targets.unsqueeze(1)).double().sum())
    return score
