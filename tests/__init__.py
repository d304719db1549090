"""Tests of megatron-acco."""
