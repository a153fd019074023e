"""Communication between ranks: the reduction tree, reproducible all-reduce, shared memory."""
