"""Connections between a driver, its node agents and its workers.

A `Connection` has one thread that sends and one that receives:

    post ──> queue ──> sender ═══ messages, or a heartbeat each second ═══> the other end
    on_message <────── receiver <════════════════════════════════════════

`post` never waits, so neither Ctrl-C nor a garbage collection can leave half a message behind.
An end that is silent for too long counts as lost, like one that closed the connection.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from lockstep.comm.transport.message_connection import MessageConnection, connect_to
from lockstep.comm.transport.secret import KEY_SOURCE

__all__ = ["MAX_PAYLOAD", "PURPOSE", "Connection", "RemoteMessage", "connect_to_driver"]

PURPOSE = "driver"
MAX_PAYLOAD = 1 << 40  # bytes
HEARTBEAT = {"kind": "heartbeat"}
HEARTBEAT_INTERVAL = 1.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds for messages that were posted before `close`

RemoteMessage = dict[str, Any]


def connect_to_driver(address: str, port: int, key: bytes, timeout: float) -> MessageConnection:
    """Connect to the driver at `address`:`port`; arguments and errors as for `connect_to`."""
    return connect_to(
        address,
        port,
        key,
        PURPOSE,
        timeout,
        called="the driver",
        source=KEY_SOURCE,
        max_payload=MAX_PAYLOAD,
    )


class Connection:
    """Sends and receives messages on its own threads, from `start` to `close`.

    Args:
        connection: The authenticated connection.
        silence: Seconds after which an end that sends nothing is lost.
        on_message: Called with each message, on the receiving thread.
        on_lost: Called once with the reason if the other end is lost, on the receiving thread.
    """

    def __init__(
        self,
        connection: MessageConnection,
        silence: float,
        on_message: Callable[[Connection, RemoteMessage], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        self._connection = connection
        self._silence = silence
        self._on_message = on_message
        self._on_lost = on_lost
        self._posted: queue.SimpleQueue[RemoteMessage | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"lockstep {target.__name__}", daemon=True)
            for target in (self._send, self._receive)
        ]

    @property
    def peer(self) -> str:
        """The address of the other end, as seen from here."""
        return self._connection.peer

    def start(self) -> Connection:
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def post(self, message: RemoteMessage) -> None:
        """Queue a message to be sent; safe on any thread and in a destructor."""
        self._posted.put(message)

    def close(self) -> None:
        """Send what was posted, end both threads and close the connection."""
        self._is_closed = True
        self._posted.put(None)
        sender, receiver = self._threads
        if sender is not threading.current_thread():
            sender.join(CLOSE_TIMEOUT)
        self._connection.shut_down()
        for thread in (sender, receiver):
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT)
        self._connection.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the receiver sees it too, and reports it
            while True:
                try:
                    message = self._posted.get(timeout=HEARTBEAT_INTERVAL)
                except queue.Empty:
                    message = HEARTBEAT
                if message is None:
                    return
                self._connection.send(message, self._silence)
        self._connection.shut_down()

    def _receive(self) -> None:
        reason = self._receive_all()
        self._connection.shut_down()
        if not self._is_closed:
            self._on_lost(self, reason)

    def _receive_all(self) -> str:
        """Receive messages until the connection is lost; return the reason."""
        try:
            while True:
                message = self._connection.receive(self._silence)
                if message["kind"] != "heartbeat":
                    self._on_message(self, message)
        except (EOFError, ConnectionError):
            return "closed the connection"
        except TimeoutError:
            return f"was silent for {self._silence:g} s"
        except Exception as error:  # also a forged message, or one of another version of Lockstep
            return f"lost its connection ({type(error).__name__}: {error})"
