"""The key of a driver: 32 random bytes that it and its workers share.

    workers that the driver starts        get it through an anonymous file
    `lockstep worker` on another host     LOCKSTEP_DRIVER_KEY, or --key-file

Never on a command line, which every user of a machine can read. Whoever has the
key can run any code in the driver and its workers.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from lockstep.errors import FileError, UsageError

__all__ = ["VARIABLE", "find_key", "make_key"]

VARIABLE = "LOCKSTEP_DRIVER_KEY"
SIZE = 32  # bytes


def make_key(file: str | Path | None) -> bytes:
    """Return the driver's key: that of `file`, that of the environment, or a new one.

    A file that is not there is made with a new key, readable by its owner alone.
    """
    if file is None:
        text = os.environ.get(VARIABLE)
        return secrets.token_bytes(SIZE) if text is None else _parsed(text, VARIABLE)
    path = Path(file)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as fresh:
            key = secrets.token_bytes(SIZE)
            fresh.write(key.hex() + "\n")
            return key
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise FileError(f"{path}: the key cannot be written ({error.strerror})") from error


def find_key(file: str | Path | None) -> bytes:
    """Return the key that a worker was given; UsageError where it was given none."""
    if file is not None:
        return _read(Path(file))
    text = os.environ.get(VARIABLE)
    if text is None:
        raise UsageError(
            f"a worker needs its driver's key: copy the driver's key file here and name it with "
            f"--key-file, or set {VARIABLE}"
        )
    return _parsed(text, VARIABLE)


def _read(path: Path) -> bytes:
    try:
        shared = path.stat().st_mode & 0o077
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FileError(f"{path}: the key cannot be read ({said})") from error
    if shared:
        raise UsageError(f"{path}: other users may read this key: chmod 600 {path}")
    return _parsed(text, str(path))


def _parsed(text: str, place: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise UsageError(f"{place} holds no key of a driver: {2 * SIZE} hexadecimal digits")
    return bytes.fromhex(text.strip())
