"""What `python -m benchmarks.pipeline` measures: a model in two stages, beside the peers."""
