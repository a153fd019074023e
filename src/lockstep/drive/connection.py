"""Connections: a listener that lets in who holds the key, and a call to one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from lockstep.drive import handshake
from lockstep.drive.frame import Wire
from lockstep.drive.handshake import Refused
from lockstep.errors import RendezvousError, UsageError
from lockstep.run.meeting import bind, resolve

__all__ = ["Listener", "dial"]

STRANGERS = 32  # connections at a time that have not proven themselves yet
RETRY = 0.2


class Listener:
    """Listens at `address`:`port` and gives each proven connection to `accept`.

    `refused` is told of each other one. Both are called on a thread of the
    connection's own, so that one that says nothing keeps nobody waiting.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        silence: float,
        accept: Callable[[Wire], None],
        refused: Callable[[str, str], None] = lambda caller, reason: None,
    ) -> None:
        try:
            self._socket = bind(address, port)
        except UsageError as error:
            raise UsageError(
                f"a driver cannot listen at {address}:{port} here: the name is no host's, or the "
                "port is taken or forbidden; choose another, or port 0 for a free one"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        self._key, self._silence = key, silence
        self._accept, self._refused = accept, refused
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="lockstep listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()
        with self._lock:
            strangers = list(self._strangers.items())
        for end, thread in strangers:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _listen(self) -> None:
        while self._open:
            try:
                end, caller = self._socket.accept()
            except OSError:  # closed, or a caller that was gone again, or no descriptor left
                if self._open:
                    time.sleep(RETRY)
                continue
            with self._lock:
                full = len(self._strangers) >= STRANGERS
            if full:
                end.close()
                continue
            thread = threading.Thread(
                target=self._prove, args=(end, str(caller[0])), name="lockstep door", daemon=True
            )
            with self._lock:
                self._strangers[end] = thread
            thread.start()

    def _prove(self, end: socket.socket, caller: str) -> None:
        try:
            wire = handshake.answer(end, self._key, self._silence)
        except Refused as error:
            end.close()
            self._refused(caller, str(error))
        else:
            self._accept(wire)
        finally:
            with self._lock:
                del self._strangers[end]


def dial(address: str, port: int, key: bytes, silence: float, patience: float = 10.0) -> Wire:
    """Connect to a driver or worker, trying again for `patience` seconds.

    Raises RendezvousError where nobody answers, UsageError where it holds another key.
    """
    deadline = time.monotonic() + patience
    try:
        resolve(address)
    except UsageError as error:
        raise UsageError(f"{address!r} names no host that can be found from here") from error
    while True:
        try:
            end = socket.create_connection((address, port), timeout=handshake.PATIENCE)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                said = (error.strerror or str(error)).lower()
                raise RendezvousError(
                    f"no driver answered at {address}:{port} within {patience:g} s: {said}"
                ) from error
            time.sleep(RETRY)
    try:
        return handshake.call(end, key, silence)
    except Refused as error:
        end.close()
        raise UsageError(
            f"the driver at {address}:{port} refused this worker: {error}; give both the same key"
        ) from error
