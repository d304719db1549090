"""Tokenize many documents at a time, with the ids that the tokenizer gives for each of them alone.

What makes it faster than a loop over `tokenizer.tokenize`:

- SentencePiece BPE models whose pieces stay inside words: each distinct word is encoded once and remembered as the
  bytes that go into the file, so a document is a look-up per word. See `_WordTable` for when this is exact.
- other SentencePiece models and Hugging Face tokenizers: their own batch calls.
- tiktoken: ids straight into an array.

An encoder is compared with the tokenizer on a few probes before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy

Encode = Callable[[Sequence[str]], list[bytes]]
"""Texts to the bytes of their ids, one entry per text."""

PackAll = Callable[[Sequence[Sequence[int]]], list[bytes]]
"""`BatchEncoder.pack_all`."""

PIECE_CHARACTERS = 1 << 20
"""Longer documents are tokenized in pieces of about this many characters, to bound memory."""

_WINDOW = 256
_CUTS_TRIED = 64
_TABLE_ENTRIES = 1 << 18
_TABLE_CHARACTERS = 1 << 24
_SPACE = "▁"  # how SentencePiece writes a space

PROBES = (
    "The quick brown fox, 1234.5 times!",
    "  two  spaces \t tab\r\nline\n\n\nend  ",
    "größer 大きい日本 \U0001f600 \u0301x ﬁ ½",
    "a▁b ▁ c<s></s><unk> \x00 \u00a0 \u3000",
    "x",
    " ",
    "\n",
)


class BatchEncoder:
    """Batches of texts to bytes of ids.

    `dtype` is the numpy type of the ids in the result; `vocab_size` bounds them.
    """

    def __init__(self, tokenizer: Any, dtype: Any) -> None:
        """Choose the fastest way that gives the tokenizer's own ids.

        Args:
            tokenizer: a megatron-core tokenizer object.
            dtype: numpy type that the ids are stored in.
        """
        self.dtype = numpy.dtype(dtype)
        self.vocab_size = int(tokenizer.vocab_size)
        self.way, self._encode = self._choose(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as bytes; the same as `tokenizer.tokenize` gives for each text alone.

        Raises:
            ValueError: a text that the tokenizer cannot take, or an id beyond its vocabulary.
        """
        if all(len(text) <= PIECE_CHARACTERS + 2 * _WINDOW for text in texts):
            return self._encode(texts)
        return [
            self._encode([text])[0]
            if len(text) <= PIECE_CHARACTERS + 2 * _WINDOW
            else b"".join(self._encode([piece])[0] for piece in self.pieces(text))
            for text in texts
        ]

    def pack(self, ids: Any) -> bytes:
        """One list of ids as bytes.

        Raises:
            ValueError: an id beyond the vocabulary.
        """
        array = numpy.asarray(ids, dtype=numpy.int64)
        if array.size and (int(array.max()) >= self.vocab_size or int(array.min()) < 0):
            bad = int(array.max()) if int(array.max()) >= self.vocab_size else int(array.min())
            raise ValueError(f"the tokenizer gave the id {bad}, beyond its vocabulary of {self.vocab_size} ids")
        return array.astype(self.dtype).tobytes()

    def pack_all(self, lists: Sequence[Sequence[int]]) -> list[bytes]:
        """Lists of ids as bytes, one entry per list, in one pass over all of them.

        Raises:
            ValueError: an id beyond the vocabulary.
        """
        packed, size = self.pack(list(chain.from_iterable(lists))), self.dtype.itemsize
        ends = list(accumulate(len(ids) * size for ids in lists))
        return [packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a long text where the ids of the parts are those of the whole; the rest in one piece where none is."""
        start = 0
        while len(text) - start > PIECE_CHARACTERS + 2 * _WINDOW:
            cut = self.find_cut(text, start, start + PIECE_CHARACTERS)
            if cut is None:
                break
            yield text[start : cut[0]]
            start = cut[1]
        yield text[start:]

    def find_cut(self, text: str, start: int, before: int) -> tuple[int, int] | None:
        """The last good place before position `before` to cut a text.

        A cut is at a single space between two other characters, and only where the ids around it, tokenized as a
        whole and in two parts, are the same. A tokenizer that puts a space before each text (SentencePiece's dummy
        prefix) adds the space of the cut itself, so there the cut swallows it.

        Returns:
            End of the first and start of the second part, or None if none of the spaces tried is good.
        """
        at = before
        for _ in range(_CUTS_TRIED):
            at = text.rfind(" ", start + 1, at)
            if at < 0:
                return None
            if at + 1 >= len(text) or text[at - 1].isspace() or text[at + 1].isspace():
                continue
            left, right = text[max(start, at - _WINDOW) : at], text[at + 1 : at + 1 + _WINDOW]
            whole, first, kept, swallowed = self._encode([f"{left} {right}", left, " " + right, right])
            if whole == first + kept:
                return at, at
            if whole == first + swallowed:
                return at, at + 1
        return None

    def _choose(self, tokenizer: Any) -> tuple[str, Encode]:
        def one_at_a_time(texts: Sequence[str]) -> list[bytes]:
            return [self.pack(tokenizer.tokenize(text)) for text in texts]

        for way, encode in self._candidates(tokenizer):
            try:
                if encode(PROBES) == one_at_a_time(PROBES):
                    return way, encode
            except Exception:
                continue  # a library of another release than this was written for
        return "one document at a time", one_at_a_time

    def _candidates(self, tokenizer: Any) -> Iterator[tuple[str, Encode]]:
        inner = getattr(tokenizer, "_tokenizer", None)
        library: Any = getattr(inner, "tokenizer", None)
        kind = type(library).__module__.split(".")[0]
        if kind == "sentencepiece":
            yield from self.sentencepiece_ways(library)
        elif kind == "transformers" and getattr(library, "is_fast", False):
            backend = library.backend_tokenizer

            def huggingface(texts: Sequence[str]) -> list[bytes]:
                encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
                return self.pack_all([encoding.ids for encoding in encodings])

            yield "Hugging Face batches", huggingface
        elif kind == "tiktoken":

            def tiktoken(texts: Sequence[str]) -> list[bytes]:
                return [self.pack(library.encode_to_numpy(text, allowed_special="all")) for text in texts]

            yield "tiktoken arrays", tiktoken

    def sentencepiece_ways(self, processor: Any) -> Iterator[tuple[str, Encode]]:
        """Ways for a SentencePiece processor, the fastest first."""
        table = _WordTable.of(processor, self.pack_all)
        if table is not None:
            yield "SentencePiece word table", table.encode

        def batches(texts: Sequence[str]) -> list[bytes]:
            return self.pack_all(processor.encode(list(texts), num_threads=1))

        yield "SentencePiece batches", batches


class SentencePieceEncoder(BatchEncoder):
    """A `BatchEncoder` around a bare SentencePiece processor."""

    def __init__(self, processor: Any, dtype: Any) -> None:
        self.dtype = numpy.dtype(dtype)
        self.vocab_size = processor.vocab_size()
        expected = [self.pack(processor.encode(text)) for text in PROBES]
        self.way, self._encode = next(
            (way, encode) for way, encode in self.sentencepiece_ways(processor) if encode(PROBES) == expected
        )


class _WordTable:
    """Remembered words of a SentencePiece BPE model.

    BPE only ever joins two neighbouring parts into a piece of the vocabulary. If no piece has a space behind another
    character, nothing is joined across the border before a space, and the ids of a normalized text are those of its
    words (each with the spaces before it), one after the other. The same holds at line ends if no piece mixes them with
    other characters. One thing does cross borders: a run of unknown characters gives one unknown id, so the space
    itself must be known.

    The model's own normalizer runs on the whole text; the words are encoded by the same model with a normalizer that
    changes nothing.
    """

    def __init__(self, processor: Any, words: Any, pattern: re.Pattern[str], pack_all: PackAll) -> None:
        self._normalize = _normalizer_of(processor)
        self._words = words
        self._split = pattern.findall
        self._pack_all = pack_all
        self._table: dict[str, bytes] = {}
        self._characters = 0

    @classmethod
    def of(cls, processor: Any, pack_all: PackAll) -> _WordTable | None:
        """The table of a model, None if words of this model do not stand for themselves."""
        import sentencepiece

        proto = _proto()
        model = _model_of(processor)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        if trainer.model_type != proto.TrainerSpec.BPE or trainer.treat_whitespace_as_suffix:
            return None
        if not normalizer.escape_whitespaces or processor.piece_to_id(_SPACE) == processor.unk_id():
            return None
        own = proto.ModelProto.SentencePiece
        pieces = [p.piece for p in model.pieces if p.type not in (own.CONTROL, own.UNKNOWN, own.BYTE)]
        if any(_SPACE in piece.replace(" ", _SPACE).lstrip(_SPACE) for piece in pieces):
            return None
        lines_apart = "\n" in pieces and all(not piece.strip("\n") for piece in pieces if "\n" in piece)
        pattern = rf"\n+|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+" if lines_apart else rf"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
        normalizer.precompiled_charsmap = b""
        normalizer.name = "identity"
        normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
        words = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        return cls(processor, words, re.compile(pattern), pack_all)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as bytes."""
        if len(self._table) > _TABLE_ENTRIES or self._characters > _TABLE_CHARACTERS:
            self._table.clear()
            self._characters = 0
        table, split = self._table, self._split
        parts = [split(text) for text in self._normalize(texts)]
        unknown = list(set(chain.from_iterable(parts)).difference(table))
        if unknown:
            table.update(zip(unknown, self._pack_all(self._words.encode(unknown, num_threads=1)), strict=True))
            self._characters += sum(map(len, unknown))
        return [b"".join(map(table.__getitem__, words)) for words in parts]


def _proto() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2


def _model_of(processor: Any) -> Any:
    model = _proto().ModelProto()
    model.ParseFromString(processor.serialized_model_proto())
    return model


def _normalizer_of(processor: Any) -> Callable[[Sequence[str]], Sequence[str]]:
    """The model's normalizer; in Python where it does no more than mark spaces, which is the faster way then."""
    spec = _model_of(processor).normalizer_spec
    if spec.precompiled_charsmap or spec.remove_extra_whitespaces:
        return lambda texts: processor.normalize(list(texts))
    prefix = _SPACE if spec.add_dummy_prefix else ""
    return lambda texts: [prefix + text.replace(" ", _SPACE) if text else "" for text in texts]
