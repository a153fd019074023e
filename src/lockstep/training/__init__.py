"""Training: micro-batches in, the same bits out, whatever the layout."""
