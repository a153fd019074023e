"""The progress display of a trainer, on rank 0.

    on a terminal    a live region, redrawn at most five times per second
    elsewhere        one line per epoch, and one every ten seconds within a long epoch

The output of a rank of `lockstep run`, or of a driver's worker, goes to a pipe. Such a rank prints
the lines, and sends the content of the region to its launcher, which draws it on its terminal.

A script prints no plain line in its first ten seconds, and none for epochs that end within a second
of the last line. One live region is shown at a time: that of another trainer follows when the first
one has taken no step for two seconds, as in an interrupted cell of a notebook.

Everything is written to standard error; standard output is reserved for results. The calls
themselves draw, not a thread. A step is measured from the end of the previous one, so the time left
includes what the user's code does between two steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, ClassVar, TextIO

from rich.markup import escape

from lockstep.formatting import format_duration, format_loss, format_metric, format_number
from lockstep.launcher.live_region import LiveRegion, is_terminal
from lockstep.launcher.rank_process import send_progress
from lockstep.messages import discard_if_lost
from lockstep.record.columns import TIME_CATEGORIES

__all__ = ["Progress"]

REDRAW_INTERVAL = 0.2  # seconds between two drawings of the live region
LINE_INTERVAL = 10.0  # seconds between two plain lines within an epoch
EPOCH_INTERVAL = 1.0  # minimum seconds between the lines of two epochs
IDLE_SECONDS = 2.0  # without a step, after which a new trainer replaces the shown one
SMOOTHING = 0.98  # weight of the past in a moving average: about the last fifty steps count
MIN_STEPS = 5  # steps before the time left is shown
BAR = 20  # cells
COLORS = {"compute": "cyan", "communication": "blue", "waiting": "yellow", "data": "magenta"}


class Mean:
    """A moving average of about the last fifty values."""

    def __init__(self) -> None:
        self.count = 0
        self._total = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self._total = SMOOTHING * self._total + value
        self._weight = SMOOTHING * self._weight + 1

    @property
    def value(self) -> float:
        """The average; 0 before the first value."""
        return self._total / self._weight if self.count else 0.0


# It has many attributes: the figures of the last step, and when each was last shown.
class Progress:
    """The progress display of one trainer, which appears with its first step.

    It shows nothing while the display of another trainer (as in a GAN) or a progress bar of tqdm
    is on the screen. A call of `step` that does not draw takes about 2 microseconds.

    Args:
        is_wanted: Whether to show it anyway, as plain lines if another trainer is shown, and with a
            line for every epoch.
        title: A description of the run, such as "digits, 2 replicas x 8 micro-batches, gloo".
        epochs: The number of epochs of the run; None if it is not known.
        stream: The stream to write to. None: standard error.
        clock: A monotonic clock, in seconds.
    """

    _shown: ClassVar[Progress | None] = None

    def __init__(
        self,
        is_wanted: bool = False,
        *,
        title: str = "",
        epochs: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_wanted = is_wanted
        self._given = stream
        self._clock = clock
        self.title = title
        self.epochs = epochs
        self.prints_lines = True
        """Whether to print lines; a driver draws the live region of its rank 0 instead."""
        self._is_on = False
        self._stream = stream or sys.stderr
        self._live: LiveRegion | None = None
        self._draw_region: Callable[[Sequence[str]], None] = _draw_nothing
        # Times of the clock.
        self._last = 0.0
        self._next = 0.0
        self._next_line = 0.0
        self._line_after = 0.0
        self._epoch: int | None = None  # None: the steps belong to no epoch
        self._steps: int | None = None  # of the epoch
        self._first = 0  # steps of the epoch taken before this process
        self._done = 0  # steps of the epoch taken by now
        self._loss = Mean()
        self._samples = Mean()
        self._seconds = Mean()
        self._metrics: dict[str, Mean] = defaultdict(Mean)
        self._times = [0.0] * len(TIME_CATEGORIES)

    def begin_epoch(self, epoch: int, steps: int | None, done: int) -> None:
        """Begin an epoch.

        Args:
            epoch: The number of the epoch, from 0.
            steps: The number of its steps. None: unknown.
            done: The number of its steps that an earlier process took.
        """
        self._epoch = epoch
        self._steps = steps
        self._done = done
        self._first = done

    def step(self, **fields: Any) -> None:
        """Add one step, with the fields of its line, and draw if the last drawing is old enough."""
        now = self._clock()
        if not self._is_on:
            self._try_to_show(now)
        if self._done > self._first:  # the first step of an epoch follows a pause
            self._seconds.add(now - self._last)
        self._last = now
        self._done += 1
        self._loss.add(fields["loss"])
        self._samples.add(fields.get("samples", 0))
        for name, value in (fields.get("metrics") or {}).items():
            self._metrics[name].add(value)
        for row in fields.get("ranks") or ():
            times = zip(self._times, row, strict=True)
            self._times = [SMOOTHING * past + new for past, new in times]
        if not self._is_on:
            return
        if now >= self._next_line and self._live is None:
            self._next_line = now + LINE_INTERVAL
            self._print(self._name(), f"step {self._position()}", *self._figures(), self._left(now))
        if now >= self._next:
            self._draw_region(self._region(now))
            # Drawing takes at most 5% of the time.
            self._next = now + max(REDRAW_INTERVAL, 20 * (self._clock() - now))

    def epoch(self, **fields: Any) -> None:
        """Print the line of an epoch that has ended, with the fields of its line."""
        now = self._clock()
        if not self._is_on or now < self._line_after:
            return
        self._line_after = now + (0.0 if self._is_wanted else EPOCH_INTERVAL)
        parts = [self._name(fields["epoch"]), ", ".join(_format_means(fields))]
        if evaluation := fields.get("evaluation"):
            weights = " (EMA)" if evaluation.get("ema") else ""
            parts.append(f"held out{weights}: {', '.join(_format_means(evaluation))}")
        if seconds := fields.get("seconds"):
            rate = format_number(fields["samples"] / seconds)
            parts += [f"{rate} samples/s", format_duration(seconds)]
        self._print(*parts)
        self._draw_region(self._region(now))

    def close(self) -> None:
        """Remove the display. Another step shows it again."""
        self._draw_region([])
        if self._live is not None:
            self._live.close()
            self._live = None
        self._is_on = False
        self._draw_region = _draw_nothing
        if Progress._shown is self:
            Progress._shown = None

    def _try_to_show(self, now: float) -> None:
        other = Progress._shown
        if other is not None and now - other._last > IDLE_SECONDS:
            other.close()
            other = None
        if not self._is_wanted and (other is not None or _has_progress_bar()):
            return
        self._is_on = True
        self._stream = self._given or sys.stderr
        if other is None:
            Progress._shown = self
            if is_terminal(self._stream):
                self._live = LiveRegion(self._stream)
                self._draw_region = self._live.draw
            elif self._given is None:
                self._draw_region = send_progress
        self._next = now + REDRAW_INTERVAL
        self._next_line = now + LINE_INTERVAL
        quiet = EPOCH_INTERVAL if self._live is not None else LINE_INTERVAL
        self._line_after = now + (0.0 if self._is_wanted else quiet)
        if self.title and self._live is None:
            self._print(self.title)

    def _print(self, *texts: str) -> None:
        parts = list(filter(None, texts))
        width = get_terminal_size().columns if self._live else math.inf
        while len(parts) > 2 and len("  ".join(parts)) >= width:
            parts.pop()  # the most important parts come first
        line = "  ".join(parts)
        if self._live is not None:
            self._live.print(line)
        elif self._stream is not None and self.prints_lines:
            try:
                print(line, file=self._stream, flush=True)
            except OSError as error:  # a closed terminal, a full disk
                discard_if_lost(self._stream, error)

    def _name(self, epoch: int | None = None) -> str:
        """Return the name of an epoch, such as "epoch 3/10"; empty if there are none."""
        number = self._epoch if epoch is None else epoch
        if self._epoch is None or number is None:
            return ""
        return f"epoch {number + 1}" + ("" if self.epochs is None else f"/{self.epochs}")

    def _position(self) -> str:
        """Return the step within the epoch, such as "31/51"."""
        is_within = self._steps is not None and self._done <= self._steps
        return f"{self._done}/{self._steps}" if is_within else f"{self._done}"

    def _left(self, now: float) -> str:
        """Return the estimated time until the end of the run or of the epoch, in words."""
        if self._seconds.count < MIN_STEPS or not self._steps:
            return ""
        steps = max(0, self._steps - self._done)
        if self.epochs is not None:
            steps += max(0, self.epochs - (self._epoch or 0) - 1) * self._steps
        left = format_duration(round(steps * self._seconds.value))
        return f"{left} left" if self.epochs is not None else f"{left} left in the epoch"

    def _figures(self) -> list[str]:
        metrics = {name: mean.value for name, mean in self._metrics.items()}
        means = _format_means({"loss": self._loss.value, "metrics": metrics})
        if not (seconds := self._seconds.value):
            return means
        return [*means, f"{format_number(self._samples.value / seconds)} samples/s"]

    def _region(self, now: float) -> list[str]:
        """Return the lines of the live region, with rich's markup."""
        bar = ""
        if self._steps:
            full = round(BAR * min(1.0, self._done / self._steps))
            bar = f"[green]{'━' * full}[/][dim]{'─' * (BAR - full)}[/]"
        position = f"{'step ' if self._epoch is None else ''}{self._position()}"
        shares = [f"step {format_duration(self._seconds.value)}"] if self._seconds.count else []
        if total := sum(self._times):
            shares += [
                f"[{COLORS[name]}]{name} {part / total:.0%}[/]"
                for name, part in zip(TIME_CATEGORIES, self._times, strict=True)
            ]
        lines = [
            [f"[bold]{escape(self.title)}[/]" if self.title else ""],
            [self._name(), bar, position, self._left(now)],
            [escape(figure) for figure in self._figures()],
            shares,
        ]
        return [text for parts in lines if (text := "  ".join(filter(None, parts)))]


def _draw_nothing(lines: Sequence[str]) -> None:
    """Draw no live region."""


def _format_means(fields: Mapping[str, Any]) -> list[str]:
    """Format the loss and the metrics of a line."""
    loss = fields.get("loss")
    metrics = fields.get("metrics") or {}
    means = [format_metric(name, value) for name, value in metrics.items()]
    if loss is None or loss != loss:  # the model returns none in evaluation mode
        return means
    return [f"loss {format_loss(loss)}", *means]


def _has_progress_bar() -> bool:
    """Return whether the script shows a progress bar of tqdm."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(bars, "_instances", ()))
