"""How far and how fast: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm


class Progress:
    """Shows documents, their rate and the share of the input that has been read."""

    def __init__(self, log: Callable[[str], None], interval: int, total: int, documents: int) -> None:
        """Args:
        log: takes a line.
        interval: documents between two lines.
        total: bytes of input.
        documents: done before, by a run that was interrupted.
        """
        self._log = log
        self._interval = interval
        self._total = max(1, total)
        self._next = documents + interval
        self._first_documents = documents
        self._first_bytes: int | None = None
        self._started = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="input", dynamic_ncols=True)

    def show(self, documents: int, read: int) -> None:
        """Note that so many documents are done and so many bytes of the input read."""
        if self._first_bytes is None:
            # What a resumed run did not have to read does not count as speed.
            self._first_bytes = 0 if self._first_documents == 0 else read
        if documents < self._next and read < self._total:
            return
        self._next = documents - documents % self._interval + self._interval
        seconds = max(1e-9, time.perf_counter() - self._started)
        rate = f"{(documents - self._first_documents) / seconds:,.0f} documents/s"
        if self._bar is not None:
            self._bar.update(read - self._bar.n)
            self._bar.set_postfix_str(rate)
            return
        self._log(
            f"processed {documents:,} documents | {rate} | {(read - self._first_bytes) / seconds / 1e6:.2f} MB/s | "
            f"{100 * read / self._total:.1f} %"
        )

    def close(self) -> None:
        """Leave the terminal."""
        if self._bar is not None:
            self._bar.close()
