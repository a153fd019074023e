"""The connections of a process group, which can be shut down while a thread waits for them.

Gloo has no way to abort a collective: a rank waits for a peer until its timeout, also if the peer's
host has lost its power. If its sockets are shut down, every call that waits for one raises at once,
as if the peer had closed the connection; so does every rank at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from types import TracebackType

__all__ = ["GroupConnections"]


class GroupConnections:
    """The connections that are opened in the body of a `with` statement by this process.

    Connections that other threads open meanwhile are not told from them.
    """

    def __init__(self) -> None:
        self._found: dict[int, int] = {}

    def __enter__(self) -> GroupConnections:
        """Note which sockets there are."""
        self._found = _list_sockets()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note which sockets are new."""
        before = self._found
        now = _list_sockets()
        self._found = {
            descriptor: inode
            for descriptor, inode in now.items()
            if before.get(descriptor) != inode
        }

    def shut_down(self) -> None:
        """Shut down the connections that are still open; safe on any thread."""
        for descriptor, inode in self._found.items():
            # A duplicate: the group may close its own at any moment, and the number be reused.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                if os.fstat(end.fileno()).st_ino == inode and _is_connection(end):
                    end.shutdown(socket.SHUT_RDWR)
        self._found = {}


def _is_connection(end: socket.socket) -> bool:
    """Return whether it is connected over a network: Gloo ends the process if it cannot listen."""
    if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
        return False
    try:
        end.getpeername()
    except OSError:
        return False
    return True


def _list_sockets() -> dict[int, int]:
    """Return the open sockets of this process, with their inodes; none on other systems."""
    inodes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    inodes[int(name)] = status.st_ino
    return inodes
