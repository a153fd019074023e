"""What the progress knows: running figures of a run, and how long it may still take.

    steps      s s s ... s | evaluation | s s s ... s | evaluation | ...
                           ~~~~~~~~~~~~~ the pause between two epochs
    left   =   steps left x a recent step  +  pauses left x the last pause

A step counts from the end of the one before, so that everything between two
steps (loading, a user's own code) is in the estimate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from lockstep.record.recorder import PARTS

__all__ = ["Meter"]

PAST = 0.98  # weight of the past in a moving mean: about the last fifty steps count
WINDOW = 5.0  # seconds over which the speed is taken
SURE = 5  # steps before which the time left is not said


class Meter:
    """Running figures of a run of `epochs` epochs of `steps` steps (None: not known).

    Times are seconds on one monotonic clock, which stands at `now`.
    """

    def __init__(self, epochs: int, steps: int | None, now: float) -> None:
        self.epochs = epochs
        self.steps = steps
        self.current = 0
        """The epoch, from 0."""
        self.done = 0
        """The steps of the epoch that are done."""
        self._last = now
        self._known = 0  # steps whose seconds are known
        self._step = 0.0
        self._pause = 0.0
        self._weight = self._loss = 0.0
        self._metrics: dict[str, float] = {}
        self._parts = [0.0] * len(PARTS)
        self._samples = 0
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])

    def step(
        self,
        now: float,
        epoch: int,
        loss: float,
        samples: int,
        metrics: Mapping[str, float] | None,
        ranks: Sequence[Sequence[float]],
    ) -> None:
        """Take one step that ended `now`."""
        passed, self._last = now - self._last, now
        if epoch != self.current:
            self._turn(epoch, passed)
        elif self.done:  # the first step of an epoch stands behind a pause
            self._known += 1
            self._step += max(1 - PAST, 1 / self._known) * (passed - self._step)
        self.done += 1
        self._samples += samples
        self._weight = PAST * self._weight + 1 - PAST
        self._loss = PAST * self._loss + (1 - PAST) * loss
        for name, value in (metrics or {}).items():
            past = self._metrics.get(name, value)
            self._metrics[name] = PAST * past + (1 - PAST) * value
        for row in ranks:
            self._parts = [
                PAST * past + fresh for past, fresh in zip(self._parts, row, strict=True)
            ]

    def _turn(self, epoch: int, passed: float) -> None:
        """Begin another epoch; what passed since the last step was its step and a pause."""
        self.steps = self.steps or self.done or None
        self._pause = max(0.0, passed - self._step)
        self.current, self.done = epoch, 0

    def loss(self) -> float:
        """Return the mean loss of about the last fifty steps."""
        return self._loss / self._weight if self._weight else float("nan")

    def metrics(self) -> dict[str, float]:
        """Return the mean metrics of about the last fifty steps."""
        return self._metrics

    def step_seconds(self) -> float:
        """Return what a step takes, from the end of the one before."""
        return self._step

    def shares(self) -> dict[str, float]:
        """Return how the ranks' time splits, by part; empty where ranks gave no times."""
        total = sum(self._parts)
        if total <= 0:
            return {}
        return {name: part / total for name, part in zip(PARTS, self._parts, strict=True)}

    def speed(self, now: float) -> float:
        """Return samples a second over the last few seconds; call it once a drawing."""
        self._marks.append((now, self._samples))
        while len(self._marks) > 2 and self._marks[1][0] < now - WINDOW:
            self._marks.popleft()
        since, before = self._marks[0]
        seconds = now - since
        return (self._samples - before) / seconds if seconds > 0 else float("nan")

    def fraction(self) -> float | None:
        """Return how much of the epoch is done, between 0 and 1; None if that is not known."""
        return min(1.0, self.done / self.steps) if self.steps else None

    def place(self) -> str:
        """Return the step within the epoch, such as "31/51"."""
        return f"{self.done}/{self.steps}" if self.steps else f"{self.done}"

    def left(self, now: float) -> float | None:
        """Return the seconds until the run's end; None while nothing honest can be said."""
        if self._known < SURE or not self.steps:
            return None
        epochs = max(0, self.epochs - self.current - 1)
        steps = max(0, self.steps - self.done) + epochs * self.steps
        return max(0.0, steps * self._step + epochs * self._pause - (now - self._last))
