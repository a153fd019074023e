"""Training: micro-batches in, the same bits out, in every layout."""
