"""Connections between a driver, its node agents and its workers.

A `Connection` has one thread that sends and one that receives:

    post ──> queue ──> sender ═══ frames, or a heartbeat each second ═══> the other end
    on_frame <──────── receiver <══════════════════════════════════════

`post` never waits, so neither Ctrl-C nor a garbage collection can leave half a frame behind.
An end that is silent for longer than the socket's timeout counts as lost, like one that
closed the connection.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from lockstep.transport.frame import ForgedFrame, Frame, FrameSocket

__all__ = ["Connection"]

HEARTBEAT = Frame({"kind": "heartbeat"})
HEARTBEAT_INTERVAL = 1.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds for frames that were posted before `close`


class Connection:
    """Sends and receives frames on its own threads, from `start` to `close`.

    Args:
        frames: The authenticated connection.
        on_frame: Called with each frame, on the receiving thread.
        on_lost: Called once with the reason if the other end is lost, on the receiving thread.
    """

    def __init__(
        self,
        frames: FrameSocket,
        on_frame: Callable[[Connection, Frame], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        self._frames = frames
        self._on_frame, self._on_lost = on_frame, on_lost
        self._posted: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"lockstep {target.__name__}", daemon=True)
            for target in (self._send, self._receive)
        ]

    @property
    def peer(self) -> str:
        """The address of the other end, as seen from here."""
        return str(self._frames.end.getpeername()[0])

    def start(self) -> Connection:
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def post(self, frame: Frame) -> None:
        """Queue a frame to be sent; safe on any thread and in a destructor."""
        self._posted.put(frame)

    def close(self) -> None:
        """Send what was posted, end both threads and close the connection."""
        self._is_closed = True
        self._posted.put(None)
        sender, receiver = self._threads
        if sender is not threading.current_thread():
            sender.join(CLOSE_TIMEOUT)
        self._shut_down()
        for thread in (sender, receiver):
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT)
        self._frames.end.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the receiver sees it too, and reports it
            while True:
                try:
                    frame = self._posted.get(timeout=HEARTBEAT_INTERVAL)
                except queue.Empty:
                    frame = HEARTBEAT
                if frame is None:
                    return
                self._frames.send(frame)
        self._shut_down()

    def _receive(self) -> None:
        reason = self._receive_all()
        self._shut_down()
        if not self._is_closed:
            self._on_lost(self, reason)

    def _receive_all(self) -> str:
        """Receive frames until the connection is lost; return the reason."""
        try:
            while True:
                frame = self._frames.receive()
                if frame.kind != "heartbeat":
                    self._on_frame(self, frame)
        except (EOFError, ConnectionError):
            return "closed the connection"
        except TimeoutError:
            return f"was silent for {self._frames.end.gettimeout():g} s"
        except ForgedFrame as error:
            return f"sent {error}, so the connection was closed"
        except OSError as error:
            return f"lost its connection ({error.strerror or error})"
        except Exception as error:  # a bug, or another version of Lockstep
            return f"sent a message that cannot be processed ({type(error).__name__}: {error})"

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._frames.end.shutdown(socket.SHUT_RDWR)
