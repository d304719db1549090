"""The tokenizer's files for transformers."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_acco.preprocess.encode import PROBES
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer


def convert_tokenizer(options: TokenizerOptions) -> tuple[Any, Any]:
    """A transformers tokenizer, and megatron-core's that it was made from.

    Raises:
        ValueError: this kind has no counterpart, or the counterpart gives other ids.
    """
    original = build_tokenizer(options)
    if options.tokenizer_type == "HuggingFaceTokenizer":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(options.tokenizer_model), original
    if options.tokenizer_type not in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        raise ValueError(
            f"a {options.tokenizer_type} cannot be written for transformers; give --no-tokenizer to export without one"
        )
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    with tempfile.TemporaryDirectory() as folder:
        # By this name transformers takes the file for a SentencePiece model.
        shutil.copyfile(str(options.tokenizer_model), Path(folder) / "tokenizer.model")
        converted = TokenizersBackend.from_pretrained(folder)
    for text in _probes(original, converted.all_special_tokens):
        ours = list(original.tokenize(text))
        theirs = converted(text, add_special_tokens=False)["input_ids"]
        if ours != theirs:
            raise ValueError(
                f"transformers' form of {options.tokenizer_model} gives other ids, {theirs[:8]} instead of {ours[:8]} "
                f"for {text[:40]!r}; give --no-tokenizer to export without one"
            )
    return converted, original


def _probes(tokenizer: Any, special: list[str]) -> Iterator[str]:
    """Texts to compare two tokenizers on: awkward ones, and pieces of the vocabulary in all sorts of orders.

    transformers takes the spelling of a special token for the token; SentencePiece does not.
    """
    draw = random.Random(0)
    pieces = (tokenizer.detokenize(draw.choices(range(tokenizer.vocab_size), k=64)) for _ in range(32))
    for text in (*PROBES, "a▁b ▁ c \x00 \u00a0 \u3000", *pieces):
        if not any(name in text for name in special):
            yield text
