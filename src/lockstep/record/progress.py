"""The progress display of a run, on rank 0.

    on a terminal    a live region, redrawn by the calls at most five times per second
    elsewhere        one line per epoch, and one every ten seconds within a long epoch
    quiet            nothing

Everything is written to standard error; standard output is left to results. No thread
draws and the cursor is never hidden, so the terminal stays usable however the process ends.

The time left is estimated from the recent steps and the last pause between two epochs:

    steps      s s s ... s | evaluation | s s s ... s | evaluation | ...
                           ~~~~~~~~~~~~~ the pause between two epochs
    left   =   steps left x duration of a recent step  +  pauses left x duration of the last pause

A step is measured from the end of the previous one, so the estimate includes everything
between two steps, such as loading data and code of the user.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lockstep.formatting import format_duration, format_loss, format_metric, format_number
from lockstep.record.recorder import TIME_CATEGORIES

__all__ = ["Progress", "ProgressMeter"]

REDRAW_INTERVAL = 0.2  # seconds between two drawings of the live region
LINE_INTERVAL = 10.0  # seconds between two plain lines within an epoch
SMOOTHING = 0.98  # weight of the past in a moving average: about the last fifty steps count
SPEED_WINDOW = 5.0  # seconds over which the samples per second are averaged
MIN_STEPS = 5  # steps before the time left is shown
FILLS = {"compute": "█", "communication": "▓", "waiting": "▒", "data": "░"}
PLAIN_FILLS = {"compute": "#", "communication": "=", "waiting": "-", "data": "."}
STYLES = {"compute": "cyan", "communication": "blue", "waiting": "yellow", "data": "magenta"}


class Progress:
    """The logger that displays the progress of a run.

    A call of `step` that does not draw takes about 1.5 microseconds.

    Args:
        epochs: The number of epochs of the run.
        steps: The number of steps per epoch; None if it is not known.
        title: A description of the run, such as "digits, 2 replicas x 8 micro-batches, gloo".
        quiet: Show nothing.
        stream: Where to write; standard error by default.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        epochs: int,
        steps: int | None = None,
        title: str = "",
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.quiet = quiet
        self.meter = ProgressMeter(epochs, steps, clock())
        self._clock = clock
        stream = stream or sys.stderr
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._live = None if quiet or not _is_terminal(stream) else self._start_live()
        self._next = clock() + (REDRAW_INTERVAL if self._live else LINE_INTERVAL)
        if not quiet and title and self._live is None:
            self._print(title)

    def step(
        self,
        *,
        epoch: int = 0,
        loss: float = 0.0,
        samples: int = 0,
        metrics: dict[str, float] | None = None,
        ranks: Sequence[Sequence[float]] = (),
        **_: Any,
    ) -> None:
        """Add one step, and draw if the last drawing is old enough.

        Args:
            epoch: The epoch, from 0.
            loss: The mean loss of the step's samples.
            samples: The number of samples.
            metrics: The means of the metrics over the step's samples.
            ranks: For each rank the seconds of compute, communication, waiting and data.
        """
        if self.quiet:
            return
        now = self._clock()
        self.meter.step(now, epoch, loss, samples, metrics, ranks)
        if now >= self._next:
            self._draw(now)

    def epoch(
        self,
        *,
        epoch: int,
        loss: float,
        metrics: dict[str, float] | None = None,
        samples: int = 0,
        seconds: float = 0.0,
        evaluation: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Print the line of an epoch that has ended; it stays on the screen."""
        if self.quiet:
            return
        parts = [f"epoch {epoch + 1}/{self.meter.epochs}", _format_quality(loss, metrics)]
        if evaluation:
            held_out = _format_quality(evaluation.get("loss"), evaluation.get("metrics"))
            parts.append(f"held out: {held_out}")
        if seconds > 0:
            parts += [f"{format_number(samples / seconds)} samples/s", format_duration(seconds)]
        while self._live and len(parts) > 2 and len("  ".join(parts)) >= self._console.width:
            parts.pop()  # a narrow terminal: what matters most comes first, the record has all
        self._print("  ".join(parts))
        if self._live is not None:
            self._draw(self._clock())

    def resume(self, *, step: int = 0, epochs: int = 0, **_: Any) -> None:
        """Continue at a step of a run that was interrupted.

        Args:
            step: The number of the next step, over all epochs.
            epochs: The number of completed epochs.
        """
        if not self.quiet:
            self.meter.resume(self._clock(), step, epochs)
            self._next = self._clock() + (REDRAW_INTERVAL if self._live else LINE_INTERVAL)

    def note(self, message: str) -> None:
        """Print a message above the live region, or on its own line."""
        if not self.quiet:
            self._print(message, style="yellow")

    def write(self, kind: str, /, **fields: Any) -> None:
        """Display one line of the record; kinds without a display are ignored."""
        if kind == "step":
            self.step(**fields)
        elif kind == "epoch":
            self.epoch(**fields)
        elif kind == "warning":
            self.note(str(fields.get("message", "")))
        elif kind == "resume":
            self.resume(**fields)

    def close(self) -> None:
        """Remove the live region from the screen. Calling it again does nothing."""
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        """Return the progress display."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the progress display."""
        self.close()

    def _start_live(self) -> Live:
        live = Live(
            Text(""),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),  # what the user prints goes above the region
            vertical_overflow="crop",
        )
        live.start()
        self._console.show_cursor(True)
        return live

    def _draw(self, now: float) -> None:
        if self._live is None:
            self._next = now + LINE_INTERVAL
            self._print("  ".join(self._line(now)))
            return
        self._live.update(self._region(now), refresh=True)
        self._next = now + max(
            REDRAW_INTERVAL, 20 * (self._clock() - now)
        )  # drawing takes 5% at most

    def _print(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._console.print(Text(line, style=style))
        else:
            print(line, file=self._console.file, flush=True)

    def _line(self, now: float) -> list[str]:
        meter = self.meter
        parts = [f"epoch {meter.epoch + 1}/{meter.epochs}", f"step {meter.position()}"]
        parts += self._figures(now)
        left = meter.seconds_left(now)
        return parts if left is None else [*parts, f"{format_duration(round(left))} left"]

    def _figures(self, now: float) -> list[str]:
        means = [format_metric(name, value) for name, value in self.meter.metrics().items()]
        return [
            f"loss {format_loss(self.meter.loss())}",
            *means,
            f"{format_number(self.meter.samples_per_second(now))} samples/s",
        ]

    def _region(self, now: float) -> Group:
        """Return the live region; its lines are truncated to the width of the terminal."""
        width = max(self._console.width - 1, 10)
        left = self.meter.seconds_left(now)
        ending = "" if left is None else f"{format_duration(round(left))} left"
        lines = [
            Text(self.title, style="bold"),
            self._bar(width, ending),
            Text("   ".join(self._figures(now))),
            *self._time_split(width),
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis" if self._unicode() else "crop")
        return Group(*(line for line in lines if line), Text(""))

    def _bar(self, width: int, ending: str) -> Text:
        meter = self.meter
        start = f"epoch {meter.epoch + 1}/{meter.epochs}  "
        end = f"  {meter.position()}" + (f"  {ending}" if ending else "")
        room = min(width - len(start) - len(end), 40)
        done = meter.fraction()
        if room < 5 or done is None:
            return Text(start + end.strip())
        full = round(room * done)
        on, off = ("━", "─") if self._unicode() else ("=", "-")
        return Text.assemble(start, (on * full, "green"), (off * (room - full), "dim"), end)

    def _time_split(self, width: int) -> list[Text]:
        """Return a bar that shows how the time of a step is spent, and its legend."""
        shares = self.meter.time_shares()
        if not shares:
            return []
        fills = FILLS if self._unicode() else PLAIN_FILLS
        step = self.meter.step_seconds()
        start = f"step {format_duration(step)}  " if step else "step  "
        bar, legend = Text(start), Text(" " * len(start))
        for (name, share), cells in zip(
            shares.items(),
            apportion(list(shares.values()), min(40, width - len(start))),
            strict=True,
        ):
            bar.append(fills[name] * cells, STYLES[name])
            legend.append(fills[name], STYLES[name]).append(f" {name} {share:.0%}  ")
        if len(legend.plain.rstrip()) <= width:
            return [bar, legend]
        pairs = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
        return [bar, Text(", ".join(pairs))]

    def _unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")


class ProgressMeter:
    """Moving averages of a run, and the estimate of the time left.

    Args:
        epochs: The number of epochs of the run.
        steps: The number of steps per epoch; None if it is not known.
        now: The time at which the run begins, in seconds on the clock of all calls.
    """

    def __init__(self, epochs: int, steps: int | None, now: float) -> None:
        self.epochs = epochs
        self.steps = steps
        self.epoch = 0
        """The current epoch, from 0."""
        self.done = 0
        """The number of completed steps in the epoch."""
        self._last = now
        self._is_resumed = False  # the next step is the first one of this process
        self._is_partial = False  # the epoch began in an earlier process
        self._timed_steps = 0
        self._step_seconds = 0.0
        self._pause = 0.0
        self._weight = self._loss = 0.0
        self._metrics: dict[str, float] = {}
        self._times = [0.0] * len(TIME_CATEGORIES)
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
        """Add one step, which ended at `now`; `loss` and `metrics` are means over its samples."""
        passed, self._last = now - self._last, now
        if self._is_resumed:  # it follows the start of a process
            self._is_resumed, self.epoch = False, epoch
        elif epoch != self.epoch:
            self._begin_epoch(epoch, passed)
        elif self.done:  # the first step of an epoch follows a pause
            self._timed_steps += 1
            self._step_seconds += max(1 - SMOOTHING, 1 / self._timed_steps) * (
                passed - self._step_seconds
            )
        self.done += 1
        self._samples += samples
        self._weight = SMOOTHING * self._weight + 1 - SMOOTHING
        self._loss = SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        for name, value in (metrics or {}).items():
            past = self._metrics.get(name, value)
            self._metrics[name] = SMOOTHING * past + (1 - SMOOTHING) * value
        for row in ranks:
            self._times = [
                SMOOTHING * past + fresh for past, fresh in zip(self._times, row, strict=True)
            ]

    def resume(self, now: float, step: int, epochs: int) -> None:
        """Continue at a step, counted over all epochs, after some completed epochs."""
        self._last, self._is_resumed, self._is_partial = now, True, True
        self._marks = deque([(now, self._samples)])
        self.epoch, self.done = divmod(step, self.steps) if self.steps else (epochs, 0)

    def _begin_epoch(self, epoch: int, passed: float) -> None:
        """Begin an epoch; `passed` seconds are its first step and the pause before it."""
        if not self._is_partial:
            self.steps = self.steps or self.done or None
        self._is_partial = False
        self._pause = max(0.0, passed - self._step_seconds)
        self.epoch, self.done = epoch, 0

    def loss(self) -> float:
        """Return the mean loss of about the last fifty steps."""
        return self._loss / self._weight if self._weight else float("nan")

    def metrics(self) -> dict[str, float]:
        """Return the mean metrics of about the last fifty steps."""
        return self._metrics

    def step_seconds(self) -> float:
        """Return the mean duration of a step, from the end of the previous one."""
        return self._step_seconds

    def time_shares(self) -> dict[str, float]:
        """Return the fraction of the ranks' time per category; empty if there are no times."""
        total = sum(self._times)
        if total <= 0:
            return {}
        return {name: part / total for name, part in zip(TIME_CATEGORIES, self._times, strict=True)}

    def samples_per_second(self, now: float) -> float:
        """Return samples per second over the last few seconds; call it once per drawing."""
        self._marks.append((now, self._samples))
        while len(self._marks) > 2 and self._marks[1][0] < now - SPEED_WINDOW:
            self._marks.popleft()
        since, before = self._marks[0]
        seconds = now - since
        return (self._samples - before) / seconds if seconds > 0 else float("nan")

    def fraction(self) -> float | None:
        """Return the completed fraction of the epoch; None if its number of steps is not known."""
        return min(1.0, self.done / self.steps) if self.steps else None

    def position(self) -> str:
        """Return the step within the epoch, such as "31/51"."""
        return f"{self.done}/{self.steps}" if self.steps else f"{self.done}"

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the end of the run; None if there is no estimate."""
        if self._timed_steps < MIN_STEPS or not self.steps:
            return None
        epochs = max(0, self.epochs - self.epoch - 1)
        steps = max(0, self.steps - self.done) + epochs * self.steps
        return max(0.0, steps * self._step_seconds + epochs * self._pause - (now - self._last))


def _format_quality(loss: float | None, metrics: dict[str, float] | None) -> str:
    """Format a loss and metrics, separated by commas."""
    means = [format_metric(name, value) for name, value in (metrics or {}).items()]
    return ", ".join(means if loss is None else [f"loss {format_loss(loss)}", *means])


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a live region can be drawn on `stream`."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed stream
        return False


def apportion(shares: list[float], cells: int) -> list[int]:
    """Distribute `cells` in proportion to `shares`, which add up to 1, by largest remainder."""
    exact = [share * cells for share in shares]
    whole = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda at: whole[at] - exact[at])
    for at in order[: max(0, cells - sum(whole))]:
        whole[at] += 1
    return whole
