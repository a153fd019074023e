"""Reading a record, including that of a run that is still running or has died.

The reader tolerates a truncated last line, lines that are not JSON, unknown kinds and
fields, missing fields and newer versions, and lists skipped lines in `Run.remarks`.
Control characters are escaped.

A line "resume" rewinds the lines before it, so that the run reads as if it had never been
interrupted: steps from the resumed step on are dropped, and so are later epochs and
checkpoints and the line "end". Warnings and findings of the audit stay. A line "round" of an
elastic run does the same: the rank that wrote the record may have died after the line of a step
that the next round repeats.
Steps are parsed in blocks and kept as columns, since a run may have millions of them
(a million steps are 240 MB of text and take 2.5 s).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import orjson

from lockstep.files import lock_file
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import RECORD_FILE, RECORD_VERSION
from lockstep.messages import escape_control
from lockstep.record.columns import (
    RecordLine,
    Steps,
    as_dict,
    as_float,
    concatenate_steps,
    parse_steps,
)

__all__ = ["Run", "RunState", "open_record", "read_run"]

RunState = Literal["done", "failed", "stopped", "running", "died"]

BLOCK_STEPS = 1000  # lines of steps that are kept until they become columns
KEPT = ("epoch", "warning", "audit", "checkpoint", "resume", "round", "log")
REWINDING = ("resume", "round")  # the kinds of lines that rewind the lines before them
SOURCES = re.compile(r"sources(-[0-9]+)?")  # never a folder outside of the run's
STALE_SECONDS = 120.0  # without a new line, after which a run on another host counts as dead


@dataclass(frozen=True)
class Run:
    """A run, as described by its record.

    `state` is "running" while the writing process is alive, "stopped" if it was asked to end and
    saved a checkpoint first, "died" if it ended without a line "end", else "done" or "failed".
    `resumes` are the lines that resumed the run, in order; `rounds` the lines that began a round
    after the first one of an elastic run, `findings` those of the audit, `logged` those of the
    script's own values.
    """

    folder: Path
    header: RecordLine
    steps: Steps
    epochs: list[RecordLine] = field(default_factory=list)
    warnings: list[RecordLine] = field(default_factory=list)
    end: RecordLine | None = None
    state: RunState = "done"
    remarks: list[str] = field(default_factory=list)
    checkpoints: list[RecordLine] = field(default_factory=list)
    resumes: list[RecordLine] = field(default_factory=list)
    rounds: list[RecordLine] = field(default_factory=list)
    findings: list[RecordLine] = field(default_factory=list)
    logged: list[RecordLine] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The recorded name of the run, else the name of its folder."""
        return str(self.header.get("name") or escape_control(self.folder.name))

    @property
    def layout(self) -> RecordLine:
        """The layout of the run since its last resumption; empty if it is missing."""
        return as_dict(self.latest("layout"))

    @property
    def environment(self) -> RecordLine:
        """The environment of the run since its last resumption; empty if it is missing."""
        return as_dict(self.latest("environment"))

    def latest(self, name: str, step: float = math.inf) -> Any:
        """Return the value of a field at a step, by default the last one.

        It is taken from the last line "resume" before the step that has the field, else from the
        first line of the record.
        """
        resumes = self.resumes if step == math.inf else self.resumes[: self.segment(step)]
        lines = (*reversed(resumes), self.header)
        return next((line[name] for line in lines if line.get(name) is not None), None)

    def find_stored_sources(self, step: float) -> Path | None:
        """Return the folder with the sources of a step; None if they are not stored."""
        name = self.latest("sources", step)
        is_name = isinstance(name, str) and SOURCES.fullmatch(name) is not None
        stored = self.folder.resolve() / name if is_name else None
        return stored if stored is not None and stored.is_dir() else None

    @property
    def digests(self) -> dict[int, str]:
        """The digests of the weights at checkpoints and at the end, by the number of steps."""
        lines = [(line, line.get("step")) for line in self.checkpoints]
        if self.end is not None:
            lines.append((self.end, self.end.get("steps")))
        return {
            steps: line["digest"]
            for line, steps in lines
            if isinstance(steps, int) and isinstance(line.get("digest"), str)
        }

    def segment(self, step: float) -> int:
        """Return the number of the last resumption before a step, from 1; 0 if there is none."""
        numbers = [as_float(line.get("step")) for line in self.resumes]
        return max((at for at, first in enumerate(numbers, 1) if first <= step), default=0)

    @cached_property
    def layout_steps(self) -> Steps:
        """The steps since the layout last changed, for figures by rank or about speed.

        If a run was resumed in another layout and has taken no step since, these are the steps of
        the previous layout.
        """
        if not self.resumes or not len(self.steps):
            return self.steps
        layouts = [as_dict(self.header.get("layout"))]
        for line in self.resumes:
            layouts.append(as_dict(line.get("layout")) or layouts[-1])
        segments = np.zeros(len(self.steps), np.int64)
        for at, line in enumerate(self.resumes, 1):
            segments[self.steps.step >= as_float(line.get("step"))] = at
        is_same = np.array([layout == layouts[segments[-1]] for layout in layouts])[segments]
        others = np.flatnonzero(~is_same)
        return self.steps.since(int(others[-1]) + 1) if len(others) else self.steps

    @property
    def layout_epochs(self) -> list[RecordLine]:
        """The epochs that ended in `layout_steps`."""
        first = self.layout_steps.t[:1]
        if len(self.layout_steps) == len(self.steps) or np.isnan(first).all():
            return self.epochs
        return [line for line in self.epochs if as_float(line.get("t")) >= first[0]]


