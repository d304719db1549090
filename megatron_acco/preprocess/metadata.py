"""Which tokenizer wrote a dataset: `PREFIX.meta.json` beside `PREFIX.bin` and `PREFIX.idx`.

Token ids mean nothing without their tokenizer, and the indexed format does not say which it was. Datasets without the
file (written by other tools) are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
SUFFIX = ".meta.json"
_COMPARED = {
    "vocab_size": "vocabulary size",
    "eod": "end-of-document id",
    "bos": "beginning-of-document id",
    "fingerprint": "vocabulary",
}


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Ids and vocabulary of a megatron-core tokenizer, equal for equal tokenizers wherever their files are."""
    return {
        "type": str(getattr(tokenizer, "library", type(tokenizer).__name__)),
        "vocab_size": int(tokenizer.vocab_size),
        "eod": _id(tokenizer, "eod"),
        "bos": _id(tokenizer, "bos"),
        "fingerprint": _fingerprint(tokenizer),
    }


def describe_sentencepiece(processor: Any) -> dict[str, Any]:
    """The same for a bare SentencePiece processor."""
    return {
        "type": "sentencepiece",
        "vocab_size": processor.vocab_size(),
        "eod": processor.eos_id(),
        "bos": None if processor.bos_id() < 0 else processor.bos_id(),
        "fingerprint": _digest(processor.serialized_model_proto()),
    }


def metadata_path(prefix: str | Path) -> Path:
    """The metadata file of a dataset prefix."""
    return Path(f"{prefix}{SUFFIX}")


def write_metadata(path: Path, tokenizer: Mapping[str, Any], append_eod: bool, **numbers: Any) -> None:
    """Write the file. The same input gives the same bytes: no times, no paths.

    Args:
        path: `metadata_path` of the dataset, or where it waits for being published.
        tokenizer: what `describe_tokenizer` gives.
        append_eod: whether each document ends with the end-of-document id.
        numbers: size of the dataset.
    """
    record = {"format": FORMAT, "tokenizer": dict(tokenizer), "append_eod": append_eod, **numbers}
    path.write_text(json.dumps(record, indent=2) + "\n")


def check_metadata(prefix: str, tokenizer: Mapping[str, Any]) -> None:
    """Compare the tokenizer of a run with the one that wrote a dataset, where that is known.

    Args:
        prefix: of the dataset.
        tokenizer: what `describe_tokenizer` gives for the run's tokenizer.

    Raises:
        ValueError: naming what differs.
    """
    path = metadata_path(prefix)
    if not path.is_file():
        return
    try:
        record = json.loads(path.read_text())
        written = record["tokenizer"]
        if record["format"] > FORMAT or not isinstance(written, dict):
            raise ValueError(f"format {record['format']} is not known")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not readable metadata of a dataset: {error!r}; delete or restore it") from error
    for name, meaning in _COMPARED.items():
        theirs, ours = written.get(name), tokenizer[name]
        if theirs is None or ours is None or theirs == ours:
            continue
        raise ValueError(
            f"{prefix} was written with another tokenizer: its {meaning} is {theirs} ({written.get('type')}), that of "
            f"this run's tokenizer is {ours} ({tokenizer['type']}); give the tokenizer that {path} describes"
        )


def _id(tokenizer: Any, name: str) -> int | None:
    try:
        value = getattr(tokenizer, name)
    except Exception:  # many tokenizers have no such id, and say so in many ways
        return None
    return None if value is None or int(value) < 0 else int(value)


def _fingerprint(tokenizer: Any) -> str | None:
    inner = getattr(tokenizer, "_tokenizer", None)
    library: Any = getattr(inner, "tokenizer", None)
    if hasattr(library, "serialized_model_proto"):
        return _digest(library.serialized_model_proto())
    if hasattr(library, "backend_tokenizer"):
        backend = json.loads(library.backend_tokenizer.to_str())
        # Left behind by calls that ask for them; they do not change the ids of a text.
        backend.pop("truncation", None)
        backend.pop("padding", None)
        return _digest(json.dumps(backend, sort_keys=True).encode())
    path = getattr(tokenizer, "path", None)
    if isinstance(path, str) and os.path.isfile(path):
        settings = json.dumps(getattr(tokenizer, "additional_args", {}), sort_keys=True, default=str)
        return _digest(Path(path).read_bytes() + settings.encode())
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
