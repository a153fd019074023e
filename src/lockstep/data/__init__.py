"""Which samples a rank computes, and in which order: the cut, the order, the loader."""
