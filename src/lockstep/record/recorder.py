"""The recorder: writes the record of a run.

    rank 0 ── write("step", loss=...) ──> runs/NAME/record.jsonl ── read_run() ──> Run
                                          one JSON object per line         ├─> report, compare, runs
                                                                           └─> your own programs

`Recorder` never raises during a training step. Each line is one system call, so a killed
run loses at most the line that it was writing. The recorder holds a lock on its file, which
the kernel releases when the process ends: this is how a reader distinguishes a run that is
still going from one that died.

Non-finite numbers are written as null and read back as NaN.
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
from typing import Any

import orjson

from lockstep.errors import FileError, UsageError
from lockstep.files import create_file, make_folder
from lockstep.messages import say
from lockstep.redaction import redact

__all__ = ["RECORD_FILE", "RECORD_VERSION", "TIME_CATEGORIES", "Recorder", "create_run_folder"]

RECORD_FILE = "record.jsonl"
RECORD_VERSION = 1
TIME_CATEGORIES = ("compute", "communication", "waiting", "data")
"""The categories of a step's time, in the order of a row of `ranks`."""

JSON_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class Recorder:
    """The logger that writes the record of one run, on rank 0.

    `write` adds the field `t` to each line, the seconds since the recorder was created, and
    `version`, `name` and `started` to the line "run". Writing the line of a step takes about
    5 microseconds.

    Args:
        folder: The folder of the run, which is created if it does not exist.
        metadata: More entries for the line "run" ("recipe", "epochs", "options", ...).

    Raises:
        UsageError: The folder already holds a record.
        FileError: The folder or the record cannot be created.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self._metadata = dict(metadata or {})
        self.path = self.folder / RECORD_FILE
        self.failure: str | None = None
        """The message that was printed when the record could not be written any more."""
        self._descriptor = _create_file(self.path)
        self._began = time.perf_counter()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one line. Never raises: a full disk ends the record, not the run."""
        if self._descriptor < 0:
            return
        line = {"kind": kind, "t": round(time.perf_counter() - self._began, 6), **fields}
        if kind == "step" and "ranks" in fields:
            line["ranks"] = [[round(part, 6) for part in row] for row in fields["ranks"]]
        elif kind == "run":
            line = self._header(fields)
        try:
            text = orjson.dumps(line, _to_json, JSON_OPTIONS)
        except TypeError:  # an integer of more than 64 bits, a cycle of containers, ...
            text = json.dumps(_stringify_unsupported(line)).encode() + b"\n"
        try:
            written = os.write(self._descriptor, text)
            while written < len(text):  # a disk that is almost full accepts only a part
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Recorder:
        """Return the recorder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the recorder."""
        self.close()

    def _header(self, fields: dict[str, Any]) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        own = {"kind": "run", "version": RECORD_VERSION, "name": self.folder.name, "started": now}
        metadata: dict[str, Any] = redact(self._metadata)
        return own | fields | metadata

    def _fail(self, error: OSError) -> None:
        self.failure = (
            f"{self.path}: the record ends here, because it cannot be written any more "
            f"({error.strerror}); the training continues without it, and the run will end with "
            f"exit status 1"
        )
        self.close()
        with contextlib.suppress(OSError, ValueError):
            say(self.failure)


def _create_file(path: Path) -> int:
    """Create and lock the file of the record; return its descriptor."""
    try:
        make_folder(path.parent)
        descriptor = create_file(path, os.O_APPEND)
    except FileExistsError:
        if path.exists():
            raise UsageError(
                f"{path.parent} already holds the record of a run; choose another name for the run"
            ) from None
        raise FileError(f"{path.parent} is not a folder, so no run can be recorded in it") from None
    except OSError as error:
        raise FileError(
            f"{path} cannot be created ({error.strerror}); choose a folder that is writable"
        ) from None
    with contextlib.suppress(OSError):  # no locks on this file system: readers use the file's age
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _to_json(value: Any) -> Any:
    """Return a JSON value for one that JSON does not have, such as a tensor or a path."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)) or (
        isinstance(value, Sequence) and not isinstance(value, str)
    ):
        return list(value)
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _stringify_unsupported(line: dict[str, Any]) -> dict[str, Any]:
    """Return `line` with the values that cannot be written as JSON converted to text."""
    values: dict[str, Any] = {}
    for name, value in line.items():
        try:
            orjson.dumps(value, default=_to_json, option=JSON_OPTIONS)
            values[name] = value
        except TypeError:
            values[name] = str(value)
    return values


def create_run_folder(folder: Path, recipe: str) -> str:
    """Create a folder for a new run and return its name, such as "digits-2026-11-21-0752".

    Runs that start at the same time get different folders.

    Args:
        folder: The folder of runs.
        recipe: The first part of the name.

    Raises:
        FileError: The folder cannot be created.
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
                f"{folder / name} cannot be created ({error.strerror}); "
                f"choose a folder that is writable"
            ) from None
        else:
            return name
