"""The record of a run: loggers that write it, readers, and the values that it holds."""
