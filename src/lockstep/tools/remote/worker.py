"""A worker: a rank that runs the calls of the driver.

    driver                              worker
      <── hello {host, index, workers} ───│
      ── refused {reason} ───────────────>│  exits, if the driver does not wait for it
      ── join {variables, world} ────────>│  lockstep.init()
      <── joined {report, if it failed} ──│
      ── call {number, function, args} ──>│  function(*args) on its main thread
      <── value | error {number, report} ─│  after an error of a call on all workers, it waits
      ── continue {number} ──────────────>│  until they all have returned from the call
      ── end ────────────────────────────>│  exits

User code runs only on the main thread, one call at a time and in the order of the calls, as in a
script: torch's generators and settings belong to the call that runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from lockstep.kernel.errors import LockstepError, RendezvousError, UsageError
from lockstep.launcher.rank_process import describe_error
from lockstep.launcher.world import init, rank
from lockstep.tools.remote.connection import Connection, RemoteMessage, connect_to_driver
from lockstep.tools.remote.serialization import serialize

__all__ = ["run_worker"]

REMOTE = os.path.dirname(os.path.abspath(__file__))

Task = Callable[[], None]


def run_worker(address: str, port: int, key: bytes, silence: float, hello: RemoteMessage) -> None:
    """Serve the driver at `address`:`port` until it ends this worker, or is lost.

    Args:
        address: Name or address of the driver's host.
        port: The port at which the driver listens.
        key: The driver's key.
        silence: Seconds of silence after which the driver counts as lost.
        hello: The message that names this worker.

    Raises:
        RendezvousError: The driver does not answer, or was lost.
        UsageError: The driver has another key, or does not wait for this worker.
    """
    WorkerServer(address, port, key, silence).serve(hello)


class WorkerServer:
    """The connection to the driver, and the tasks of the main thread."""

    def __init__(self, address: str, port: int, key: bytes, silence: float) -> None:
        self._name = f"the driver at {address}:{port}"
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._continued: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # numbers of calls
        self._is_ended = False
        self._error: LockstepError | None = None
        opened = connect_to_driver(address, port, key, silence)
        self._driver = Connection(opened, silence, self._on_message, self._on_lost)

    def serve(self, hello: RemoteMessage) -> None:
        """Run tasks until the driver ends this worker, or is lost; send the last answers."""
        try:
            self._driver.start().post(hello)
            while not self._is_ended:
                self._tasks.get()()
        finally:
            self._driver.close()
        if self._error is not None:
            raise self._error

    def _end(self, error: LockstepError | None = None) -> None:
        self._error = error
        self._is_ended = True
        self._tasks.put(lambda: None)
        self._continued.put(None)

    def _on_lost(self, connection: Connection, reason: str) -> None:
        self._end(RendezvousError(f"{self._name} {reason}, so its workers were ended"))

    def _on_message(self, connection: Connection, message: RemoteMessage) -> None:
        match message["kind"]:
            case "continue":
                self._continued.put(message["number"])
            case "join":
                self._tasks.put(partial(self._join, message))
            case "call":
                self._tasks.put(partial(self._answer, message))
            case "refused":
                self._end(UsageError(f"{self._name} refused: {message['reason']}"))
            case "end":
                self._end()

    # --- on the main thread ---------------------------------------------------------------

    def _join(self, message: RemoteMessage) -> None:
        os.environ.update(message["variables"])
        answer: RemoteMessage = {"kind": "joined"}
        try:
            init(**message["world"])
        except Exception as error:  # the driver waits for an answer, so report any error
            answer["report"] = describe_error(error)
        self._driver.post(answer)

    def _answer(self, message: RemoteMessage) -> None:
        try:
            function, args, options = pickle.loads(message["payload"])
            value = function(*args, **options)
            answer: RemoteMessage = {"kind": "value", "payload": _serialize_value(value)}
        except BaseException as error:  # the driver waits for an answer, so report any error
            error.__traceback__ = _drop_remote_frames(error.__traceback__)
            report = describe_error(error)
            answer = {"kind": "error", "report": report, "payload": _serialize_error(error)}
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._driver.post({**answer, "number": message["number"]})
        if answer["kind"] == "error" and message["is_shared"]:
            # Ends at the latest when the driver is silent.
            while self._continued.get() not in (message["number"], None):
                pass


def _serialize_value(value: Any) -> memoryview:
    """Return the value of a call.

    Raises:
        UsageError: It cannot be pickled.
    """
    try:
        return serialize(value)
    except (pickle.PickleError, TypeError, AttributeError) as error:
        raise UsageError(
            f"rank {rank()}: a value of type {type(value).__name__} was returned, which cannot be "
            f"sent to the driver: {error}"
        ) from error


def _serialize_error(error: BaseException) -> bytes | memoryview:
    """Return the exception itself; nothing if it cannot be pickled."""
    try:
        return serialize(error.with_traceback(None))
    except Exception:  # pickling may raise any exception; then only the report is sent
        return b""


def _drop_remote_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this package, which do not help the user."""
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(REMOTE):
        kept = kept.tb_next
    return kept or frames
