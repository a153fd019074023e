"""A store in memory that no other user can reach, for ranks of one host.

A TCPStore listens on a port: every user of the machine can read and change what is in
it, also the addresses at which the ranks connect to each other. This store is an
anonymous file instead. Other processes open it as /proc/PID/fd/FD of the one that
created it, which the kernel allows to the same user only (Linux).
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["attach", "create"]

NAME = "lockstep-store"


def create() -> tuple[int, str] | None:
    """Create an empty store; it exists as long as some process holds its descriptor.

    Returns:
        The descriptor, and the address by which processes of this user attach to the
        store; None where the system has no anonymous files.
    """
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return None
    descriptor = os.memfd_create(NAME)
    os.fchmod(descriptor, 0o600)
    return descriptor, f"{os.getpid()} {descriptor} {os.fstat(descriptor).st_ino}"


def attach(address: str) -> Store | None:
    """Return the store at `address`; None where there is none, or only another user's.

    This process holds the store from then on, also when its creator ends.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        FileStore,  # here, because the launcher, which creates stores, does without torch
    )

    numbers = address.split()
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    pid, number, inode = map(int, numbers)
    path = f"/proc/{pid}/fd/{number}"
    try:
        # Ask for the name first: opening what the number means by now may have effects.
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    found = os.fstat(descriptor)
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not own or found.st_ino != inode:
        os.close(descriptor)
        return None
    return FileStore(f"/proc/self/fd/{descriptor}", -1)
