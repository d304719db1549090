"""Tokenizers: Megatron's names for them, megatron-core's classes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron_acco.training.options import option

_LIBRARIES = {
    "SentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer the data was written with."""

    tokenizer_type: str = option(doc="Kind of tokenizer.", choices=tuple(_LIBRARIES))
    tokenizer_model: str | None = option(None, "Model file of the tokenizer.")
    vocab_size: int | None = option(
        None, "Ids of a NullTokenizer, which adds the end-of-document id. Checked against any other tokenizer."
    )


def build_tokenizer(options: TokenizerOptions) -> Any:
    """The tokenizer, a megatron-core `MegatronTokenizer` object.

    Raises:
        ValueError: if the model file is missing or unreadable, has no end-of-document id, or its size is not the
            `--vocab-size` given.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    library = _LIBRARIES[options.tokenizer_type]
    if library == "null":
        if options.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return MegatronTokenizer.from_pretrained(
            None, metadata_path={"library": library, "model_type": "gpt"}, vocab_size=options.vocab_size
        )
    if options.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model")
    if library == "sentencepiece" and not os.path.isfile(options.tokenizer_model):
        raise ValueError(f"--tokenizer-model {options.tokenizer_model}: no such file")
    try:
        tokenizer = MegatronTokenizer.from_pretrained(
            options.tokenizer_model, metadata_path={"library": library, "model_type": "gpt"}
        )
    except Exception as error:
        raise ValueError(f"--tokenizer-model {options.tokenizer_model} cannot be loaded: {error}") from error
    if options.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size {options.vocab_size} contradicts the {tokenizer.vocab_size} ids of --tokenizer-model "
            f"{options.tokenizer_model}"
        )
    if tokenizer.eod is None or tokenizer.eod < 0:
        raise ValueError(f"--tokenizer-model {options.tokenizer_model} has no end-of-document (</s>) id")
    return tokenizer
