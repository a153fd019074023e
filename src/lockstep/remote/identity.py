"""Identities: which process is at each end of a connection."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["SESSION", "UNKNOWN", "Credentials", "Identity", "Role"]

SESSION = 16  # bytes
UNKNOWN = bytes(SESSION)  # the session of a host that has not heard from its driver yet


class Role(IntEnum):
    """What a process is to its driver."""

    DRIVER = 0
    HOST = 1  # `lockstep worker` on another host
    WORKER = 2


@dataclass(frozen=True)
class Identity:
    """A driver, a host, or worker `index` of host number `host`; 0 is the driver's own host."""

    role: Role
    host: int = 0
    index: int = 0

    LAYOUT = struct.Struct("<BII")

    def pack(self) -> bytes:
        """Return the identity as a fixed number of bytes."""
        return self.LAYOUT.pack(self.role, self.host, self.index)

    @classmethod
    def unpack(cls, content: bytes) -> Identity:
        """Return a packed identity; ValueError for an unknown role."""
        role, host, index = cls.LAYOUT.unpack(content)
        return cls(Role(role), host, index)

    def __str__(self) -> str:
        """Return "the driver", "a host" or "worker 1 of host 2"."""
        if self.role is Role.WORKER:
            return f"worker {self.index} of host {self.host}"
        return "the driver" if self.role is Role.DRIVER else "a host"


@dataclass(frozen=True)
class Credentials:
    """What a process opens and answers connections with.

    Args:
        key: The key that the driver and its workers share.
        own: The identity of this process.
        session: Random bytes that belong to one driver from its start to its end, so that
            the workers of an earlier driver with the same key are not taken for its own.
    """

    key: bytes = field(repr=False)
    own: Identity
    session: bytes = UNKNOWN
