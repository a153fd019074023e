"""The progress display of a run, on rank 0.

    on a terminal    a live region, redrawn at most five times per second
    elsewhere        one line per epoch, and one every ten seconds within a long epoch
    quiet            nothing

The display of a trainer in a script does not know the number of epochs. It prints no plain line in
its first ten seconds, and none for epochs that end within a second of the last line. One live
region is shown at a time; that of another trainer follows when the first one takes no more steps.

Everything is written to standard error; standard output is reserved for results. The calls
themselves draw, not a thread, and the cursor is never hidden, so the terminal stays usable even if
the process is killed.

The time left is estimated from the recent steps and the last pause between two epochs:

    steps      s s s ... s | evaluation | s s s ... s | evaluation | ...
                           ~~~~~~~~~~~~~ the pause between two epochs
    left   =   steps left x duration of a recent step  +  pauses left x duration of the last pause

A step is measured from the end of the previous one, so the estimate includes everything
between two steps, such as loading data and the user's code.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.text import Text

from lockstep.formatting import format_duration, format_loss, format_metric, format_number
from lockstep.messages import discard_if_lost
from lockstep.record.live_region import LiveRegion, is_terminal
from lockstep.record.recorder import TIME_CATEGORIES

__all__ = ["Progress", "ProgressMeter", "ScriptProgress"]

REDRAW_INTERVAL = 0.2  # seconds between two drawings of the live region
LINE_INTERVAL = 10.0  # seconds between two plain lines within an epoch
EPOCH_INTERVAL = 1.0  # minimum seconds between the lines of two epochs in a script
IDLE_SECONDS = 2.0  # without a step, after which a new trainer replaces the shown one
TURN = 20  # steps that a trainer takes before it replaces a shown one that took none meanwhile
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
        epochs: The number of epochs of the run. None: unknown.
        steps: The number of steps per epoch. None: unknown.
        title: A description of the run, such as "digits, 2 replicas x 8 micro-batches, gloo".
        quiet: Whether to show nothing.
        stream: The stream to write to. None: standard error.
        clock: A monotonic clock, in seconds.
        is_live: Whether a live region may be drawn.
    """

    def __init__(
        self,
        *,
        epochs: int | None,
        steps: int | None = None,
        title: str = "",
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool = True,
    ) -> None:
        self.title = title
        quiet = quiet or stream is sys.stderr is None  # without one, rich uses standard output
        self.quiet = quiet
        self.meter = ProgressMeter(epochs, steps, clock())
        self._clock = clock
        stream = stream or sys.stderr
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        is_live = not quiet and is_live and is_terminal(stream)
        self._live = LiveRegion(self._console) if is_live else None
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
        rank_summary: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add one step, and draw if the last drawing is old enough.

        Args:
            epoch: The epoch, from 0.
            loss: The mean loss of the step's samples.
            samples: The number of samples.
            metrics: The means of the metrics over the step's samples.
            ranks: The seconds of compute, communication, waiting and data of each rank.
            rank_summary: The means of these over the ranks, as "mean", if the ranks are many.
        """
        if self.quiet:
            return
        now = self._clock()
        rows = ranks if rank_summary is None else [rank_summary["mean"]]
        self.meter.step(now, epoch, loss, samples, metrics, rows)
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
        """Print the permanent line of an epoch that has ended."""
        if self.quiet:
            return
        parts = [self.meter.name(epoch), _format_quality(loss, metrics)]
        if evaluation:
            held_out = _format_quality(evaluation.get("loss"), evaluation.get("metrics"))
            parts.append(f"held out: {held_out}")
        if seconds > 0:
            parts += [f"{format_number(samples / seconds)} samples/s", format_duration(seconds)]
        while self._live and len(parts) > 2 and len("  ".join(parts)) >= self._console.width:
            parts.pop()  # a narrow terminal: the most important parts come first
        self._print("  ".join(parts))
        if self._live is not None:
            self._draw(self._clock())

    def evaluation(self, loss: float, metrics: dict[str, float]) -> None:
        """Print the line of an evaluation that follows the line of its epoch."""
        name = self.meter.name(self.meter.epoch)
        self._print("  ".join(filter(None, [name, f"held out: {_format_quality(loss, metrics)}"])))

    def resume(self, *, step: int = 0, epochs: int = 0, **_: Any) -> None:
        """Continue an interrupted run at a step.

        Args:
            step: The number of the next step, over all epochs.
            epochs: The number of completed epochs.
        """
        if not self.quiet:
            self.meter.resume(self._clock(), step, epochs)
            self._next = self._clock() + (REDRAW_INTERVAL if self._live else LINE_INTERVAL)

    def note(self, message: str) -> None:
        """Print a message above the live region, or on a line if there is none."""
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
            self._live.close()
            self._live = None

    def __enter__(self) -> Progress:
        """Return the progress display."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the progress display."""
        self.close()

    @property
    def is_live(self) -> bool:
        """Whether there is a live region."""
        return self._live is not None

    def _draw(self, now: float) -> None:
        if self._live is None:
            self._next = now + LINE_INTERVAL
            self._print("  ".join(self._line(now)))
            return
        self._live.draw(self._region(now))
        # Drawing takes at most 5% of the time.
        self._next = now + max(REDRAW_INTERVAL, 20 * (self._clock() - now))

    def _print(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._live.print(Text(line, style=style))
        else:
            try:
                print(line, file=self._console.file, flush=True)
            except OSError as error:  # a closed terminal, a full disk
                discard_if_lost(self._console.file, error)

    def _line(self, now: float) -> list[str]:
        meter = self.meter
        parts = [meter.name(meter.epoch), f"step {meter.position()}", *self._figures(now)]
        return [part for part in [*parts, self._left(now)] if part]

    def _left(self, now: float) -> str:
        left = self.meter.seconds_left(now)
        if left is None:
            return ""
        what = "left" if self.meter.epochs is not None else "left in the epoch"
        return f"{format_duration(round(left))} {what}"

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
        lines = [
            Text(self.title, style="bold"),
            self._bar(width, self._left(now)),
            Text("   ".join(self._figures(now))),
            *self._time_split(width),
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis" if self._unicode() else "crop")
        return Group(*(line for line in lines if line))

    def _bar(self, width: int, ending: str) -> Text:
        meter = self.meter
        start = f"{meter.name(meter.epoch)}  " if meter.has_epochs else "step "
        end = f"  {meter.position()}" + (f"  {ending}" if ending else "")
        room = min(width - len(start) - len(end), 40)
        done = meter.fraction()
        if room < 5 or done is None:
            return Text(start + end.strip())
        full = round(room * done)
        on, off = ("━", "─") if self._unicode() else ("=", "-")
        return Text.assemble(start, (on * full, "green"), (off * (room - full), "dim"), end)

    def _time_split(self, width: int) -> list[Text]:
        """Return a bar of a step's time by category, and its legend."""
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

    def evaluation(self, loss: float, metrics: dict[str, float]) -> None:
        """Print the line of an evaluation after an epoch, below that of the epoch."""
        if self._display is not None and self._has_line:
            self._display.evaluation(loss, metrics)

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
        if other is not None and self._count == 1 and self._may_replace(other):
            other.close()
            other = None
        if other is not None and other._count != self._seen:
            self._seen = other._count
            if not self._is_wanted:
                return
        elif other is not None:  # it has taken no step since the last attempt
            other.close()
            other = None
        if not self._is_wanted and _has_progress_bar():
            return
        if other is None:
            ScriptProgress._shown = self
        self._display = Progress(
            epochs=None, stream=self._stream, clock=self._clock, is_live=other is None
        )
        if self._epoch is not None:
            self._display.meter.begin_epoch(*self._epoch)
        wait = EPOCH_INTERVAL if self._display.is_live else LINE_INTERVAL
        self._line_after = self._clock() + wait

    def _may_replace(self, other: ScriptProgress) -> bool:
        """Return whether this trainer, at its first step, replaces the one that is shown.

        It does if the other one is idle, as in an interrupted cell of a notebook, or if only this
        one has epochs, as with a GAN.
        """
        idle = other._display.meter.seconds_idle(self._clock()) if other._display else 0.0
        return idle > IDLE_SECONDS or (self._epoch is not None and other._epoch is None)


def _has_progress_bar() -> bool:
    """Return whether the script shows a progress bar of tqdm."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(bars, "_instances", ()))


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
        self._last = now
        self._is_resumed = False  # whether the next step is the first one after a resumption
        self._is_partial = False  # whether the epoch began in an earlier process
        self._timed_steps = 0
        self._step_seconds = 0.0
        self._pause = 0.0
        self._weight = self._loss = 0.0
        self._metrics: dict[str, tuple[float, float]] = {}  # sum and weight
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
        if self._is_resumed:  # the time before it is that of the start of the process
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
            total, weight = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = SMOOTHING * total + value, SMOOTHING * weight + 1
        for row in ranks:
            self._times = [
                SMOOTHING * past + fresh for past, fresh in zip(self._times, row, strict=True)
            ]

    def resume(self, now: float, step: int, epochs: int) -> None:
        """Continue at a step, counted over all epochs, after some completed epochs."""
        self._last, self._is_resumed, self._is_partial = now, True, True
        self._marks = deque([(now, self._samples)])
        self.epoch, self.done = divmod(step, self.steps) if self.steps else (epochs, 0)

    def begin_epoch(self, epoch: int, steps: int | None, done: int) -> None:
        """Begin an epoch of a script.

        Args:
            epoch: The number of the epoch, from 0.
            steps: The number of its steps. None: unknown.
            done: The number of its steps that an earlier process took.
        """
        self.has_epochs = True
        if steps is None and self.done and epoch != self.epoch and not self._is_partial:
            steps = self.done  # assume as many as in the last epoch
        self.epoch, self.steps, self.done, self._is_partial = epoch, steps, done, done > 0

    def _begin_epoch(self, epoch: int, passed: float) -> None:
        """Begin an epoch; its first step and the pause before it took `passed` seconds."""
        if not self._is_partial:
            self.steps = self.steps or self.done or None
        self._is_partial = False
        self._pause = max(0.0, passed - self._step_seconds)
        self.epoch, self.done = epoch, 0

    def name(self, epoch: int) -> str:
        """Return the name of an epoch, such as "epoch 3/10"; empty if there are none."""
        if not self.has_epochs:
            return ""
        return f"epoch {epoch + 1}" if self.epochs is None else f"epoch {epoch + 1}/{self.epochs}"

    def loss(self) -> float:
        """Return the mean loss of about the last fifty steps."""
        return self._loss / self._weight if self._weight else float("nan")

    def metrics(self) -> dict[str, float]:
        """Return the mean metrics of about the last fifty steps."""
        return {name: total / weight for name, (total, weight) in self._metrics.items()}

    def seconds_idle(self, now: float) -> float:
        """Return the seconds since the last step."""
        return now - self._last

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
        """Return the samples per second over the last five seconds; call it once per drawing."""
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
        is_within = self.steps and self.done <= self.steps
        return f"{self.done}/{self.steps}" if is_within else f"{self.done}"

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the end of the run; None if there is no estimate."""
        if self._timed_steps < MIN_STEPS or not self.steps:
            return None
        epochs = 0 if self.epochs is None else max(0, self.epochs - self.epoch - 1)
        steps = max(0, self.steps - self.done) + epochs * self.steps
        return max(0.0, steps * self._step_seconds + epochs * self._pause - (now - self._last))


def _format_quality(loss: float | None, metrics: dict[str, float] | None) -> str:
    """Format a loss and metrics, separated by commas."""
    means = [format_metric(name, value) for name, value in (metrics or {}).items()]
    return ", ".join(means if loss is None else [f"loss {format_loss(loss)}", *means])


def apportion(shares: list[float], cells: int) -> list[int]:
    """Divide `cells` in proportion to `shares`, which add up to 1, by largest remainder."""
    exact = [share * cells for share in shares]
    whole = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda at: whole[at] - exact[at])
    for at in order[: max(0, cells - sum(whole))]:
        whole[at] += 1
    return whole
