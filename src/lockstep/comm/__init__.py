"""Adding across ranks: the tree, and the exact reduction over any backend."""
