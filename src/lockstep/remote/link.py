"""A link: one proven connection with a thread that sends and one that receives.

    post ──> queue ──> sender ═══ frames, or a heartbeat each second ═══> the other end
    take <──────────── receiver <══════════════════════════════════

`post` never waits, so neither Ctrl-C nor a garbage collection can leave half a
frame behind. An end that is silent longer than the socket's deadline is lost,
like one that hung up.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from lockstep.remote.frame import Forged, Frame, Wire

__all__ = ["Link"]

HEARTBEAT = Frame({"kind": "heartbeat"})
EVERY = 1.0  # seconds between two signs of life
FAREWELL = 5.0  # seconds that what was posted has to leave


class Link:
    """Sends and receives over `wire` from `begin` to `close`.

    `take` is called with each frame, `lost` once with the reason where the other
    end is lost; both on the receiving thread.
    """

    def __init__(
        self,
        wire: Wire,
        take: Callable[[Link, Frame], None],
        lost: Callable[[Link, str], None],
    ) -> None:
        self._wire = wire
        self._take, self._lost = take, lost
        self._posted: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"lockstep {target.__name__}", daemon=True)
            for target in (self._send, self._receive)
        ]

    @property
    def peer(self) -> str:
        """The address of the other end, as seen from here."""
        return str(self._wire.end.getpeername()[0])

    def begin(self) -> Link:
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def post(self, frame: Frame) -> None:
        """Hand over a frame to be sent; safe anywhere, also in a destructor."""
        self._posted.put(frame)

    def close(self) -> None:
        """Send what was posted, end both threads and the connection."""
        self._closed = True
        self._posted.put(None)
        sender, receiver = self._threads
        if sender is not threading.current_thread():
            sender.join(FAREWELL)
        self._hang_up()
        for thread in (sender, receiver):
            if thread is not threading.current_thread():
                thread.join(FAREWELL)
        self._wire.end.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the receiver notices it too, and says so
            while True:
                try:
                    frame = self._posted.get(timeout=EVERY)
                except queue.Empty:
                    frame = HEARTBEAT
                if frame is None:
                    return
                self._wire.send(frame)
        self._hang_up()

    def _receive(self) -> None:
        reason = self._take_all()
        self._hang_up()
        if not self._closed:
            self._lost(self, reason)

    def _take_all(self) -> str:
        try:
            while True:
                frame = self._wire.receive()
                if frame.kind != "heartbeat":
                    self._take(self, frame)
        except (EOFError, ConnectionError):
            return "hung up"
        except TimeoutError:
            return f"was silent for {self._wire.end.gettimeout():g} s"
        except Forged as error:
            return f"sent {error}, so the connection was closed"
        except OSError as error:
            return f"lost its connection ({error.strerror or error})"
        except Exception as error:  # a version of lockstep that speaks otherwise
            return f"sent what cannot be understood ({type(error).__name__}: {error})"

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.end.shutdown(socket.SHUT_RDWR)
