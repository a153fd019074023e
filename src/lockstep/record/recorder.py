"""The record: what a run writes while it works, and everything else reads later.

    rank 0 ── write("step", loss=...) ──> runs/NAME/record.jsonl ── read() ──> Run
                                          one JSON object a line       ├─> report, compare, runs
                                                                       └─> whatever a user likes

`Recorder` never raises into a training step. A line is one system call, so that
a killed run loses at most the line it was writing. While it lives, the recorder
holds a lock on its file; the kernel drops the lock with the process, and that is
how a reader tells a run that is still going from one that died.

A number that is not finite is written as null, and read back as NaN.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from lockstep.errors import FileError, UsageError
from lockstep.files import create_file, make_folder
from lockstep.messages import say

__all__ = ["FILE", "PARTS", "VERSION", "Recorder", "Writer", "fresh_name"]

FILE = "record.jsonl"
VERSION = 1
PARTS = ("compute", "communication", "waiting", "data")
"""What a step's seconds are spent on, in the order of a row of `ranks`."""

OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class Writer(Protocol):
    """Whatever takes the lines of a record: the recorder, the progress, a dashboard."""

    def write(self, kind: str, /, **fields: Any) -> None:
        """Take one line: its kind ("run", "step", "epoch", "warning", "end") and its fields."""

    def close(self) -> None:
        """Finish; calling it again does nothing."""


class Recorder:
    """Writes the record of one run, on rank 0.

    `write` adds what every line needs: `t`, seconds since the recorder was made,
    and for the line "run" its `version`, `name` and `started`. A step's line
    takes some 5 microseconds.

    Raises:
        UsageError: the folder already holds a record.
        FileError: the folder cannot be made, or the file cannot be created in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE
        self.failure: str | None = None
        """The sentence that was printed when the record could no longer be written."""
        self._descriptor = create(self.path)
        self._began = time.perf_counter()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one line. Never raises: a disk that fills ends the record, not the run."""
        if self._descriptor < 0:
            return
        line = {"kind": kind, "t": round(time.perf_counter() - self._began, 6), **fields}
        if kind == "step" and "ranks" in fields:
            line["ranks"] = [[round(part, 6) for part in row] for row in fields["ranks"]]
        elif kind == "run":
            line = self._header(fields)
        try:
            text = orjson.dumps(line, plain, OPTIONS)
        except TypeError:  # a whole number beyond 64 bits, a cycle of containers, ...
            text = json.dumps(printable(line)).encode() + b"\n"
        try:
            written = os.write(self._descriptor, text)
            while written < len(text):  # a disk that fills takes a part first
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file and let go of its lock."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Recorder:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def _header(self, fields: dict[str, Any]) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        own = {"kind": "run", "version": VERSION, "name": self.folder.name, "started": now}
        return own | fields

    def _fail(self, error: OSError) -> None:
        self.failure = (
            f"{self.path}: the record ends here, it cannot be written any more ({error.strerror}); "
            f"the training goes on without it, and the run will end with exit status 1"
        )
        self.close()
        with contextlib.suppress(OSError, ValueError):
            say(self.failure)


def create(path: Path) -> int:
    """Create the record's file with its lock; return its descriptor."""
    try:
        make_folder(path.parent)
        descriptor = create_file(path, os.O_APPEND)
    except FileExistsError:
        if path.exists():
            raise UsageError(
                f"{path.parent} already holds the record of a run; give the run another name"
            ) from None
        raise FileError(f"{path.parent} is not a folder, so no run can be recorded in it") from None
    except OSError as error:
        raise FileError(
            f"{path} cannot be created ({error.strerror}); name a folder that can be written"
        ) from None
    with contextlib.suppress(OSError):  # a file system without locks: readers go by its age
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def plain(value: Any) -> Any:
    """Return a value that JSON has in place of one that it has not (a tensor, a path)."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)) or (
        isinstance(value, Sequence) and not isinstance(value, str)
    ):
        return list(value)
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def printable(line: dict[str, Any]) -> dict[str, Any]:
    """Return `line` with every value that cannot be JSON as text."""
    values: dict[str, Any] = {}
    for name, value in line.items():
        try:
            orjson.dumps(value, default=plain, option=OPTIONS)
            values[name] = value
        except TypeError:
            values[name] = str(value)
    return values


def fresh_name(folder: Path, recipe: str) -> str:
    """Return an unused name for a run, such as "digits-2026-11-21-0752", and make its folder.

    Making the folder is what keeps two runs that start together apart.

    Raises:
        FileError: the folder cannot be written.
    """
    stem = f"{recipe}-{datetime.datetime.now():%Y-%m-%d-%H%M}"
    name, number = stem, 1
    while True:
        try:
            make_folder(folder / name, exist_ok=False)
        except FileExistsError:
            if not folder.is_dir():
                raise FileError(f"{folder} is not a folder, so no run can be kept in it") from None
            number += 1
            name = f"{stem}-{number}"
        except OSError as error:
            raise FileError(
                f"{folder / name} cannot be made ({error.strerror}); "
                f"name a folder that can be written"
            ) from None
        else:
            return name
