"""A run as an input of `lockstep bisect`: its record and its sources."""

from __future__ import annotations

import filecmp
import linecache
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.kernel.errors import UsageError
from lockstep.record.fingerprints import RecordedStep, read_step_fingerprints
from lockstep.record.reader import Run, read_run
from lockstep.tools.replay.record_difference import RecordDifference, replay_differences
from lockstep.tools.replay.result import Replay

__all__ = [
    "RecordedRun",
    "find_source_differences",
    "read_recorded_run",
]


@dataclass(frozen=True)
class RecordedRun:
    """One of the two runs.

    Attributes:
        name: The name of the run in messages.
        run: Its record.
        steps: Its recorded steps, with the values that identify them.
    """

    name: str
    run: Run
    steps: list[RecordedStep]

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run.folder

    def read_line(self, source: str, step: int) -> str:
        """Return the source text of the line `source`, such as "train.py:31 in forward".

        "" unless exactly one of the sources stored for the step has that file name.
        """
        name, _, rest = source.partition(":")
        number = rest.partition(" ")[0]
        file = self.find_sources(step).get(Path(name).name)
        if file is None or not number.isdecimal():
            return ""
        return linecache.getline(str(file), int(number)).strip()

    def find_sources(self, step: int) -> dict[str, Path]:
        """Return the source files of a step by name, without files whose name is not unique."""
        stored = self.run.find_stored_sources(step)
        if stored is None:
            return {}
        files = [path for path in stored.rglob("*") if path.is_file()]
        counts = Counter(path.name for path in files)
        return {path.name: path for path in sorted(files) if counts[path.name] == 1}

    def find_deviation(self, replay: Replay) -> RecordDifference | None:
        """Return the first difference between the record and a replay; None if it has none."""
        steps = {step.step: step for step in self.steps}
        digests = self.run.digests
        for step in replay.steps:
            recorded = steps.get(step.step)
            digest = digests.get(step.step + 1)
            for difference in replay_differences(recorded, digest, step):
                return difference
        return None

    @property
    def microbatches(self) -> int | None:
        """The number of micro-batches per step; None if the record does not say."""
        count = self.run.layout.get("microbatches")
        return count if isinstance(count, int) else None


def read_recorded_run(path: Path, name: str = "") -> RecordedRun:
    """Read a run.

    Args:
        path: The folder of the run, or its record.
        name: The name of the run in messages; "" for its recorded name.

    Raises:
        UsageError: There is no run, or it has no steps.
        FileError: The record cannot be read.
    """
    run = read_run(path)
    steps = read_step_fingerprints(path)
    if not steps:
        raise UsageError(f"{path} has no steps, so there is nothing to compare")
    return RecordedRun(name or run.name, run, steps)


def find_source_differences(a: RecordedRun, b: RecordedRun, step: int) -> list[str]:
    """Return the names of source files that both runs stored for a step, and that differ."""
    ours = a.find_sources(step)
    theirs = b.find_sources(step)
    return [
        name
        for name, file in ours.items()
        if name in theirs and not filecmp.cmp(file, theirs[name], shallow=False)
    ]
