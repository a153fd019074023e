"""What `python -m benchmarks.step` measures: a whole training step, beside the peers."""
