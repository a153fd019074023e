"""Benchmarks of collectives: several backends, measured in turn in one run."""
