"""Tokenizers: Megatron's names for them, megatron-core's classes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_acco.training.options import option

_PACKAGES = {"huggingface": ("transformers", "hf"), "tiktoken": ("tiktoken", "data")}
"""Library: the package that it needs, and the extra of megatron-acco that installs it."""

_TIKTOKEN_LARGEST = 1 << 17
"""Ids of a tiktoken tokenizer without --vocab-size, at most; megatron-core's default."""

_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; it's 1,234.5 times as quick (or so they say).",
    "def main(argv: list[str]) -> int:\n    for word in argv[1:]:\n\tprint(word.upper(), end='')\n    return 0\n",
    "Größer als naïve Œuvres? Съешь ещё этих булок. 大きい日本語の文。 \U0001f600 ½ ﬁ",
    "international unbelievable restructuring photosynthesis mathematicians overwhelmingly",
)

_LIBRARIES = {
    "SentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "TikTokenizer": "tiktoken",
    "NullTokenizer": "null",
}


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer the data was written with."""

    tokenizer_type: str = option(doc="Kind of tokenizer.", choices=tuple(_LIBRARIES))
    tokenizer_model: str | None = option(None, "Model file of the tokenizer (Hugging Face: folder).")
    vocab_size: int | None = option(
        None,
        "Ids of a NullTokenizer, which adds the end-of-document id, or of a TikTokenizer, special ones included. "
        "Checked against any other tokenizer.",
    )
    tiktoken_pattern: str = option("v2", "Pattern by which a TikTokenizer cuts text into words.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = option(1000, "Ids below the vocabulary of a TikTokenizer.")


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
        return _null_tokenizer(options.vocab_size)
    if options.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model")
    if library in ("sentencepiece", "tiktoken") and not os.path.isfile(options.tokenizer_model):
        raise ValueError(f"--tokenizer-model {options.tokenizer_model}: no such file")
    elif not os.path.exists(options.tokenizer_model) and os.path.isabs(options.tokenizer_model):
        raise ValueError(f"--tokenizer-model {options.tokenizer_model}: no such folder")
    if library in _PACKAGES:
        package, extra = _PACKAGES[library]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--tokenizer-type {options.tokenizer_type} needs {package}, which is not installed: "
                f"pip install 'megatron-acco[{extra}]'"
            )
    more = _tiktoken_arguments(options) if library == "tiktoken" else {}
    if library == "huggingface":
        # The end of a document is put there by whoever writes it; the default depends on megatron-core's release.
        more = {"include_special_tokens": False}
    try:
        tokenizer = MegatronTokenizer.from_pretrained(
            options.tokenizer_model, metadata_path={"library": library, "model_type": "gpt"}, **more
        )
    except Exception as error:
        reason = str(error) or f"{error!r}; was its vocabulary made with other settings?"
        raise ValueError(f"--tokenizer-model {options.tokenizer_model} cannot be loaded: {reason}") from error
    if options.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size {options.vocab_size} contradicts the {tokenizer.vocab_size} ids of --tokenizer-model "
            f"{options.tokenizer_model}"
        )
    if tokenizer.eod is None or tokenizer.eod < 0:
        raise ValueError(
            f"--tokenizer-model {options.tokenizer_model} has no end-of-document (</s>) id; documents must end with one"
        )
    return tokenizer


def ids_digest(tokenize: Callable[[str], Iterable[int]]) -> str | None:
    """A digest of the ids that a tokenizer gives to texts, None for one that takes no text.

    Equal for equal vocabularies in whatever form, such as a SentencePiece model and what `export` makes of it, and
    under every release of their libraries.
    """
    try:
        ids = [[int(token) for token in tokenize(text)] for text in _PROBES]
    except Exception:  # a NullTokenizer, whose text is numbers
        return None
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def _null_tokenizer(size: int) -> Any:
    """megatron-core's NullTokenizer of the ids below `size`, and `size` for the end of a document.

    Its name and whether the size that it is given counts that id depend on megatron-core's release.
    """
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    [library] = [name for name, cls in TOKENIZER_MAPPING_LIBRARIES.items() if cls == "NullTokenizer"]

    def make(given: int) -> Any:
        return MegatronTokenizer.from_pretrained(
            None, metadata_path={"library": library, "model_type": "gpt"}, vocab_size=given
        )

    tokenizer = make(size)
    return tokenizer if tokenizer.vocab_size == size + 1 else make(size + 1)


def _tiktoken_arguments(options: TokenizerOptions) -> dict[str, Any]:
    """Arguments of megatron-core's class; without --vocab-size, the vocabulary that the file holds."""
    special = options.tiktoken_num_special_tokens
    try:
        with open(str(options.tokenizer_model)) as handle:
            entries = len(json.load(handle))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"--tokenizer-model {options.tokenizer_model} is not a JSON list of tiktoken's tokens: {error}"
        ) from error
    size = options.vocab_size or min(entries + special, _TIKTOKEN_LARGEST)
    if not special < size <= entries + special:
        raise ValueError(
            f"--vocab-size {size} does not fit to {options.tokenizer_model}: it holds {entries} tokens, and "
            f"--tiktoken-num-special-tokens adds {special}"
        )
    return {"vocab_size": size, "num_special_tokens": special, "pattern": options.tiktoken_pattern}
