"""The task queue: what a worker's main thread has to do, and in which order.

    the driver's calls     one after another, in the order in which they were made,
                           so that calls on all ranks meet in their collectives
    other workers' calls   before those; also while this worker itself waits for an
                           answer, so that two workers may call each other

Everything of the user's runs on the main thread: one call at a time, as in a
script; torch's generators and settings belong to whoever runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["TaskQueue"]

Job = Callable[[], None]


class TaskQueue:
    """Filled by the receiving threads, emptied by the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._driver: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._ended = False

    def put(self, job: Job, *, of_driver: bool) -> None:
        """Add something to do."""
        with self._changed:
            (self._driver if of_driver else self._others).append(job)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Let `work` return when it has done what it is at."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def work(self) -> None:
        """Do what comes until the end."""
        while job := self._take(lambda: self._ended, None, self._others, self._driver):
            job()

    def wait(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait for `done`, and do meanwhile what other workers ask for."""
        main = threading.current_thread() is threading.main_thread()
        queues = (self._others,) if main else ()
        while job := self._take(lambda: done() or self._ended, deadline, *queues):
            job()

    def _take(
        self, over: Callable[[], bool], deadline: float | None, *queues: deque[Job]
    ) -> Job | None:
        """Return the next job of the first queue that has one; None when it is over or late."""
        with self._changed:
            while not over():
                for waiting in queues:
                    if waiting:
                        return waiting.popleft()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
        return None
