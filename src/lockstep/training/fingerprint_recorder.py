"""The fingerprint recorder: records what a model's blocks compute in selected steps of a run.

    Trainer(fingerprints="unit")              every step
    LOCKSTEP_FINGERPRINTS=unit:100-110,%50    steps 100 to 110, and every 50th

In a selected step each rank hashes, for every micro-batch that it computes: the data; the inputs,
the outputs and the gradients of the outputs of each block; the gradients of the parameters; the
buffers. The ranks of the first replica also hash the state before and after the step, and the
reduced gradients; all ranks do if these are sharded, because they gather them together. A model
without blocks (`lockstep.model.blocks`) is recorded by its modules. The hashes are the same in
every layout. They are written to RUN/fingerprints (`model/fingerprint_file.py`).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.comm.collectives import all_gather_bytes
from lockstep.kernel.errors import FileError, UsageError
from lockstep.kernel.step_hooks import StepResult
from lockstep.messages import log
from lockstep.model.fingerprint_file import (
    FingerprintFile,
    count_resumes,
    encode_fingerprint,
)
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.training.history import History
from lockstep.training.resumable_run import ResumableRun
from lockstep.training.trainer_hooks import ObservedTrainer

__all__ = ["VARIABLE", "FingerprintRecorder", "StepSelection", "read_selection"]

VARIABLE = "LOCKSTEP_FINGERPRINTS"
PART = re.compile(r"(?P<first>\d+)(?:(?P<range>-)(?P<last>\d+)?)?|%(?P<every>[1-9]\d*)")


@dataclass(frozen=True)
class StepSelection:
    """The steps whose fingerprints are recorded.

    Attributes:
        text: The selection as it was given.
        ranges: The first and the last step of each range; None: the range has no end.
        every: The numbers N for which every N-th step is recorded.
    """

    text: str
    ranges: tuple[tuple[int, int | None], ...] = ()
    every: tuple[int, ...] = ()

    def __contains__(self, step: int) -> bool:
        """Return whether the fingerprints of a step are recorded."""
        return any(step % interval == 0 for interval in self.every) or any(
            first <= step and (last is None or step <= last) for first, last in self.ranges
        )


def read_selection(given: str | None) -> StepSelection | None:
    """Return the steps that `Trainer(fingerprints=)` selects.

    Args:
        given: The argument. None: the environment variable LOCKSTEP_FINGERPRINTS.

    Returns:
        The selection; None if nothing is recorded.

    Raises:
        UsageError: The text has none of the forms in `docs/guides/monitoring.md`.
    """
    source = "fingerprints" if given is not None else VARIABLE
    text = os.environ.get(VARIABLE, "") if given is None else given
    if not text:
        return None
    level, _, steps = text.partition(":")
    parts = [PART.fullmatch(part.strip()) for part in steps.split(",")] if steps else []
    if level != "unit" or text.endswith(":") or None in parts:
        raise UsageError(
            f'{source}={text!r} is not one of "unit" (every step), "unit:100-110" (steps '
            '100 to 110) and "unit:%50" (every 50th step); separate several by commas: '
            '"unit:0-9,%50"'
        )
    matches = [part for part in parts if part is not None]
    ranges = [
        (int(part["first"]), int(part["last"] or part["first"]) if _has_end(part) else None)
        for part in matches
        if part["first"]
    ]
    every = [int(part["every"]) for part in matches if part["every"]]
    return StepSelection(text, tuple(ranges), tuple(every) if matches else (1,))


def _has_end(part: re.Match[str]) -> bool:
    return not part["range"] or bool(part["last"])


class FingerprintRecorder:
    """The recording of one trainer's fingerprints on this rank.

    Args:
        selection: The steps to record.
        trainer: The trainer.
        blocks: The names of its model's blocks.
        history: The history, which on rank 0 has the folder of the run.
        run: The run, which has the step at which this process resumed it.
    """

    checkpoint: Path | None = None  # unlike a replay, recording restores no checkpoint

    def __init__(
        self,
        selection: StepSelection,
        trainer: ObservedTrainer,
        blocks: Sequence[str],
        history: History,
        run: ResumableRun,
    ) -> None:
        self._selection, self._parallel = selection, trainer.parallel
        self._history, self._run = history, run
        self._fingerprinter = Fingerprinter(
            0,
            trainer.parallel,
            trainer.called,
            trainer.module,
            trainer.has_whole_gradients,
            with_backward=True,
            names=blocks,
            with_state=trainer.parallel.replica == 0 or trainer.parallel.is_interleaved,
        )
        self._file: FingerprintFile | None = None
        self._is_open = self._is_recorded = False

    def begin_step(self, step: int) -> Fingerprinter | None:
        """Return the observer of a step; None if its fingerprints are not recorded.

        A collective call in the first step that is recorded.
        """
        if step not in self._selection:
            return None
        if not self._is_open:
            self._is_open = True
            self._open()
        return self._fingerprinter if self._is_recorded else None

    def commit(self, result: StepResult) -> None:
        """Write the fingerprint of a committed step, if it was observed."""
        fingerprinter = self._fingerprinter
        was_observed = fingerprinter.is_unfinished and fingerprinter.current.step == result.step
        if not was_observed:
            return
        # Also without a file on this rank, which takes part in gathering what is sharded.
        fingerprint = fingerprinter.commit(result.loss, "", {})
        try:
            if self._file is not None:
                self._file.write("step", **encode_fingerprint(fingerprint))
        except OSError as error:
            self._fail(error)

    def _open(self) -> None:
        parallel = self._parallel
        said = self._describe_launch().encode() if parallel.rank == 0 else b""
        messages = all_gather_bytes(said, "opening the file of fingerprints", parallel.group)
        if not messages[0]:
            return
        self._is_recorded = True
        launch, resumes, path = messages[0].decode().split(" ", 2)
        try:
            self._file = FingerprintFile(Path(path), parallel.rank)
            self._file.write(
                "begin",
                launch=launch,
                t=time.time(),
                step=self._run.resumed_from or 0,
                resumes=int(resumes),
                rank=parallel.rank,
                replicas=parallel.replicas,
                stages=parallel.stages,
            )
        except OSError as error:
            self._fail(error)

    def _describe_launch(self) -> str:
        """Return the launch's name, the number of resumptions before it, and the run's folder.

        If fingerprints cannot be recorded, print the reason and return "".
        """
        folder = self._history.find_run_folder()
        if folder is None:
            log(
                "no fingerprints are kept, because the run is not recorded: pass "
                "loggers='runs/NAME' to the trainer, or start it with `lockstep run`"
            )
            return ""
        try:
            return f"{secrets.token_hex(8)} {count_resumes(folder)} {folder}"
        except FileError as error:
            log(f"{error}; the training continues without fingerprints")
            return ""

    def _fail(self, error: OSError) -> None:
        path = self._file.path if self._file is not None else "fingerprints"
        log(
            f"rank {self._parallel.rank}: {path} cannot be written ({error.strerror}); the "
            "training continues without fingerprints of this rank"
        )
        self._file = None
