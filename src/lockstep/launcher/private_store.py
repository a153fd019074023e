"""Private stores: the ranks of one host meet out of the reach of other users.

A TCPStore listens on a port: every user of the machine can read and change its keys, including
the addresses at which the ranks connect to each other. A FileStore on an anonymous file replaces it
on one host. Other processes open the file as /proc/PID/fd/FD of its creator, which the kernel
permits to the same user only (Linux). FileStore polls every 10 ms and counts its timeouts in whole
seconds.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["attach_store", "create_store"]

STORE_NAME = "lockstep-store"


def create_store() -> tuple[int, str] | None:
    """Create an empty private store; it exists as long as any process holds its descriptor.

    Returns:
        The descriptor, and the address with which processes of this user attach to the
        store; None if the system has no anonymous files.
    """
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return None
    descriptor = os.memfd_create(STORE_NAME)
    os.fchmod(descriptor, 0o600)
    return descriptor, f"{os.getpid()} {descriptor} {os.fstat(descriptor).st_ino}"


def attach_store(address: str) -> Store | None:
    """Return the private store at `address`; None if there is none that this user may open.

    From then on this process keeps the store alive, even after its creator has exited.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        FileStore,  # imported here: the launcher creates stores without importing torch
    )

    numbers = address.split()
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    pid, number, inode = map(int, numbers)
    path = f"/proc/{pid}/fd/{number}"
    try:
        # Check the name first: the descriptor may belong to another file by now, and opening
        # that may have side effects.
        if not os.readlink(path).startswith(f"/memfd:{STORE_NAME} "):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_ino != inode:
        os.close(descriptor)
        return None
    return FileStore(f"/proc/self/fd/{descriptor}", -1)
