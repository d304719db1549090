"""What can be asked of preprocess-data, in Megatron's names where Megatron has them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_acco.preprocess.inputs import FORMATS
from megatron_acco.training.options import option


@dataclass(frozen=True)
class PreprocessOptions:
    """Input, output and how to get from one to the other."""

    input: list[str] = option(doc="Files, folders or patterns: jsonl, text (both also .gz, .zst), parquet.")
    output_prefix: str = option(doc="The files are PREFIX_KEY_document.bin, .idx and .meta.json.")
    json_keys: list[str] | None = option(None, "Fields to tokenize, a dataset for each (default: text).")
    append_eod: bool = option(False, "End every document with the end-of-document id.")
    workers: int | None = option(None, "Processes that tokenize (default: the cores this process may use).")
    partitions: int | None = option(
        None, "Parts after each of which progress is kept; an interrupted run continues there (default: 64 MB each)."
    )
    log_interval: int = option(1000, "Documents between lines of progress.")
    input_format: str = option("auto", "What the files hold; auto: by their names.", choices=("auto", *FORMATS))
    skip_bad_lines: bool = option(False, "Leave out and report documents that cannot be read, instead of ending.")
    document_limit_mb: float = option(
        256.0, "Longest line of a jsonl file; longest text where the tokenizer gives no place to cut."
    )
    overwrite: bool = option(False, "Replace output files that are there, and start over.")
    train_tokenizer: bool = option(
        False, "First train a SentencePiece model of --vocab-size pieces, into --tokenizer-model or PREFIX.model."
    )
    tokenizer_sample_mb: float = option(100.0, "Text, spread over the input, that the tokenizer is trained on.")

    def __post_init__(self) -> None:
        for name in ("workers", "partitions", "log_interval", "document_limit_mb", "tokenizer_sample_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if self.document_limit_mb > 2000:
            raise ValueError(f"--document-limit-mb must be 2000 at most, got {self.document_limit_mb:g}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"--json-keys {' '.join(self.keys)}: a key is given twice")
        for key in self.keys:
            if not key or "/" in key:
                raise ValueError(f"--json-keys {key!r}: a key becomes part of a file's name and must not have a slash")
        if not os.path.basename(self.output_prefix) or os.path.isdir(self.output_prefix):
            raise ValueError(f"--output-prefix {self.output_prefix} is a folder; add the beginning of a file's name")

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields to tokenize."""
        return tuple(self.json_keys or ("text",))

    @property
    def number_of_workers(self) -> int:
        """Processes that tokenize."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def longest(self) -> int:
        """--document-limit-mb in bytes."""
        return int(self.document_limit_mb * (1 << 20))
