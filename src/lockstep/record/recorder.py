"""The recorder, which writes the record of a run.

    rank 0 ── write("step", loss=...) ──> runs/NAME/record.jsonl ── read_run() ──> Run
                                          one JSON object per line         ├─> report, compare, runs
                                                                           └─> your own programs

`Recorder` never raises during a training step. Each line is one system call, so a killed
run loses at most the line that it was writing. The recorder holds a lock on its file, which
the kernel releases when the process ends. This is how a reader distinguishes a run that is
still running from one that died.

A resumed run continues its record. The line "resume" rewinds it:

    step 0 | ... | step 40 | ... | step 47 | resume, step 40 | step 40 | step 41 | ...
                   ~~~~~~~~~~~~~~~~~~~~~~~ the reader drops these lines

Non-finite numbers are written as null and read back as NaN.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lockstep.files import create_file, lock_file, make_folder
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.launch import calls_in_this_process
from lockstep.launcher.run_folder import RECORD_FILE, RECORD_VERSION, is_resuming
from lockstep.messages import log
from lockstep.record.sources import SourceFolder
from lockstep.redaction import redact

__all__ = ["Recorder"]


LOCK_SECONDS = 2.0  # after which a held lock counts as another run's
TAIL_BYTES = 1 << 17  # bytes at the end of a record that are searched for the last time
JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY

_open: weakref.WeakValueDictionary[tuple[int, int], Recorder] = weakref.WeakValueDictionary()
"""The open recorders of this process, by the device and inode number of their file."""


class Recorder:
    """The logger that writes the record of one run, on rank 0.

    `write` adds the field `t`, the seconds since the recorder was created, to each line. It adds
    these fields to the line "run":

        version, name, started
        sources      the name of the folder into which the program's own files are copied
        variables    the environment variables whose names are strings in these files

    A line "checkpoint" or "end" gets `variables` again if newly imported modules name others.
    Writing the line of a step takes about 5 microseconds.

    Under `lockstep check` and `lockstep replay` the recorder neither reads nor writes anything.

    A continued record keeps its first line: the line "run" of the resumed run is not written, and
    its line "resume" gets `sources`, `variables` and the field `resumed`, the time of day. `t`
    continues at the value of the last line, so the time between the two processes does not count.
    If an earlier recorder of this process still has the record open, it is closed.

    Args:
        folder: The folder of the run, which is created if it does not exist.
        metadata: More entries for the line "run" ("recipe", "epochs", "options", ...). The entries
            "options" and "program" are also added to a line "resume".
        resume: Whether to continue a record that the folder already holds. None: only in a run
            that `--resume` started (the variable LOCKSTEP_RESUME is set).

    Raises:
        UsageError: The folder already holds a record and `resume` is false, or another
            process is still writing the record.
        FileError: The folder or the record cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, Any] | None = None,
        *,
        resume: bool | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._metadata = dict(metadata or {})
        self.path = self.folder / RECORD_FILE
        self._sources: SourceFolder | None = SourceFolder(self.folder)
        self.failure: str | None = None
        """The message that was printed when the record could not be written any more."""
        self.is_continued = False
        """Whether the record continues that of an earlier process."""
        passed = 0.0
        resume = is_resuming() if resume is None else resume
        self._descriptor = -1
        if calls_in_this_process():  # a check or a replay, perhaps of the run in this folder
            self._sources = None
        elif resume and self.path.exists():
            self._descriptor, last = _open_file(self.path)
            self.is_continued = last is not None
            passed = last or 0.0
        else:
            self._descriptor = _create_file(self.path)
        if self._descriptor >= 0:
            status = os.fstat(self._descriptor)
            _open[status.st_dev, status.st_ino] = self
        self._began = time.perf_counter() - passed

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one line. Never raises: a full disk ends the record, but not the run."""
        if self._descriptor < 0 or (kind == "run" and self.is_continued):
            return
        line = {"kind": kind, "t": round(time.perf_counter() - self._began, 6), **fields}
        if kind == "step" and "ranks" in fields:
            line["ranks"] = [[round(part, 6) for part in row] for row in fields["ranks"]]
            line["outside"] = [round(seconds, 6) for seconds in fields.get("outside", ())]
        elif kind == "run":
            line = self._header(fields) | self._store_sources()
        elif kind == "resume":
            line |= {"resumed": _now()} | self._changed_metadata() | self._store_sources()
        if kind in ("checkpoint", "end"):
            line |= self._store_sources(new=False)
        try:
            text = orjson.dumps(line, _to_json, JSON_OPTIONS)
        except TypeError:  # an integer of more than 64 bits, a cycle of containers, ...
            text = json.dumps(_stringify_unsupported(line)).encode()
        text += b"\n"
        try:
            written = os.write(self._descriptor, text)
            while written < len(text):  # an almost full disk may accept only a part
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        """Close the recorder if it was not closed, to release the lock."""
        if hasattr(self, "_descriptor"):
            self.close()

    def __enter__(self) -> Recorder:
        """Return the recorder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the recorder."""
        self.close()

    def _header(self, fields: dict[str, Any]) -> dict[str, Any]:
        own = {"kind": "run", "version": RECORD_VERSION, "name": self.folder.name}
        metadata: dict[str, Any] = redact(self._metadata)
        return own | {"started": _now()} | fields | metadata

    def _changed_metadata(self) -> dict[str, Any]:
        """Return the metadata "options" and "program", for a line "resume"."""
        metadata: dict[str, Any] = redact(self._metadata)
        return {name: metadata[name] for name in ("options", "program") if name in metadata}

    def _store_sources(self, new: bool = True) -> dict[str, Any]:
        """Copy the program's own files; return the fields `sources` and `variables` of a line.

        Args:
            new: Whether this process begins to write the record. If False, copy only modules that
                were imported since, and return only `variables`, if they have changed.
        """
        if self._sources is None:
            return {}
        known = self._sources.variables
        try:
            if new:
                self._sources.open()
            else:
                self._sources.add()
        except OSError as error:
            log(f"the sources of the program cannot be copied to {self.folder}: {error.strerror}")
            self._sources = None
            return {}
        if self._sources.name is None:
            return {}
        if not new:
            added = self._sources.variables
            return {"variables": added} if added != known else {}
        return {"sources": self._sources.name, "variables": self._sources.variables}

    def _fail(self, error: OSError) -> None:
        self.failure = (
            f"{self.path}: the record ends here, because it cannot be written any more "
            f"({error.strerror}); the training continues without it, and the run will end with "
            f"exit status 1"
        )
        self.close()
        with contextlib.suppress(OSError, ValueError):
            log(self.failure)


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
    lock_file(descriptor)  # without locks, readers use the age of the file
    return descriptor


def _open_file(path: Path) -> tuple[int, float | None]:
    """Open and lock the file of a record that is continued, and end its last line.

    Returns:
        The descriptor, and the `t` of the last line; None if there is no complete line.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        raise FileError(
            f"{path} cannot be continued ({error.strerror}); make it readable and writable for "
            f"the user of the run"
        ) from None
    try:
        status = os.fstat(descriptor)
        if (earlier := _open.get((status.st_dev, status.st_ino))) is not None:
            earlier.close()  # a cell of a notebook was run again
        if lock_file(descriptor, timeout=LOCK_SECONDS) is False:
            raise UsageError(
                f"{path.parent} cannot be resumed: another process is still writing its record; "
                f"wait until that run has ended, or stop it"
            )
        with open(descriptor, "rb", closefd=False) as file:
            last, has_newline = _read_last(file)
        if last is None:
            os.ftruncate(descriptor, 0)  # killed while its first line was written
        elif not has_newline:
            os.write(descriptor, b"\n")
    except OSError as error:
        os.close(descriptor)
        raise FileError(f"{path} cannot be continued ({error.strerror})") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, last


