"""Gradients over ranks: sums for the trainer, means for `DistributedDataParallel`."""
