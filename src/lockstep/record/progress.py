"""The progress of a run, shown on rank 0 while it works.

    on a terminal    one live region, redrawn by the caller at most five times a second
    elsewhere        a line an epoch, and one every ten seconds within a long epoch
    quiet            nothing

Everything goes to stderr, so that stdout keeps to results. No thread draws, and
the cursor is never hidden: whatever ends the process, the terminal is as it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lockstep.formatting import format_duration, format_metric, format_number
from lockstep.record.meter import Meter

__all__ = ["Progress"]

REDRAW = 0.2  # seconds between two drawings of the live region
SPEAK = 10.0  # seconds between two plain lines within an epoch
FILLS = {"compute": "█", "communication": "▓", "waiting": "▒", "data": "░"}
PLAIN_FILLS = {"compute": "#", "communication": "=", "waiting": "-", "data": "."}
STYLES = {"compute": "cyan", "communication": "blue", "waiting": "yellow", "data": "magenta"}


class Progress:
    """Shows a run's progress from plain values; takes the same lines as the record.

    Args:
        epochs: how many epochs the run has.
        steps: how many steps an epoch has; None if that is not known.
        title: what is trained, and where ("digits, 2 replicas x 8 micro-batches, gloo").
        quiet: show nothing at all.
        stream: where to write, stderr by default.
        clock: seconds, monotonic.

    A call of `step` that does not draw takes about a microsecond and a half.
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
        self.meter = Meter(epochs, steps, clock())
        self._clock = clock
        stream = stream or sys.stderr
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._live = None if quiet or not is_terminal(stream) else self._start()
        self._next = clock() + (REDRAW if self._live else SPEAK)
        if not quiet and title and self._live is None:
            self._say(title)

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
        """Take one step; draws only when the last drawing is old enough.

        `loss` and `metrics` are means over the step's `samples`; `ranks` has a row
        of seconds (compute, communication, waiting, data) for each rank.
        """
        if self.quiet:
            return
        now = self._clock()
        self.meter.step(now, epoch, loss, samples, metrics, ranks)
        if now >= self._next:
            self._show(now)

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
        """Write the line of an epoch that has ended; it stays on the screen."""
        if self.quiet:
            return
        parts = [f"epoch {epoch + 1}/{self.meter.epochs}", figures(loss, metrics)]
        if evaluation:
            held_out = figures(evaluation.get("loss"), evaluation.get("metrics"))
            parts.append(f"held out: {held_out}")
        if seconds > 0:
            parts += [f"{format_number(samples / seconds)} samples/s", format_duration(seconds)]
        while self._live and len(parts) > 2 and len("  ".join(parts)) >= self._console.width:
            parts.pop()  # a narrow terminal: what matters most comes first, the record has all
        self._say("  ".join(parts))
        if self._live is not None:
            self._show(self._clock())

    def note(self, message: str) -> None:
        """Write one sentence above the live region, or on a line of its own."""
        if not self.quiet:
            self._say(message, style="yellow")

    def write(self, kind: str, /, **fields: Any) -> None:
        """Take a line as the record does; kinds that show nothing are passed over."""
        if kind == "step":
            self.step(**fields)
        elif kind == "epoch":
            self.epoch(**fields)
        elif kind == "warning":
            self.note(str(fields.get("message", "")))

    def close(self) -> None:
        """Take the live region off the screen; calling it again does nothing."""
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def _start(self) -> Live:
        live = Live(
            Text(""),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=is_terminal(sys.stdout),  # what the user prints goes above the region
            vertical_overflow="crop",
        )
        live.start()
        self._console.show_cursor(True)
        return live

    def _show(self, now: float) -> None:
        if self._live is None:
            self._next = now + SPEAK
            self._say("  ".join(self._words(now)))
            return
        self._live.update(self._region(now), refresh=True)
        self._next = now + max(REDRAW, 20 * (self._clock() - now))  # drawing takes 5% at most

    def _say(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._console.print(Text(line, style=style))
        else:
            print(line, file=self._console.file, flush=True)

    def _words(self, now: float) -> list[str]:
        meter = self.meter
        parts = [f"epoch {meter.current + 1}/{meter.epochs}", f"step {meter.place()}"]
        parts += self._figures(now)
        left = meter.left(now)
        return parts if left is None else [*parts, f"{format_duration(round(left))} left"]

    def _figures(self, now: float) -> list[str]:
        means = [format_metric(name, value) for name, value in self.meter.metrics().items()]
        return [
            f"loss {self.meter.loss():.4f}",
            *means,
            f"{format_number(self.meter.speed(now))} samples/s",
        ]

    def _region(self, now: float) -> Group:
        """Draw the live region; every line fits the terminal, whatever its width."""
        width = max(self._console.width - 1, 10)
        left = self.meter.left(now)
        ending = "" if left is None else f"{format_duration(round(left))} left"
        lines = [
            Text(self.title, style="bold"),
            self._bar(width, ending),
            Text("   ".join(self._figures(now))),
            *self._split(width),
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis" if self._unicode() else "crop")
        return Group(*(line for line in lines if line), Text(""))

    def _bar(self, width: int, ending: str) -> Text:
        meter = self.meter
        start = f"epoch {meter.current + 1}/{meter.epochs}  "
        end = f"  {meter.place()}" + (f"  {ending}" if ending else "")
        room = min(width - len(start) - len(end), 40)
        done = meter.fraction()
        if room < 5 or done is None:
            return Text(start + end.strip())
        full = round(room * done)
        on, off = ("━", "─") if self._unicode() else ("=", "-")
        return Text.assemble(start, (on * full, "green"), (off * (room - full), "dim"), end)

    def _split(self, width: int) -> list[Text]:
        """Draw how a step's time splits, as one bar and its legend."""
        shares = self.meter.shares()
        if not shares:
            return []
        fills = FILLS if self._unicode() else PLAIN_FILLS
        step = self.meter.step_seconds()
        start = f"step {format_duration(step)}  " if step else "step  "
        bar, legend = Text(start), Text(" " * len(start))
        for (name, share), cells in zip(
            shares.items(),
            portions(list(shares.values()), min(40, width - len(start))),
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


def figures(loss: float | None, metrics: dict[str, float] | None) -> str:
    """Return a loss and its metrics in one phrase."""
    means = [format_metric(name, value) for name, value in (metrics or {}).items()]
    return ", ".join(means if loss is None else [f"loss {loss:.4f}", *means])


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a live region can be drawn on `stream`."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed stream
        return False


def portions(shares: list[float], cells: int) -> list[int]:
    """Divide `cells` by `shares` (which add up to 1), by largest remainder."""
    exact = [share * cells for share in shares]
    whole = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda at: whole[at] - exact[at])
    for at in order[: max(0, cells - sum(whole))]:
        whole[at] += 1
    return whole
