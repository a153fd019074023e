"""Running a script in one layout, and reading the fingerprints of its ranks.

command ── launch ──> rank: opens a session, redirects output to a log, runs the script
        <─ one RankFingerprint per rank, or the message of the first failure
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import RankError
from lockstep.launcher.launch import launch, launch_in_this_process
from lockstep.launcher.rank_process import run_code
from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.tools.check.difference import RankFingerprint
from lockstep.tools.check.layouts import Layout

__all__ = ["LayoutRun", "describe_failure", "is_refusal", "log_of", "read_values", "record_of"]
__all__ += ["redirect_output", "run_in_session", "run_layout", "run_script"]

TAIL = 12
"""The number of lines shown of a failed rank's output."""


@dataclass(frozen=True)
class LayoutRun:
    """The run of a script in one layout.

    Attributes:
        layout: The requested layout.
        steps: The requested number of steps per trainer.
        seconds: The time from the start of the ranks to their end, in seconds.
        ranks: The fingerprint of each rank, up to the end of that rank.
        failure: The reason why the run failed, as one sentence; "" if it succeeded.
        is_complete: Whether every rank finished.
        is_refused: Whether it failed because the model or the machine does not allow the layout.
        details: The traceback and the last lines of output of the failed rank.
    """

    layout: Layout
    steps: int
    seconds: float
    ranks: tuple[RankFingerprint, ...]
    failure: str = ""
    is_complete: bool = True
    is_refused: bool = False
    details: str = ""

    @property
    def backend(self) -> str:
        """The backend that the trainers used; the layout's if there was no trainer."""
        used = [trainer.backend for rank in self.ranks for trainer in rank.trainers]
        return used[0] if used else self.layout.backend

    @property
    def name(self) -> str:
        """The layout in words, with the backend that the trainers used."""
        return str(replace(self.layout, backend=self.backend))

    @property
    def losses(self) -> list[str]:
        """The losses of each trainer's steps on rank 0, in `float.hex` form."""
        return [step.loss for steps in self._by_trainer() for step in steps]

    @property
    def digest(self) -> str | None:
        """The digest on rank 0 after the last step; for several trainers, the SHA-256 of all."""
        digests = [steps[-1].digest for steps in self._by_trainer() if steps]
        if len(digests) < 2:
            return digests[0] if digests else None
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def _by_trainer(self) -> list[list[StepFingerprint]]:
        """Return the requested steps of each trainer on rank 0."""
        if not self.is_complete:
            return []
        first = self.ranks[0]
        return [
            [step for step in first.steps if step.trainer == number][: self.steps]
            for number in range(len(first.trainers))
        ]


def run_layout(
    script: str,
    arguments: Sequence[str],
    layout: Layout,
    steps: int,
    timeout: float,
    folder: Path,
) -> LayoutRun:
    """Run a script in a layout until its trainers have taken `steps` steps.

    Args:
        script: The file, or a folder with a `__main__.py`.
        arguments: The script's own arguments.
        layout: The layout of the trainers.
        steps: The number of steps per trainer.
        timeout: The time in seconds after which the ranks are terminated.
        folder: An existing empty folder for the output of the ranks.
    """
    begun = time.monotonic()
    order = (script, tuple(arguments), layout, steps, str(folder))
    error: RankError | None = None
    try:
        launch(_run_rank, order, layout.ranks, timeout=timeout, pass_rank=True)
    except RankError as failure:
        error = failure
    seconds = time.monotonic() - begun
    ranks = tuple(_fingerprint(record_of(folder, rank)) for rank in range(layout.ranks))
    if error is None:
        return LayoutRun(layout, steps, seconds, ranks)
    is_refused = is_refusal(layout, error)
    # Every rank refuses the layout, so the number of the first one to do so is left out.
    said = re.sub(r"^rank \d+ failed: ", "", str(error)) if is_refused else str(error)
    return LayoutRun(
        layout,
        steps,
        seconds,
        ranks,
        said,
        False,
        is_refused,
        describe_failure(error, log_of(folder, error.rank or 0)),
    )


def _run_rank(
    rank: int, script: str, arguments: Sequence[str], layout: Layout, steps: int, folder: str
) -> None:
    """Run the script, and record what it computes."""
    from lockstep.tools.check.check_session import CheckSession

    redirect_output(log_of(Path(folder), rank))
    make_session = partial(CheckSession, layout, steps)
    run = partial(run_script, script, arguments)
    run_in_session(rank, Path(folder), layout.backend, make_session, run)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as `python SCRIPT` would."""
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    run_code("script", script)


def run_in_session(
    rank: int,
    folder: Path,
    backend: str,
    make_session: Callable[[Callable[[Any], None]], Any],
    run: Callable[[], None],
) -> None:
    """Run a program in this process, in the session of a command.

    Args:
        rank: The rank of this process.
        folder: The folder for the recorded values.
        backend: The backend for CPU tensors; "" for the program's own choice.
        make_session: A function of `record`, which pickles a value to the file `record_of`. Its
            method `record_unfinished` is called if the program fails.
        run: A function that runs the program.
    """
    from lockstep.training.trainer_hooks import SessionComplete, open_session

    os.environ["LOCKSTEP_RUN"] = str(folder)
    if backend:
        os.environ["LOCKSTEP_BACKEND"] = backend
    with record_of(folder, rank).open("xb", buffering=0) as file:
        session = make_session(lambda value: pickle.dump(value, file))
        try:
            with open_session(session), launch_in_this_process():
                run()
        except SessionComplete:
            pass
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return
            session.record_unfinished()
            raise


def log_of(folder: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return folder / f"rank-{rank}.log"


def record_of(folder: Path, rank: int) -> Path:
    """Return the file with the values of a rank."""
    return folder / f"rank-{rank}.pickle"


def _fingerprint(record: Path) -> RankFingerprint:
    """Return the fingerprints that a rank recorded before it ended."""
    fingerprint = RankFingerprint()
    for value in read_values(record):
        if isinstance(value, TrainerFingerprint):
            fingerprint.trainers.append(value)
        else:
            fingerprint.steps.append(value)
    return fingerprint


def read_values(record: Path) -> Iterator[Any]:
    """Yield the values that a rank pickled into a file before it ended."""
    ends = FileNotFoundError, EOFError, pickle.UnpicklingError
    with contextlib.suppress(*ends), record.open("rb") as file:
        while True:
            yield pickle.load(file)


def redirect_output(log: Path) -> None:
    """Redirect standard output and error to a file, and standard input to the null device."""
    for number, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        descriptor = os.open(file, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)


def is_refusal(layout: Layout, error: RankError) -> bool:
    """Return whether an error says that the model, or this machine, does not allow the layout."""
    if error.exception == "LayoutError":
        return True
    words = {"stage": layout.stages > 1, "shared": layout.shared, "GPU": layout.ranks > 1}
    return error.exception == "UsageError" and any(
        applies and word in str(error) for word, applies in words.items()
    )


def describe_failure(error: RankError, log: Path) -> str:
    """Return the last lines of output of a failed rank, and its traceback."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    printed = [f"the last lines of rank {error.rank}:", *(f"    {line}" for line in lines)]
    return "\n".join([*(printed if lines else ()), *getattr(error, "__notes__", ())])
