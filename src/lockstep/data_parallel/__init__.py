"""Gradients over ranks: sums along the tree, and shards; several devices in one process."""
