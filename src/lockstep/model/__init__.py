"""One training step on one rank: micro-batches, gradients, the update."""
