"""The progress display of a run, on rank 0.

    on a terminal    a live region, redrawn at most five times per second
    elsewhere        one line per epoch, and one every ten seconds within a long epoch

The output of a rank of `lockstep run`, or of a driver's worker, goes to a pipe. Such a rank prints
the lines, and sends the content of the region to its launcher, which draws it on its terminal.

The display of a trainer in a script does not know the number of epochs. It prints no plain line in
its first ten seconds, and none for epochs that end within a second of the last line. One live
region is shown at a time; that of another trainer follows when the first one takes no more steps.

Everything is written to standard error; standard output is reserved for results. The calls
themselves draw, not a thread.

The time left is estimated from the recent steps and the last pause between two epochs:

    steps      s s s ... s | evaluation | s s s ... s | evaluation | ...
                           ~~~~~~~~~~~~~ the pause between two epochs
    left   =   steps left x duration of a recent step  +  pauses left x duration of the last pause

A step is measured from the end of the previous one, so the estimate includes everything
between two steps, such as loading data and the user's code.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

from rich.markup import escape

from lockstep.formatting import format_duration, format_loss, format_metric, format_number
from lockstep.launcher.live_region import LiveRegion, is_terminal
from lockstep.launcher.rank_process import send_progress
from lockstep.messages import discard_if_lost
from lockstep.record.format import TIME_CATEGORIES

__all__ = ["Progress", "ProgressMeter", "ScriptProgress"]

REDRAW_INTERVAL = 0.2  # seconds between two drawings of the live region
LINE_INTERVAL = 10.0  # seconds between two plain lines within an epoch
EPOCH_INTERVAL = 1.0  # minimum seconds between the lines of two epochs in a script
IDLE_SECONDS = 2.0  # without a step, after which a new trainer replaces the shown one
TURN = 20  # steps that a trainer takes before it replaces a shown one that took none meanwhile
SMOOTHING = 0.98  # weight of the past in a moving average: about the last fifty steps count
MIN_STEPS = 5  # steps before the time left is shown
BAR = 20  # cells
COLORS = {"compute": "cyan", "communication": "blue", "waiting": "yellow", "data": "magenta"}


class Progress:
    """The logger that displays the progress of a run.

    A call of `step` that does not draw takes about 2 microseconds.

    Args:
        epochs: The number of epochs of the run. None: unknown.
        steps: The number of steps per epoch. None: unknown.
        title: A description of the run, such as "digits, 2 replicas x 8 micro-batches, gloo".
        stream: The stream to write to. None: standard error.
        clock: A monotonic clock, in seconds.
        is_live: Whether a live region may be drawn.
        prints_lines: Whether to print lines above the live region, or without one.
    """

    def __init__(
        self,
        *,
        epochs: int | None,
        steps: int | None = None,
        title: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool = True,
        prints_lines: bool = True,
    ) -> None:
        self.title, self._prints_lines = title, prints_lines
        self.meter = ProgressMeter(epochs, steps, clock())
        self._clock, self._stream = clock, stream or sys.stderr
        self.is_live = is_live and is_terminal(self._stream)
        """Whether there is a live region on the terminal of this process."""
        self._live = LiveRegion(self._stream) if self.is_live else None
        self._draw_region: Callable[[Sequence[str]], None] = lambda lines: None
        if self._live is not None:
            self._draw_region = self._live.draw
        elif is_live and stream is None:
            self._draw_region = send_progress
        self._next = clock() + REDRAW_INTERVAL
        self._next_line = clock() + LINE_INTERVAL
        if title and self._live is None:
            self._print(title)

    def step(self, **fields: Any) -> None:
        """Add one step, with the fields of its line, and draw if the last drawing is old enough."""
        now = self._clock()
        self.meter.step(now, fields)
        if now >= self._next_line and self._live is None:
            self._next_line = now + LINE_INTERVAL
            parts = [self.meter.name(), f"step {self.meter.position()}", *self._figures()]
            self._print(*parts, self._left(now))
        if now >= self._next:
            self._draw_region(self._region(now))
            # Drawing takes at most 5% of the time.
            self._next = now + max(REDRAW_INTERVAL, 20 * (self._clock() - now))

    def epoch(self, **fields: Any) -> None:
        """Print the permanent line of an epoch that has ended, with the fields of its line."""
        parts = [self.meter.name(fields["epoch"]), ", ".join(_format_means(fields))]
        if evaluation := fields.get("evaluation"):
            parts.append(_describe_evaluation(evaluation))
        if seconds := fields.get("seconds"):
            rate = format_number(fields["samples"] / seconds)
            parts += [f"{rate} samples/s", format_duration(seconds)]
        self._print(*parts)
        self._draw_region(self._region(self._clock()))

    def evaluation(self, **fields: Any) -> None:
        """Print the line of an evaluation that follows the line of its epoch."""
        self._print(self.meter.name(), _describe_evaluation(fields))

    def resume(self, *, step: int = 0, epochs: int = 0, **_: Any) -> None:
        """Continue an interrupted run at a step.

        Args:
            step: The number of the next step, over all epochs.
            epochs: The number of completed epochs.
        """
        now = self._clock()
        self.meter.resume(now, step, epochs)
        self._next, self._next_line = now + REDRAW_INTERVAL, now + LINE_INTERVAL

    def write(self, kind: str, /, **fields: Any) -> None:
        """Display one line of the record; kinds without a display are ignored."""
        if kind in ("step", "epoch", "resume"):
            getattr(self, kind)(**fields)
        elif kind == "warning":
            self._print(str(fields.get("message", "")))

    def close(self) -> None:
        """Remove the live region from the screen. Calling it again does nothing."""
        self._draw_region([])
        if self._live is not None:
            self._live.close()
            self._live = None

    def _print(self, *texts: str) -> None:
        parts = list(filter(None, texts))
        width = get_terminal_size().columns if self._live else math.inf
        while len(parts) > 2 and len("  ".join(parts)) >= width:
            parts.pop()  # the most important parts come first
        line = "  ".join(parts)
        if self._live is not None:
            self._live.print(line)
        elif self._stream is not None and self._prints_lines:
            try:
                print(line, file=self._stream, flush=True)
            except OSError as error:  # a closed terminal, a full disk
                discard_if_lost(self._stream, error)

    def _left(self, now: float) -> str:
        left = self.meter.seconds_left(now)
        if left is None:
            return ""
        what = "left" if self.meter.epochs is not None else "left in the epoch"
        return f"{format_duration(round(left))} {what}"

    def _figures(self) -> list[str]:
        meter = self.meter
        metrics = {name: mean.value for name, mean in meter.metrics.items()}
        means = _format_means({"loss": meter.loss.value, "metrics": metrics})
        if not (seconds := meter.step_seconds.value):
            return means
        return [*means, f"{format_number(meter.samples.value / seconds)} samples/s"]

    def _region(self, now: float) -> list[str]:
        """Return the lines of the live region, with rich's markup."""
        meter, bar = self.meter, ""
        if meter.steps:
            full = round(BAR * min(1.0, meter.done / meter.steps))
            bar = f"[green]{'━' * full}[/][dim]{'─' * (BAR - full)}[/]"
        position = f"{'' if meter.has_epochs else 'step '}{meter.position()}"
        seconds = meter.step_seconds
        shares = [f"step {format_duration(seconds.value)}"] if seconds.count else []
        shares += [
            f"[{COLORS[name]}]{name} {share:.0%}[/]" for name, share in meter.time_shares().items()
        ]
        lines = [
            [f"[bold]{escape(self.title)}[/]" if self.title else ""],
            [meter.name(), bar, position, self._left(now)],
            [escape(figure) for figure in self._figures()],
            shares,
        ]
        return [text for parts in lines if (text := "  ".join(filter(None, parts)))]


