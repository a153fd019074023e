"""The streams of the simulated accelerator: queues of work that run only if something waits.

A stream's work runs in order, as late as possible: when the host synchronizes with it, when the
same stream computes something that needs it, or when another stream waits for an event after it.
Results that are read without one of these are not there yet, as on a device that is slow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = [
    "Stream",
    "block",
    "is_event_done",
    "is_stream_done",
    "record",
    "stream",
    "synchronize_device",
    "synchronize_event",
]

Work = Callable[[], object]

_lock = threading.RLock()
_streams: dict[tuple[int, int], Stream] = {}
_events: dict[int, tuple[Stream, int]] = {}
"""The stream in which each event was recorded last, and the number of works before it."""


class Stream:
    """The work of one stream of one device."""

    def __init__(self) -> None:
        self._pending: deque[Work] = deque()
        self.launched = 0
        self._finished = 0

    def launch(self, work: Work) -> None:
        """Add work that runs after all that was launched before."""
        with _lock:
            self._pending.append(work)
            self.launched += 1

    def run(self, until: int | None = None) -> None:
        """Run the pending work, or the first `until` works of the stream's life."""
        with _lock:
            while self._pending and (until is None or self._finished < until):
                self._finished += 1
                self._pending.popleft()()

    def is_done(self, until: int | None = None) -> bool:
        """Return whether the work, or the first `until` works, have run."""
        return not self._pending if until is None else self._finished >= until


def stream(device: int, number: int) -> Stream:
    """Return a stream of a device; 0 is the default stream."""
    with _lock:
        return _streams.setdefault((device, number), Stream())


def record(event: int, device: int, number: int) -> None:
    """Let an event stand for the work that a stream has so far."""
    found = stream(device, number)
    with _lock:
        _events[event] = found, found.launched


def block(event: int, device: int, number: int) -> None:
    """Let later work of a stream run after an event."""
    source, until = _events[event]
    stream(device, number).launch(lambda: source.run(until))


def synchronize_event(event: int) -> None:
    """Wait for the work before an event."""
    source, until = _events[event]
    source.run(until)


def is_event_done(event: int) -> int:
    """Return whether the work before an event has run."""
    source, until = _events[event]
    return int(source.is_done(until))


def is_stream_done(device: int, number: int) -> int:
    """Return whether a stream has no work left."""
    return int(stream(device, number).is_done())


def synchronize_device(device: int) -> None:
    """Wait for the work of all streams of a device."""
    for (each, _), found in list(_streams.items()):
        if each == device:
            found.run()
