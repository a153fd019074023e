"""Reading a record, also of a run that is still going or whose process died.

The reader tolerates a truncated last line, lines that are not JSON, unknown kinds and
fields, missing fields and newer versions, and lists what it skipped in `Run.remarks`.
Secrets that an older version wrote are redacted, and control characters are escaped.
Steps are parsed in blocks and kept as columns, since a run may have millions of them
(a million steps are 240 MB of text and take 2.5 s).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from lockstep.errors import FileError, UsageError
from lockstep.messages import escape_control
from lockstep.record.columns import (
    Line,
    StepBlock,
    Steps,
    as_dict,
    concatenate_blocks,
    parse_block,
)
from lockstep.record.recorder import RECORD_FILE, RECORD_VERSION
from lockstep.redaction import redact

__all__ = ["Run", "State", "read_ends", "read_run"]

State = Literal["done", "failed", "running", "died"]

BLOCK_BYTES = 1 << 17  # read at a time: the parsed lines of a block stay in the cache
TAIL_BYTES = 1 << 17  # of a record's end that `read_ends` reads
STALE_SECONDS = 120.0  # without a new line after which a run on another host counts as dead


@dataclass(frozen=True)
class Run:
    """A run as its record describes it.

    `state` is "running" while the writing process lives, and "died" if it ended without
    writing a last line.
    """

    folder: Path
    header: Line
    steps: Steps
    epochs: list[Line] = field(default_factory=list)
    warnings: list[Line] = field(default_factory=list)
    end: Line | None = None
    state: State = "done"
    remarks: list[str] = field(default_factory=list)
    timelines: list[Line] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the run, which is also the name of its folder."""
        return str(self.header.get("name") or escape_control(self.folder.name))

    @property
    def layout(self) -> Line:
        """The field `layout` of the header; empty if it is missing."""
        return as_dict(self.header.get("layout"))

    @property
    def environment(self) -> Line:
        """The field `environment` of the header; empty if it is missing."""
        return as_dict(self.header.get("environment"))


def read_run(folder: Path) -> Run:
    """Read the record of a run.

    Args:
        folder: The folder of the run, or the path of its record.

    Raises:
        UsageError: There is no record.
        FileError: The record cannot be read, or the file is not a record.
    """
    with _garbage_collection_paused():
        return _parse_record(folder, RecordParser.parse_all)


def read_ends(folder: Path) -> Run:
    """Read only the first line and the last 128 KiB of a record.

    This is fast for records of any length. `steps` and `epochs` are then the last few.
    Raises the same errors as `read_run`.
    """
    return _parse_record(folder, RecordParser.parse_ends)


def _parse_record(folder: Path, parse: Callable[[RecordParser, BinaryIO], None]) -> Run:
    path = Path(folder)
    path = path / RECORD_FILE if path.is_dir() else path
    parser = RecordParser()
    try:
        with path.open("rb") as file:
            parse(parser, file)
            locked = _is_locked(file.fileno())
            age = time.time() - os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"there is no run at {folder} ({path} does not exist); `lockstep runs` lists the runs"
        ) from None
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
    if parser.num_bad and not parser.num_good:
        raise FileError(f"{path} is not the record of a run: it has no line that a record has")
    return parser.run(path.parent, locked, age)


class RecordParser:
    """Collects the lines of a record."""

    def __init__(self) -> None:
        self.header: Line = {}
        self.epochs: list[Line] = []
        self.warnings: list[Line] = []
        self.end: Line | None = None
        self.timelines: list[Line] = []
        self.blocks: list[StepBlock] = []
        self.num_good = 0
        self.num_bad = 0
        self.is_truncated = False

    def parse_ends(self, file: BinaryIO) -> None:
        """Parse the first line of `file`, and the lines that begin in its last bytes."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > 2 * TAIL_BYTES:
            self._add(self._load([file.readline()]))
            file.seek(size - TAIL_BYTES)
            file.readline()  # the rest of a line that began before
        self.parse_all(file)

    def parse_all(self, file: BinaryIO) -> None:
        """Parse `file` from its position to its end, one block of lines at a time."""
        while lines := file.readlines(BLOCK_BYTES):
            if not lines[-1].endswith(b"\n") and not _is_json(lines[-1]):
                self.is_truncated = True
                lines.pop()
            self._add(self._load(lines))

    def _load(self, lines: list[bytes]) -> list[Any]:
        with contextlib.suppress(orjson.JSONDecodeError):
            found: list[Any] = orjson.loads(b"[" + b",".join(lines) + b"]")
            return found
        found = []
        for line in lines:
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                self.num_bad += bool(line.strip())
        return found

    def _add(self, objects: list[Any]) -> None:
        kinds = [line.get("kind") if type(line) is dict else None for line in objects]
        self.num_bad += kinds.count(None)
        self.num_good += len(kinds) - kinds.count(None)
        steps = objects
        if kinds.count("step") < len(kinds):
            steps = [line for kind, line in zip(kinds, objects, strict=True) if kind == "step"]
            for kind, line in zip(kinds, objects, strict=True):
                if kind not in ("step", None):
                    self._add_other(kind, line)
        if steps:
            self.blocks.append(parse_block(steps))

    def _add_other(self, kind: str, line: Line) -> None:
        """Add a line that is not a step; unknown kinds are ignored."""
        if kind == "run" and not self.header:
            self.header = _clean(line)
        elif kind == "epoch":
            self.epochs.append(_clean(line))
        elif kind == "warning":
            self.warnings.append(_clean(line))
        elif kind == "end":
            self.end = _clean(line)
        elif kind == "timeline":
            self.timelines.append(line)

    def run(self, folder: Path, locked: bool | None, age: float) -> Run:
        """Return the run.

        Args:
            folder: The folder of the run.
            locked: Whether a process holds the lock of the record; None if that is unknown.
            age: Seconds since the record was written last.
        """
        state = self._state(locked, age)
        return Run(
            folder=folder,
            header=self.header,
            steps=concatenate_blocks(self.blocks),
            epochs=self.epochs,
            warnings=self.warnings,
            end=self.end,
            state=state,
            remarks=list(self._remarks(state)),
            timelines=self.timelines,
        )

    def _state(self, locked: bool | None, age: float) -> State:
        """Return the state of the run.

        A held lock always means that the run is going. A lock that is not held decides only
        on the host that wrote the record; elsewhere, and on file systems without locks, the
        age of the last line decides.
        """
        if self.end is not None:
            return "done" if self.end.get("state") == "done" else "failed"
        here = as_dict(self.header.get("environment")).get("hostname") == os.uname().nodename
        if locked or (not (here and locked is False) and age < STALE_SECONDS):
            return "running"
        return "died"

    def _remarks(self, state: State) -> Iterator[str]:
        version = self.header.get("version", RECORD_VERSION)
        if isinstance(version, (int, float)) and version > RECORD_VERSION:
            yield (
                f"The record has version {version}, and this lockstep reads version "
                f"{RECORD_VERSION}: newer content is not shown. Upgrade lockstep to see it."
            )
        if not self.header:
            yield "The record has no first line that describes the run."
        if self.is_truncated and state != "running":
            yield "The last line of the record is truncated and was skipped."
        if self.num_bad:
            yield f"{self.num_bad} lines of the record could not be read and were skipped."


def _clean(line: Line) -> Line:
    found: Line = _escape(redact(line))
    return found


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, dict):
        return {escape_control(name): _escape(each) for name, each in value.items()}
    return [_escape(each) for each in value] if isinstance(value, list) else value


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _is_locked(descriptor: int) -> bool | None:
    """Return whether a recorder holds the file; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector from traversing the dicts of all lines again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
