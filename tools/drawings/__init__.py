"""Draws the pictures of the documentation: `python -m tools.drawings`."""
