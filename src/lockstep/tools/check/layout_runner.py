"""Running a script in one layout, and reading the fingerprints of its ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.tools.check.difference import RankFingerprint
from lockstep.tools.check.layouts import Layout
from lockstep.tools.check.session_launch import launch_session, run_script

__all__ = ["LayoutRun", "run_layout"]


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
    script: str, arguments: Sequence[str], layout: Layout, steps: int, timeout: float
) -> LayoutRun:
    """Run a script in a layout until its trainers have taken `steps` steps.

    Args:
        script: The file, or a folder with a `__main__.py`.
        arguments: The script's own arguments.
        layout: The layout of the trainers.
        steps: The number of steps per trainer.
        timeout: The time in seconds after which the ranks are terminated.
    """
    order = (script, tuple(arguments), layout, steps)
    run = launch_session(_start, order, layout.ranks, timeout=timeout)
    ranks = tuple(map(_fingerprint, run.values))
    if run.error is None:
        return LayoutRun(layout, steps, run.seconds, ranks)
    is_refused = run.error.code == "layout"
    # By every rank, so the number of the first one to do so is left out.
    said = run.error.reason if is_refused else str(run.error)
    return LayoutRun(
        layout,
        steps,
        seconds=run.seconds,
        ranks=ranks,
        failure=said,
        is_complete=False,
        is_refused=is_refused,
        details=run.details,
    )


def _start(
    record: Callable[[Any], None],
    folder: Path,
    script: str,
    arguments: Sequence[str],
    layout: Layout,
    steps: int,
) -> tuple[Any, Callable[[], None]]:
    """Return the session of a rank, and a function that runs the script."""
    from lockstep.tools.check.check_session import CheckSession

    if layout.backend:
        os.environ["LOCKSTEP_BACKEND"] = layout.backend
    return CheckSession(layout, steps, record), partial(run_script, script, arguments)


def _fingerprint(values: Sequence[Any]) -> RankFingerprint:
    """Return the fingerprints that a rank recorded before it ended."""
    fingerprint = RankFingerprint()
    for value in values:
        if isinstance(value, TrainerFingerprint):
            fingerprint.trainers.append(value)
        else:
            fingerprint.steps.append(value)
    return fingerprint
