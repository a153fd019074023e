"""A thread that follows the record of a run that another thread of the process launches."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import orjson

from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import find_linked_runs
from lockstep.record.columns import as_dict
from lockstep.record.format import RECORD_FILE

__all__ = ["POLL", "RecordFollower", "Report"]

POLL = 0.001  # seconds between two looks at the record
Report = Callable[[str], None]
"""A function that is called with each line about the progress."""


class RecordFollower:
    """A thread that follows the record of a run that another thread launches.

    Args:
        report: Called with each line about the progress.

    Attributes:
        folder: The final path of the folder of the record. None: it has not been found.
    """

    def __init__(self, report: Report) -> None:
        self.folder: Path | None = None
        self._report = report
        self._launch: Path | None = None
        self._file: BinaryIO | None = None
        self._rest = b""
        self._steps = 0  # number of recorded steps
        self._round = 0  # the latest recorded round
        self._has_begun = False  # the record has a line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def begin(self, launch: Path | None) -> None:
        """Start to follow the record of a launch, in its folder or in one that it links to."""
        self._launch = launch
        self._thread.start()

    def __enter__(self) -> RecordFollower:
        """Return the follower."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the thread, and find the current path of the folder of the record."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._read()
        if self._file is not None:
            self.folder = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
            with contextlib.suppress(ValueError):
                self.folder = self.folder.relative_to(Path.cwd())
            self._file.close()

    def require_folder(self, target: str) -> Path:
        """Return the folder of the record; raise UsageError if the program has written none."""
        if self.folder is None:
            raise UsageError(
                f"{target} recorded no run to compare: it must train with ls.Trainer, whose "
                f"loggers= include a run folder (the default under a launcher)"
            )
        return self.folder

    def _run(self) -> None:
        self._wait(lambda: False)

    def _wait(self, is_over: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Follow the record until `is_over()` is true; return False if the run ends before.

        Args:
            is_over: Called after each read of the record.
            deadline: The time at which to return True anyway, in seconds of `time.monotonic()`.
        """
        while not self._ended.is_set():
            self._read()
            now = time.monotonic()
            if is_over() or now >= deadline:
                return True
            self._ended.wait(min(POLL, deadline - now))
        return False

    def _read(self) -> None:
        """Read the lines that were written since the last call."""
        if self._file is None:
            self._open()
        if self._file is None:
            return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self._has_begun = self._has_begun or bool(lines)
        for text in lines:
            with contextlib.suppress(orjson.JSONDecodeError):
                line = as_dict(orjson.loads(text))
                step = line.get("step")
                if line.get("kind") == "step" and type(step) is int:
                    self._steps = step + 1
                elif line.get("kind") in ("round", "resume") and type(step) is int:
                    self._steps = step
                    self._round = line.get("round", self._round)

    def _open(self) -> None:
        if self._launch is None:
            return
        for folder in (self._launch, *find_linked_runs(self._launch)):
            with contextlib.suppress(OSError):
                self._file = (folder / RECORD_FILE).open("rb")
                return
