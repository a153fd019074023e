"""Seeing: what a run records, and how it is shown."""
