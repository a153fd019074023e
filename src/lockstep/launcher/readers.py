"""Callbacks for descriptors that become readable."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable

__all__ = ["Readers"]


class Readers:
    """The descriptors that a process waits for, and what it calls when one is readable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._outputs: set[int] = set()

    def add(
        self, descriptor: int, callback: Callable[[], bool], *, is_output: bool = False
    ) -> None:
        """Call `callback` whenever `descriptor` is readable, until it returns False.

        Args:
            descriptor: The descriptor.
            callback: Reads from it.
            is_output: Whether it comes after the others: a report decides how to show what was
                printed after it.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, callback)
        if is_output:
            self._outputs.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor, before it is closed."""
        self._outputs.discard(descriptor)
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def process(self, timeout: float) -> None:
        """Wait until a descriptor is readable, at most `timeout` s, and call what belongs to it."""
        events = self._selector.select(timeout)
        for key, _ in sorted(events, key=lambda event: event[0].fd in self._outputs):
            # A callback for an earlier event may have closed this one's descriptor.
            if self._selector.get_map().get(key.fd) is key and not key.data():
                self.remove(key.fd)

    def close(self) -> None:
        """Forget all descriptors."""
        self._selector.close()
