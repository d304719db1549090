"""The embedded corpus: source text that every machine has, as a tokenizer and Megatron indexed files.

`prepare_corpus` turns a folder of Python sources (by default the standard library of the running interpreter) into

    OUT/tokenizer.model          SentencePiece BPE model, trained on the training documents only
    OUT/train.bin, train.idx     Megatron indexed dataset, one document per file, end-of-document token after each
    OUT/train.meta.json          which tokenizer wrote it
    OUT/valid.bin, valid.idx     the same for the validation files
    OUT/corpus.json              what was read and written; present only in a whole corpus

The folder is built beside OUT and renamed into place, so a corpus that exists is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_acco.preprocess.encode import SentencePieceEncoder
from megatron_acco.preprocess.metadata import describe_sentencepiece, metadata_path, write_metadata
from megatron_acco.preprocess.vocabulary import train_tokenizer
from megatron_acco.preprocess.writer import IndexedWriter

FORMAT = 1
MANIFEST = "corpus.json"
TOKENIZER = "tokenizer.model"
SPLITS = ("train", "valid")

# Folders that hold tests, installed packages, generated tables or bundled archives, not the library's own text.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "__phello__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

# Smallest training text for which a vocabulary of a few thousand pieces makes sense.
MINIMUM_BYTES = 200_000


@dataclass(frozen=True)
class CorpusSettings:
    """What decides the content of a corpus. Two corpora with equal settings and sources are equal byte for byte.

    `source` is the folder searched for `*.py`, `vocab_size` the number of SentencePiece pieces,
    `validation_percent` the share of the files (not of the bytes) that is held out.
    """

    source: str
    vocab_size: int = 4096
    validation_percent: int = 5

    def __post_init__(self) -> None:
        if not 300 <= self.vocab_size <= 1_000_000:
            raise ValueError(
                f"the vocabulary size must be between 300 (256 bytes and the special pieces) and 1000000, "
                f"got {self.vocab_size}"
            )
        if not 1 <= self.validation_percent <= 50:
            raise ValueError(f"the validation share must be between 1 and 50 percent, got {self.validation_percent}")


@dataclass(frozen=True)
class SplitStatistics:
    """Size of one split: number of documents (files), bytes of text, tokens including end-of-document tokens."""

    documents: int
    text_bytes: int
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """A whole corpus on disk. `fingerprint` changes whenever a token of either split or a piece changes."""

    folder: Path
    settings: CorpusSettings
    fingerprint: str
    train: SplitStatistics
    valid: SplitStatistics
    reused: bool

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model file."""
        return self.folder / TOKENIZER

    def prefix(self, split: str) -> Path:
        """Path prefix (without `.bin` and `.idx`) of a split, as Megatron's data arguments take it."""
        assert split in SPLITS
        return self.folder / split

    def describe(self) -> str:
        """One line per split for people."""
        lines = []
        for name, part in (("training", self.train), ("validation", self.valid)):
            lines.append(
                f"{name}: {part.documents:,} files, {part.text_bytes / 1e6:.1f} MB, {part.tokens / 1e6:.2f} M tokens"
            )
        return "\n".join(lines)


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_sources(root: Path) -> list[Path]:
    """Python sources under `root` that belong to it, sorted by their path relative to `root`.

    Links are left out: distributions link machine-specific files into the standard library.
    """
    found = [
        path
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.is_file() and not path.is_symlink()
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_validation(relative_path: str, percent: int) -> bool:
    """Whether a file is held out: decided by its own name, so adding or removing files moves no other file."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def read_split_texts(settings: CorpusSettings) -> dict[str, list[str]]:
    """Texts of the two splits.

    Raises:
        ValueError: the folder does not exist, or holds too little text or too few files.
    """
    root = Path(settings.source)
    if not root.is_dir():
        raise ValueError(f"the source folder {root} does not exist")
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in find_sources(root):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of files state another encoding; they are not worth a decoder
        if text.strip():
            held_out = is_validation(path.relative_to(root).as_posix(), settings.validation_percent)
            texts["valid" if held_out else "train"].append(text)
    train_bytes = sum(len(text.encode()) for text in texts["train"])
    if train_bytes < MINIMUM_BYTES or not texts["valid"]:
        raise ValueError(
            f"{root} holds {len(texts['train'])} training and {len(texts['valid'])} validation files of Python source "
            f"({train_bytes:,} bytes of training text); at least {MINIMUM_BYTES:,} bytes and one validation file are "
            f"needed. Name another folder of Python sources with --source."
        )
    return texts


def write_indexed(prefix: Path, texts: Sequence[str], tokenizer: bytes) -> int:
    """Write one Megatron indexed dataset, one document per text, and return its number of tokens.

    Raises:
        ValueError: the tokenizer has no end-of-document (eos) token.
    """
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import DType

    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    end_of_document = processor.eos_id()
    if end_of_document < 0:
        raise ValueError("the tokenizer has no end-of-document (eos) token, which must follow every document")
    encoder = SentencePieceEncoder(processor, DType.optimal_dtype(processor.vocab_size()))
    writer = IndexedWriter(prefix, encoder.dtype)
    end = encoder.pack([end_of_document])
    for text in texts:
        writer.add_piece(encoder.encode([text])[0])
        writer.end_document(end)
    writer.finish()
    numbers = {"dtype": encoder.dtype.name, "documents": writer.documents, "tokens": writer.tokens}
    write_metadata(metadata_path(prefix), describe_sentencepiece(processor), append_eod=True, **numbers)
    return writer.tokens


def prepare_corpus(folder: Path, settings: CorpusSettings, log: Callable[[str], None] = print) -> Corpus:
    """Make the corpus in `folder`, or return the one that is there if it was made with the same settings.

    Raises:
        ValueError: no usable sources, or `folder` exists and is not a corpus.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f".{folder.name}.lock"):
        for rest in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(rest, ignore_errors=True)  # from a run that was killed: nobody else holds the lock
        if folder.exists():
            corpus = load_corpus(folder)
            if corpus is not None and _same_sources(corpus, settings):
                return corpus
            if corpus is None and not (folder / MANIFEST).exists() and any(folder.iterdir()):
                raise ValueError(f"{folder} exists and holds no corpus ({MANIFEST} is missing): move it away")
            log(f"the corpus in {folder} was made from other sources or with other settings: making it again")
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            _build(work, settings, log)
            work.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            work.replace(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        corpus = load_corpus(folder)
        assert corpus is not None
        return Corpus(**{**corpus.__dict__, "reused": False})


def load_corpus(folder: Path) -> Corpus | None:
    """The corpus in `folder`, or None if there is none, it has another format, or a file is missing or cut short."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return None
        if any((folder / name).stat().st_size != size for name, size in manifest["file_bytes"].items()):
            return None
        return Corpus(
            folder=folder,
            settings=CorpusSettings(**manifest["settings"]),
            fingerprint=manifest["fingerprint"],
            train=SplitStatistics(**manifest["train"]),
            valid=SplitStatistics(**manifest["valid"]),
            reused=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(work: Path, settings: CorpusSettings, log: Callable[[str], None]) -> None:
    texts = read_split_texts(settings)
    log(f"sources: {sum(map(len, texts.values())):,} files of {settings.source}")
    start = time.perf_counter()
    model = train_tokenizer(texts["train"], settings.vocab_size)
    (work / TOKENIZER).write_bytes(model)
    log(f"tokenizer: {settings.vocab_size:,} SentencePiece pieces, trained in {time.perf_counter() - start:.1f} s")
    manifest: dict[str, Any] = {"format": FORMAT, "settings": asdict(settings), "python": _python_release()}
    for split, documents in texts.items():
        tokens = write_indexed(work / split, documents, model)
        manifest[split] = asdict(SplitStatistics(len(documents), sum(len(t.encode()) for t in documents), tokens))
    files = sorted(path for path in work.iterdir())
    manifest["file_bytes"] = {path.name: path.stat().st_size for path in files}
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    manifest["fingerprint"] = digest.hexdigest()[:16]
    (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _same_sources(corpus: Corpus, settings: CorpusSettings) -> bool:
    # The interpreter's release stands for the content of its library; reading 10 MB at each start would not be worth
    # it, and a corpus must not change under a run that is to be continued.
    manifest = json.loads((corpus.folder / MANIFEST).read_text())
    return corpus.settings == settings and manifest.get("python") == _python_release()


def _python_release() -> str:
    return ".".join(map(str, sys.version_info[:3]))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock for as long as the block runs; the system releases it if the process dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
