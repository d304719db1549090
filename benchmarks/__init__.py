"""Benchmarks, and the cluster in a box that they and the tests run on."""
