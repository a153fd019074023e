"""The commands of `lockstep`, one a file; each docstring is the help text."""
