"""Tests on real gloo ranks: one process per rank, the real DeepSpeed engine."""
