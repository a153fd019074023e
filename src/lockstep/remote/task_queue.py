"""The task queue: the tasks of a worker's main thread, and their order.

    calls of the driver          one after another, in the order in which they were made, so
                                 that calls on all ranks meet in their collectives
    calls of other workers       before calls of the driver; also while this worker waits for an
                                 answer, so that two workers may call each other

User code runs only on the main thread, one call at a time, as in a script: torch's
generators and settings belong to the call that runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["TaskQueue"]

Task = Callable[[], None]


class TaskQueue:
    """Filled by the receiving threads, processed by the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._driver: deque[Task] = deque()
        self._others: deque[Task] = deque()
        self._is_stopped = False

    def put(self, task: Task, *, from_driver: bool) -> None:
        """Add a task."""
        with self._changed:
            (self._driver if from_driver else self._others).append(task)
            self._changed.notify_all()

    def wake(self) -> None:
        """Make `wait` check its condition again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Make `run` and `wait` return after the current task."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Run tasks until `stop` is called."""
        while task := self._take(lambda: self._is_stopped, None, self._others, self._driver):
            task()

    def wait(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait until `done` returns True; run calls of other workers in the meantime.

        Args:
            done: Checked after each task and each `wake`.
            deadline: A `time.monotonic()` time; None waits without limit.
        """
        main = threading.current_thread() is threading.main_thread()
        queues = (self._others,) if main else ()
        while task := self._take(lambda: done() or self._is_stopped, deadline, *queues):
            task()

    def _take(
        self, over: Callable[[], bool], deadline: float | None, *queues: deque[Task]
    ) -> Task | None:
        """Return the next task of the first queue that has one; None if done or past deadline."""
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
