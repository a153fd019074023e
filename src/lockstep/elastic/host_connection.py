"""The connection between the launchers of two hosts of an elastic run: messages and heartbeats.

A host that fails may not close its connections: no packet says that its power is gone or its
cable is cut. If nothing arrives from an end for the agreed number of seconds, it counts as lost.

    launcher of host 0                                    agent of another host
      <─ join         asks to take part
      ── welcome      the seconds of silence after which a host is lost, and the run's folder
      ── refuse       it cannot take part, or not yet
      ── start        start a process
      ── send         pass the message to a member
      ── signal       send a signal to a member
      ── release      nothing more is needed from a member that has exited
      ── end          the run has ended
      <─ started      a member has a process
      <─ begun        these members have published an operation
      <─ report       a member has sent this message, `age` seconds ago
      <─ exit         a member has exited
      <─ leave        the host was asked to stop
      <> heartbeat    nothing else was sent for a while

The other end has the secret of the run, or the run has none, and has the same version. A message
that cannot be read ends the connection, and not the launcher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.comm.transport.message_codec import ForgedMessage
from lockstep.comm.transport.message_connection import MessageConnection
from lockstep.kernel.errors import LockstepError

__all__ = ["PURPOSE", "ConnectionLost", "HostConnection", "reading"]

PURPOSE = "elastic run"
HEARTBEATS = 5  # within the seconds of silence after which a host is lost


class ConnectionLost(Exception):
    """The other end is gone; the message is the predicate of a sentence about it."""


@contextmanager
def reading() -> Iterator[None]:
    """Raise ConnectionLost if a field of a message, read in the body, is missing or wrong."""
    try:
        yield
    except LockstepError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConnectionLost(f"sent a message that cannot be processed ({what})") from error


class HostConnection:
    """One end of the connection: messages, and heartbeats between them.

    Every method raises ConnectionLost if the other end is gone.

    Args:
        connection: The authenticated connection.
        silence: Seconds after which an end that sends nothing is lost.
    """

    def __init__(self, connection: MessageConnection, silence: float) -> None:
        self.silence = silence
        self.peer = connection.peer
        self._connection = connection
        self._heard = time.monotonic()
        self._sent = self._heard

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; it is small, so this waits only where the other end reads nothing."""
        try:
            self._connection.send(message, timeout=self.silence)
        except TimeoutError:
            raise ConnectionLost(f"took no message for {self.silence:g} s") from None
        except OSError as error:
            raise ConnectionLost(_describe(error)) from None
        self._sent = time.monotonic()

    def receive(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Wait for a message, and return all that have arrived, without heartbeats."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                message = self._connection.receive(timeout)
            except TimeoutError:
                return messages
            except (EOFError, ForgedMessage, OSError) as error:
                if messages:
                    return messages  # the next call raises
                raise ConnectionLost(_describe(error)) from None
            self._heard = time.monotonic()
            timeout = 0.0
            if message.get("kind") != "heartbeat":
                messages.append(message)

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due, and look at how long the other end has been silent.

        Call it several times a second, after `receive`.
        """
        now = time.monotonic()
        if now - self._heard >= self.silence:
            raise ConnectionLost(f"was silent for {self.silence:g} s")
        if now - self._sent >= self.silence / HEARTBEATS:
            self.send({"kind": "heartbeat"})

    def close(self) -> None:
        """Close the connection; the other end notices at once if it can be reached."""
        self._connection.close()


def _describe(error: Exception) -> str:
    if isinstance(error, EOFError | ConnectionError):
        return "closed the connection"
    if isinstance(error, OSError):
        return f"cannot be reached ({(error.strerror or str(error)).lower()})"
    return f"sent {error}"
