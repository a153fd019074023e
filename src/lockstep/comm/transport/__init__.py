"""Authenticated connections between processes of one run."""
