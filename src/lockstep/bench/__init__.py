"""Benchmarks: collectives beside their peers, in one run."""
