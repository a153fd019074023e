"""Credentials: the key that processes share, and the identity of each."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["SESSION", "UNKNOWN_SESSION", "Credentials", "Identity", "Role"]

SESSION = 16  # bytes
UNKNOWN_SESSION = bytes(SESSION)  # of a node agent, until its driver sends the session


class Role(IntEnum):
    """The role of a process on an authenticated connection."""

    DRIVER = 0
    NODE_AGENT = 1  # `lockstep worker` on another host
    WORKER = 2
    PEER = 3  # either end of a connection for messages (message_connection.py)


@dataclass(frozen=True)
class Identity:
    """A driver, a node agent, a peer, or worker `index` of host `host`; 0 is the driver's host."""

    role: Role
    host: int = 0
    index: int = 0

    LAYOUT = struct.Struct("<BII")

    def pack(self) -> bytes:
        """Return the identity as a fixed number of bytes."""
        return self.LAYOUT.pack(self.role, self.host, self.index)

    @classmethod
    def unpack(cls, content: bytes) -> Identity:
        """Return a packed identity; raise ValueError for an unknown role."""
        role, host, index = cls.LAYOUT.unpack(content)
        return cls(Role(role), host, index)

    def __str__(self) -> str:
        """Return "the driver", "a node agent", "the process" or "worker 1 of host 2"."""
        if self.role is Role.WORKER:
            return f"worker {self.index} of host {self.host}"
        names = {Role.DRIVER: "the driver", Role.NODE_AGENT: "a node agent"}
        return names.get(self.role, "the process")


@dataclass(frozen=True)
class Credentials:
    """The credentials with which a process opens and answers connections.

    Attributes:
        key: The key that the processes share.
        own: The identity of this process.
        session: Bytes that both ends must agree on. Each driver draws them at random, to keep
            out workers of an earlier driver with the same key; peers derive them from the
            purpose of the connection.
        source: Where users set the key, for messages.
    """

    key: bytes = field(repr=False)
    own: Identity
    session: bytes = UNKNOWN_SESSION
    source: str = "a key file"
