"""The commands of `lockstep`, one per file; each docstring is the help text."""
