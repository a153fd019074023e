"""Data: the order of samples, their split into micro-batches and replicas, and the loader."""
