"""Resuming a script: what a run has answered, where it may be saved, and how it goes on."""