def _read_last(file: BinaryIO) -> tuple[float | None, bool]:
    """Return the last `t`, and whether the file ends with a newline.

    The time is 0 if no line has a `t`, and None if the file has no complete line. The final newline
    is missing only if the process was killed.
    """
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size - TAIL_BYTES)
    while True:
        file.seek(begin)
        tail = file.read()
        lines = tail.split(b"\n")[1 if begin else 0 :]
        parsed = [line for text in lines if (line := _parse_line(text)) is not None]
        times = [line["t"] for line in parsed if isinstance(line.get("t"), (int, float))]
        if times or begin == 0:
            last = float(times[-1]) if times else 0.0
            return last if parsed else None, tail.endswith(b"\n")
        begin = 0  # a line is longer than the tail


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and "kind" in value else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _to_json(value: Any) -> Any:
    """Return a JSON value for a value of another type, such as a tensor or a path."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)) or (
        isinstance(value, Sequence) and not isinstance(value, str)
    ):
        return list(value)
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _stringify_unsupported(line: dict[str, Any]) -> dict[str, Any]:
    """Return `line` with values that cannot be written as JSON converted to text."""
    values: dict[str, Any] = {}
    for name, value in line.items():
        try:
            orjson.dumps(value, default=_to_json, option=JSON_OPTIONS)
            values[name] = value
        except TypeError:
            values[name] = str(value)
    return values
