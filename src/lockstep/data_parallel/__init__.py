"""Mean gradients over ranks, for a training loop that exists already."""
