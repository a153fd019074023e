"""Draws the pictures of the documentation: `python -m dev.drawings`."""
