"""Credentials: the key that a driver and its workers share, and the identity of each process.

    workers that the driver starts        get the key through an anonymous file
    `lockstep worker` on another host     from LOCKSTEP_DRIVER_KEY or --key-file

The key is never on a command line, which every user of a machine can read. Anyone who has it
can run any code in the driver and its workers.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from lockstep.errors import FileError, UsageError

__all__ = [
    "KEY_VARIABLE",
    "SESSION",
    "UNKNOWN_SESSION",
    "Credentials",
    "Identity",
    "Role",
    "make_key",
    "read_key",
]

KEY_VARIABLE = "LOCKSTEP_DRIVER_KEY"
KEY_SIZE = 32  # bytes
SESSION = 16  # bytes
UNKNOWN_SESSION = bytes(SESSION)  # of a node agent, until its driver sends the session


def make_key(file: str | Path | None) -> bytes:
    """Return the driver's key: from `file`, from the environment, or a new one.

    A file that does not exist is created with a new key, readable by its owner only.
    """
    if file is None:
        text = os.environ.get(KEY_VARIABLE)
        return secrets.token_bytes(KEY_SIZE) if text is None else _parse_key(text, KEY_VARIABLE)
    path = Path(file)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            key = secrets.token_bytes(KEY_SIZE)
            new.write(key.hex() + "\n")
            return key
    except FileExistsError:
        return _read_key_file(path)
    except OSError as error:
        raise FileError(f"{path}: the key cannot be written ({error.strerror})") from error


def read_key(file: str | Path | None) -> bytes:
    """Return the key that a worker was given.

    Raises:
        UsageError: There is none, or other users can read it.
        FileError: The file cannot be read.
    """
    if file is not None:
        return _read_key_file(Path(file))
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        raise UsageError(
            f"a worker needs its driver's key: copy the driver's key file to this host and pass "
            f"it with --key-file, or set {KEY_VARIABLE}"
        )
    return _parse_key(text, KEY_VARIABLE)


def _read_key_file(path: Path) -> bytes:
    try:
        is_shared = path.stat().st_mode & 0o077
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileError(f"{path}: the key cannot be read ({reason})") from error
    if is_shared:
        raise UsageError(f"{path}: other users can read this key: run chmod 600 {path}")
    return _parse_key(text, str(path))


def _parse_key(text: str, source: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise UsageError(f"{source} contains no driver key: {2 * KEY_SIZE} hexadecimal digits")
    return bytes.fromhex(text.strip())


class Role(IntEnum):
    """The role of a process for its driver."""

    DRIVER = 0
    NODE_AGENT = 1  # `lockstep worker` on another host
    WORKER = 2


@dataclass(frozen=True)
class Identity:
    """A driver, a node agent, or worker `index` of host number `host`; 0 is the driver's host."""

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
        """Return "the driver", "a node agent" or "worker 1 of host 2"."""
        if self.role is Role.WORKER:
            return f"worker {self.index} of host {self.host}"
        return "the driver" if self.role is Role.DRIVER else "a node agent"


@dataclass(frozen=True)
class Credentials:
    """The credentials with which a process opens and answers connections.

    Attributes:
        key: The key that the driver and its workers share.
        own: The identity of this process.
        session: Random bytes that each driver draws. They keep out workers of an earlier driver
            with the same key.
    """

    key: bytes = field(repr=False)
    own: Identity
    session: bytes = UNKNOWN_SESSION
