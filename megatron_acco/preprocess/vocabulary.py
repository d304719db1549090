"""Train a SentencePiece model that loses no character."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts that hold something, without their ends."""
    return (line for text in texts for line in text.split("\n") if line)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model, serialized, that loses no character of any text.

    Ids: 0 unknown, 1 beginning of document, 2 end of document, 3 padding. White space and line ends are pieces
    like any other, because in source code and in lists they carry meaning.

    Args:
        texts: documents to learn from.
        vocab_size: number of pieces, the special ones and the 256 bytes included.

    Raises:
        ValueError: SentencePiece cannot make that many pieces from this text.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines_of(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=1 << 14,
            num_threads=1,  # the same pieces on every machine
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"SentencePiece cannot train {vocab_size} pieces on this text: {error}") from error
    return model.getvalue()
