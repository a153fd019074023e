"""The thread in which a group across hosts adds buckets, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from lockstep.comm.native_module import callers

__all__ = ["SumThread"]


class SumThread:
    """A thread that starts with the first sum.

    Args:
        explain: Returns the exception to raise for one that a sum has raised.
    """

    def __init__(self, explain: Callable[[BaseException], BaseException]) -> None:
        self._explain = explain
        self._sums: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
        self._sums = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Run a function after the earlier ones."""
        future: Future[None] = Future()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(threading.get_ident(),), name="lockstep-sums", daemon=True
            )
            self._thread.start()
        self._sums.put((future, function))
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the last sum; return whether it has ended within some seconds."""
        self._sums.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, caller: int) -> None:
        own = threading.get_ident()
        callers[own] = caller
        while (work := self._sums.get()) is not None:
            future, function = work
            try:
                function()
            except BaseException as error:
                future.set_exception(self._explain(error))
            else:
                future.set_result(None)
            del work, future, function  # they hold the buffers of the sum
        callers.pop(own, None)
