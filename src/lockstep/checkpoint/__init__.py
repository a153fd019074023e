"""Checkpoints: states of a training on disk, complete or absent."""