class ScriptProgress:
    """The progress display of one trainer in a script, which appears with its first step.

    It shows nothing while the display of another trainer (as in a GAN) or a progress bar of tqdm
    is on the screen.

    Args:
        is_wanted: Whether to show it anyway, as plain lines if another trainer is shown.
        stream: The stream to write to. None: standard error.
        clock: A monotonic clock, in seconds.
    """

    _shown: ScriptProgress | None = None

    def __init__(
        self,
        is_wanted: bool = False,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_wanted, self._stream, self._clock = is_wanted, stream, clock
        self.epochs: int | None = None
        """The number of epochs of the run; None if it is not known."""
        self.prints_lines = True
        """Whether to print lines; a driver draws the live region of its rank 0 instead."""
        self._display: Progress | None = None
        self._epoch: tuple[int, int | None, int] | None = None
        self._begun = 0.0  # the time at which the epoch began
        self._count = 0  # the number of this trainer's steps
        self._seen = -1  # the other trainer's count at the last attempt to replace it
        self._line_after = 0.0  # no line of an epoch is printed before this time
        self._has_line = False  # whether the line of the last epoch was printed

    def begin_epoch(self, epoch: int, steps: int | None, done: int) -> None:
        """Begin an epoch, with the arguments of `ProgressMeter.begin_epoch`."""
        self._epoch, self._begun = (epoch, steps, done), self._clock()
        if self._display is not None:
            self._display.meter.epochs = self.epochs
            self._display.meter.begin_epoch(epoch, steps, done)

    def step(self, **fields: Any) -> None:
        """Add one step."""
        self._count += 1
        if self._display is None and self._count % TURN == 1:
            self._try_to_show()
        if self._display is not None:
            if self._epoch is not None:  # also for a step that the script takes between two epochs
                fields["epoch"] = self._epoch[0]
            self._display.step(**fields)

    def epoch(self, **fields: Any) -> None:
        """Print the line of an epoch that has ended, at most one line per second."""
        self._has_line = self._display is not None and self._clock() >= self._line_after
        if self._display is not None and self._has_line:
            # Include the script's work between the steps, as the live region does.
            self._display.epoch(**fields | {"seconds": self._clock() - self._begun})
            self._line_after = self._clock() + EPOCH_INTERVAL

    def evaluation(self, loss: float, metrics: dict[str, float], ema: bool = False) -> None:
        """Print the line of an evaluation after an epoch, below that of the epoch."""
        if self._display is not None and self._has_line:
            self._display.evaluation(loss=loss, metrics=metrics, ema=ema)

    def close(self) -> None:
        """Remove the display. Another step shows it again."""
        if self._display is not None:
            self._display.close()
            self._display = None
        if ScriptProgress._shown is self:
            ScriptProgress._shown = None
        self._count = 0

    def _try_to_show(self) -> None:
        other = ScriptProgress._shown
        if other is not None and self._may_replace(other):
            other.close()
            other = None
        if not self._is_wanted and (other is not None or _has_progress_bar()):
            return
        if other is None:
            ScriptProgress._shown = self
        self._display = Progress(
            epochs=self.epochs,
            stream=self._stream,
            clock=self._clock,
            is_live=other is None,
            prints_lines=self.prints_lines,
        )
        if self._epoch is not None:
            self._display.meter.begin_epoch(*self._epoch)
        wait = EPOCH_INTERVAL if self._display.is_live else LINE_INTERVAL
        self._line_after = self._clock() + wait

    def _may_replace(self, other: ScriptProgress) -> bool:
        """Return whether this trainer replaces the one that is shown.

        It does if the other one has taken no step since the last attempt. At the first attempt, it
        does if the other one is idle, as in an interrupted cell of a notebook, or if only this one
        has epochs, as with a GAN.
        """
        seen, self._seen = self._seen, other._count
        if self._count > 1:
            return seen == other._count
        idle = other._display.meter.seconds_idle(self._clock()) if other._display else 0.0
        return idle > IDLE_SECONDS or (self._epoch is not None and other._epoch is None)


class Mean:
    """A moving average of about the last fifty values."""

    def __init__(self) -> None:
        self.count = 0
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self._total = SMOOTHING * self._total + value
        self._weight = SMOOTHING * self._weight + 1

    @property
    def value(self) -> float:
        """The average; 0 before the first value."""
        return self._total / self._weight if self.count else 0.0


class ProgressMeter:
    """Moving averages of a run, and the estimate of the time left.

    Args:
        epochs: The number of epochs of the run. None: unknown.
        steps: The number of steps per epoch. None: unknown.
        now: The time at which the run begins, in seconds of the clock that all calls use.
    """

    def __init__(self, epochs: int | None, steps: int | None, now: float) -> None:
        self.epochs = epochs
        self.has_epochs = epochs is not None
        """Whether the steps belong to epochs."""
        self.steps = steps
        self.epoch = 0
        """The current epoch, from 0."""
        self.done = 0
        """The number of completed steps in the epoch."""
        self.loss, self.samples, self.step_seconds = Mean(), Mean(), Mean()
        """The means over steps; a step lasts from the end of the previous one."""
        self.metrics: dict[str, Mean] = defaultdict(Mean)
        self._times = [0.0] * len(TIME_CATEGORIES)
        self._last = now
        self._is_resumed = False  # whether the next step is the first one after a resumption
        self._is_partial = False  # whether the epoch began in an earlier process
        self._pause = 0.0

    def step(self, now: float, fields: Mapping[str, Any]) -> None:
        """Add one step, which ended at `now`, with the fields of its line in the record."""
        passed, self._last = now - self._last, now
        epoch = fields.get("epoch", 0)
        if self._is_resumed:  # the time before it is that of the start of the process
            self._is_resumed, self.epoch = False, epoch
        elif epoch != self.epoch:
            self._pause = max(0.0, passed - self.step_seconds.value)
            self.begin_epoch(epoch, self.steps, 0)
        elif self.done:  # the first step of an epoch follows a pause
            self.step_seconds.add(passed)
        self.done += 1
        self.loss.add(fields["loss"])
        self.samples.add(fields.get("samples", 0))
        for name, value in (fields.get("metrics") or {}).items():
            self.metrics[name].add(value)
        for row in fields.get("ranks") or ():
            times = zip(self._times, row, strict=True)
            self._times = [SMOOTHING * past + new for past, new in times]

    def resume(self, now: float, step: int, epochs: int) -> None:
        """Continue at a step, counted over all epochs, after some completed epochs."""
        self._last, self._is_resumed, self._is_partial = now, True, True
        self.epoch, self.done = divmod(step, self.steps) if self.steps else (epochs, 0)

    def begin_epoch(self, epoch: int, steps: int | None, done: int) -> None:
        """Begin an epoch.

        Args:
            epoch: The number of the epoch, from 0.
            steps: The number of its steps. None: unknown, assumed to be that of the last epoch.
            done: The number of its steps that an earlier process took.
        """
        self.has_epochs = True
        if steps is None and self.done and epoch != self.epoch and not self._is_partial:
            steps = self.done
        self.epoch, self.steps, self.done, self._is_partial = epoch, steps, done, done > 0

    def name(self, epoch: int | None = None) -> str:
        """Return the name of an epoch, such as "epoch 3/10"; empty if there are none."""
        if not self.has_epochs:
            return ""
        total = "" if self.epochs is None else f"/{self.epochs}"
        return f"epoch {(self.epoch if epoch is None else epoch) + 1}{total}"

    def position(self) -> str:
        """Return the step within the epoch, such as "31/51"."""
        is_within = self.steps and self.done <= self.steps
        return f"{self.done}/{self.steps}" if is_within else f"{self.done}"

    def seconds_idle(self, now: float) -> float:
        """Return the seconds since the last step."""
        return now - self._last

    def time_shares(self) -> dict[str, float]:
        """Return the fraction of the ranks' time per category; empty if there are no times."""
        total = sum(self._times)
        times = zip(TIME_CATEGORIES, self._times, strict=True)
        return {name: part / total for name, part in times} if total > 0 else {}

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the end of the run; None if there is no estimate."""
        if self.step_seconds.count < MIN_STEPS or not self.steps:
            return None
        epochs = 0 if self.epochs is None else max(0, self.epochs - self.epoch - 1)
        steps = max(0, self.steps - self.done) + epochs * self.steps
        left = steps * self.step_seconds.value + epochs * self._pause
        return max(0.0, left - self.seconds_idle(now))


def _describe_evaluation(fields: Mapping[str, Any]) -> str:
    weights = " (EMA)" if fields.get("ema") else ""
    return f"held out{weights}: {', '.join(_format_means(fields))}"


def _format_means(fields: Mapping[str, Any]) -> list[str]:
    """Format the loss and the metrics of a line."""
    loss, metrics = fields.get("loss"), fields.get("metrics") or {}
    means = [format_metric(name, value) for name, value in metrics.items()]
    if loss is None or loss != loss:  # the model returns none in evaluation mode
        return means
    return [f"loss {format_loss(loss)}", *means]


def _has_progress_bar() -> bool:
    """Return whether the script shows a progress bar of tqdm."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(bars, "_instances", ()))
