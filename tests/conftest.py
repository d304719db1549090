"""Settings shared by all tests."""

from __future__ import annotations

import os

# Before anything imports torch: the ranks are many, the cores few.
os.environ.setdefault("OMP_NUM_THREADS", "1")
