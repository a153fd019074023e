"""Several micro-batches of a rank in one pass, with the bits of a pass for each."""
