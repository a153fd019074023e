"""Communication between ranks: reproducible all-reduce, shared memory."""