def read_run(folder: Path) -> Run:
    """Read the record of a run.

    Args:
        folder: The folder of the run, or the path of its record.

    Raises:
        UsageError: There is no record.
        FileError: The record cannot be read, or the file is not a record.
    """
    parser = RecordParser()
    with _garbage_collection_paused(), open_record(folder) as file:
        parser.parse(file)
        is_free = lock_file(file.fileno(), fcntl.LOCK_SH)
        age = time.time() - os.fstat(file.fileno()).st_mtime
    path = Path(file.name)
    if parser.num_bad and not parser.num_good:
        raise FileError(f"{path} is not the record of a run: it has no line that a record has")
    return parser.run(path.parent, None if is_free is None else not is_free, age)


@contextlib.contextmanager
def open_record(folder: Path) -> Iterator[BinaryIO]:
    """Open the record of a run for the body; `folder` is the run's folder or the record itself.

    Raises:
        UsageError: There is no record.
        FileError: The record cannot be read.
    """
    path = Path(folder)
    path = path / RECORD_FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"there is no run at {folder} ({path} does not exist); `lockstep runs` lists the runs"
        ) from None
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from None


class RecordParser:
    """A parser that collects the lines of a record."""

    def __init__(self) -> None:
        self.header: RecordLine = {}
        self.end: RecordLine | None = None
        self.lines: dict[str, list[RecordLine]] = {kind: [] for kind in KEPT}
        self.blocks: list[Steps] = []
        self.was_bad = False  # whether the last line was unreadable
        self.num_good = 0
        self.num_bad = 0
        self.is_truncated = False

    def parse(self, file: BinaryIO) -> None:
        """Parse all lines of `file`."""
        steps: list[RecordLine] = []
        for text in file:
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                line = None
                if not text.endswith(b"\n"):
                    self.is_truncated = True
                    break
            kind = line.get("kind") if isinstance(line, dict) else None
            if kind == "step":
                steps.append(line)
            if len(steps) == BLOCK_STEPS or kind in REWINDING:
                self._add_steps(steps)
            if kind in REWINDING:
                self.num_bad -= self.was_bad  # the process was killed while it wrote that line
                self._add_rewinding(kind, line)
            elif kind is not None and kind != "step":
                self._add_other(kind, line)
            if text.strip():
                self.was_bad = kind is None
                self.num_bad += self.was_bad
                self.num_good += not self.was_bad
        self._add_steps(steps)

    def _add_steps(self, steps: list[RecordLine]) -> None:
        """Add some lines of steps as a block of columns, and empty the list."""
        if steps:
            self.blocks.append(parse_steps(steps))
            steps.clear()

    def _add_rewinding(self, kind: str, line: RecordLine) -> None:
        """Add a line that resumes the run or begins a round, and rewind to its step."""
        line = cast(RecordLine, _escape(line))
        self.lines[kind].append(line)
        self.end = None
        step = as_float(line.get("step"))
        epochs = line.get("epochs")
        if math.isfinite(step):
            is_count = isinstance(epochs, int) and epochs >= 0
            self._rewind(step, epochs if is_count else None)
        else:
            line["step"] = None

    def _rewind(self, step: float, epochs: int | None) -> None:
        """Drop the lines that were recorded from `step` on.

        Args:
            step: The number of the first dropped step.
            epochs: The number of epochs to keep. None: the epochs that ended before `step`.
        """
        if epochs is None:
            times = [block.t[block.step >= step] for block in self.blocks]
            begin = np.concatenate([*times, [math.inf]]).min()
            self._keep("epoch", lambda line: not as_float(line.get("t")) > begin)
        else:
            del self.lines["epoch"][epochs:]
        rewound = [block.select(~(block.step >= step)) for block in self.blocks]
        self.blocks = [block for block in rewound if len(block)]
        self._keep("log", lambda line: not as_float(line.get("step")) >= step)
        # A checkpoint of step N holds the state after N steps: keep the one that was resumed.
        self._keep("checkpoint", lambda line: not as_float(line.get("step")) > step)

    def _keep(self, kind: str, is_kept: Callable[[RecordLine], bool]) -> None:
        """Drop the lines of a kind for which `is_kept` returns False."""
        self.lines[kind] = list(filter(is_kept, self.lines[kind]))

    def _add_other(self, kind: str, line: RecordLine) -> None:
        """Add a line that is not a step; unknown kinds are ignored."""
        if kind == "run" and not self.header:
            self.header = cast(RecordLine, _escape(line))
        elif kind == "end":
            self.end = cast(RecordLine, _escape(line))
        elif kind == "log":  # its image must stay as it is
            self.lines[kind].append(line | {"name": _escape(str(line.get("name")))})
        elif kind in KEPT:
            self.lines[kind].append(cast(RecordLine, _escape(line)))

    def run(self, folder: Path, locked: bool | None, age: float) -> Run:
        """Return the run.

        Args:
            folder: The folder of the run.
            locked: Whether a process holds the lock of the record. None: unknown.
            age: The time since the last write to the record, in seconds.
        """
        state = self._state(locked, age)
        return Run(
            folder=folder,
            header=self.header,
            steps=concatenate_steps(self.blocks),
            epochs=self.lines["epoch"],
            warnings=self.lines["warning"],
            end=self.end,
            state=state,
            remarks=list(self._remarks(state)),
            checkpoints=self.lines["checkpoint"],
            resumes=self.lines["resume"],
            rounds=self.lines["round"],
            findings=self.lines["audit"],
            logged=self.lines["log"],
        )

    def _state(self, locked: bool | None, age: float) -> RunState:
        """Return the state of the run.

        A record with a line "end" is complete. Without one, a held lock means that the run is
        running. A free lock means that it died only on the host that wrote the record; elsewhere,
        and on file systems without locks, the age of the last line decides.
        """
        if self.end is not None:
            given = self.end.get("state")
            return given if given in ("done", "stopped") else "failed"
        lines = (self.header, *self.lines["resume"])
        hosts = [as_dict(line.get("environment")).get("hostname") for line in lines]
        here = next(filter(None, reversed(hosts)), None) == os.uname().nodename
        if locked or (not (here and locked is False) and age < STALE_SECONDS):
            return "running"
        return "died"

    def _remarks(self, state: RunState) -> Iterator[str]:
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


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, dict):
        return {escape_control(name): _escape(entry) for name, entry in value.items()}
    return [_escape(entry) for entry in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which would traverse the dicts of all lines repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
