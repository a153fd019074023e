"""The audit: computes micro-batches again, elsewhere and later, and compares the bits."""
