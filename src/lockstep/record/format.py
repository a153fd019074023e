"""The names and numbers of the record's format, for those that write it and those that read it."""

from __future__ import annotations

__all__ = ["RECORD_FILE", "RECORD_VERSION", "TIME_CATEGORIES"]

RECORD_FILE = "record.jsonl"
"""The name of the record in the folder of a run."""

RECORD_VERSION = 1

TIME_CATEGORIES = ("compute", "communication", "waiting", "data")
"""The categories of a step's time, in the order of a row of `ranks`."""
