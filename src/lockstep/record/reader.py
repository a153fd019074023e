"""Reading a record back, also one that is still being written, or whose run died.

A reader forgives: a truncated last line, lines that are no JSON, kinds and
fields that it does not know, missing fields, a newer version. What it passed
over it says in `Run.remarks`. Secrets that an older version wrote are redacted
here, and control characters made visible. The steps come as columns, for there
may be a million of them (2.5 s, 240 MB of text).
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
from lockstep.record.columns import Columns, Line, Steps, columns, join, mapping
from lockstep.record.recorder import FILE, VERSION
from lockstep.redaction import redact

__all__ = ["Run", "State", "glance", "read"]

State = Literal["done", "failed", "running", "died"]

BLOCK = 1 << 17  # bytes read at a time: what they are parsed into stays in the cache
TAIL = 1 << 17  # bytes at a record's end that a glance reads
YOUNG = 120.0  # seconds without a line after which a run on another host counts as dead


@dataclass(frozen=True)
class Run:
    """A record, read. `state` is "running" while its writer lives, "died" if it left no end."""

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
        """The run's name: its folder's."""
        return str(self.header.get("name") or escape_control(self.folder.name))

    @property
    def layout(self) -> Line:
        """The header's `layout`, or an empty one."""
        return mapping(self.header.get("layout"))

    @property
    def environment(self) -> Line:
        """The header's `environment`, or an empty one."""
        return mapping(self.header.get("environment"))


def read(folder: Path) -> Run:
    """Read the record of the run in `folder` (or the record's own path).

    Raises:
        UsageError: there is no record.
        FileError: it cannot be read, or holds not one line of a record.
    """
    with patient_collector():
        return run_of(folder, Gathered.take_all)


def glance(folder: Path) -> Run:
    """Read the first line of a record and its last ones only: fast, however long it is.

    The run's `steps` and `epochs` are then the last few. Raises as `read` does.
    """
    return run_of(folder, Gathered.take_ends)


def run_of(folder: Path, take: Callable[[Gathered, BinaryIO], None]) -> Run:
    """Open a record, let `take` read it, and return the run."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    gathered = Gathered()
    try:
        with path.open("rb") as file:
            take(gathered, file)
            locked = is_locked(file.fileno())
            age = time.time() - os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"there is no run at {folder} ({path} does not exist); `lockstep runs` lists them"
        ) from None
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None
    if gathered.bad and not gathered.good:
        raise FileError(f"{path} is not the record of a run: none of its lines is one of a record")
    return gathered.run(path.parent, locked, age)


class Gathered:
    """What the lines read so far amount to."""

    def __init__(self) -> None:
        self.header: Line = {}
        self.epochs: list[Line] = []
        self.warnings: list[Line] = []
        self.end: Line | None = None
        self.timelines: list[Line] = []
        self.blocks: list[Columns] = []
        self.good = 0
        self.bad = 0
        self.truncated = False

    def take_ends(self, file: BinaryIO) -> None:
        """Read the first line, and the lines that begin in the last bytes of `file`."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > 2 * TAIL:
            self.take(self.objects([file.readline()]))
            file.seek(size - TAIL)
            file.readline()  # the rest of a line that began before
        self.take_all(file)

    def take_all(self, file: BinaryIO) -> None:
        """Read `file` to its end, a block of lines at a time."""
        while lines := file.readlines(BLOCK):
            if not lines[-1].endswith(b"\n") and not is_json(lines[-1]):
                self.truncated = True
                lines.pop()
            self.take(self.objects(lines))

    def objects(self, lines: list[bytes]) -> list[Any]:
        """Parse lines; those that are no JSON are counted and skipped."""
        with contextlib.suppress(orjson.JSONDecodeError):
            found: list[Any] = orjson.loads(b"[" + b",".join(lines) + b"]")
            return found
        found = []
        for line in lines:
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                self.bad += bool(line.strip())
        return found

    def take(self, objects: list[Any]) -> None:
        """Sort one block of parsed lines by kind."""
        kinds = [line.get("kind") if type(line) is dict else None for line in objects]
        self.bad += kinds.count(None)
        self.good += len(kinds) - kinds.count(None)
        steps = objects
        if kinds.count("step") < len(kinds):
            steps = [line for kind, line in zip(kinds, objects, strict=True) if kind == "step"]
            for kind, line in zip(kinds, objects, strict=True):
                if kind not in ("step", None):
                    self.take_other(kind, line)
        if steps:
            self.blocks.append(columns(steps))

    def take_other(self, kind: str, line: Line) -> None:
        """Take a line that is no step; an unknown kind is passed over."""
        if kind == "run" and not self.header:
            self.header = cleaned(line)
        elif kind == "epoch":
            self.epochs.append(cleaned(line))
        elif kind == "warning":
            self.warnings.append(cleaned(line))
        elif kind == "end":
            self.end = cleaned(line)
        elif kind == "timeline":
            self.timelines.append(line)

    def run(self, folder: Path, locked: bool | None, age: float) -> Run:
        """Return the run, with its state and remarks."""
        state = self.state(locked, age)
        return Run(
            folder, self.header, join(self.blocks), self.epochs, self.warnings, self.end, state,
            list(self.remarks(state)), self.timelines,
        )  # fmt: skip

    def state(self, locked: bool | None, age: float) -> State:
        """Tell how the run stands.

        The lock is the truth on the host that wrote the record, and whenever it is
        held; otherwise (another host, a file system without locks) a young last
        line means a run that is still going.
        """
        if self.end is not None:
            return "done" if self.end.get("state") == "done" else "failed"
        here = mapping(self.header.get("environment")).get("hostname") == os.uname().nodename
        if locked or (not (here and locked is False) and age < YOUNG):
            return "running"
        return "died"

    def remarks(self, state: State) -> Iterator[str]:
        """Say what was passed over in reading."""
        version = self.header.get("version", VERSION)
        if isinstance(version, (int, float)) and version > VERSION:
            yield (
                f"The record is of version {version}, this lockstep reads version {VERSION}: "
                f"what is new in it is not shown. A newer lockstep shows it."
            )
        if not self.header:
            yield "The record has no first line about the run itself."
        if self.truncated and state != "running":
            yield "The record's last line is cut off, and was skipped."
        if self.bad:
            yield f"{self.bad} lines of the record could not be read, and were skipped."


def cleaned(line: Line) -> Line:
    """Return a line without secrets and without control characters."""
    found: Line = escaped(redact(line))
    return found


def escaped(value: Any) -> Any:
    """Return `value` with control characters made visible in all of its texts."""
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, dict):
        return {escape_control(name): escaped(each) for name, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list) else value


def is_json(line: bytes) -> bool:
    """Whether a last line without its newline is whole nevertheless."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def is_locked(descriptor: int) -> bool | None:
    """Whether a recorder holds the file; None where the file system cannot tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@contextlib.contextmanager
def patient_collector() -> Iterator[None]:
    """Keep the garbage collector from walking a million young dicts again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
