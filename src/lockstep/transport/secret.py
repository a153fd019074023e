"""Secrets: 32 random bytes that processes share, written as 64 hexadecimal digits.

A secret is passed in a file that only its owner can read, or in an environment variable. It is
never on a command line, which every user of a machine can read.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from lockstep.files import create_file
from lockstep.kernel.errors import FileError, UsageError

__all__ = ["SECRET_SIZE", "create_secret_file", "parse_secret", "read_secret_file"]

SECRET_SIZE = 32  # bytes


def create_secret_file(path: Path, noun: str) -> bytes:
    """Create `path` with a new secret, readable by its owner only; return the secret.

    If the file exists, its secret is returned.

    Args:
        path: The file.
        noun: What the secret is called in messages, such as "driver key".

    Raises:
        FileError: The file cannot be written or read.
        UsageError: Other users can read it, or it contains no secret.
    """
    secret = secrets.token_bytes(SECRET_SIZE)
    try:
        with open(create_file(path), "w") as new:
            new.write(secret.hex() + "\n")
        return secret
    except FileExistsError:
        return read_secret_file(path, noun)
    except OSError as error:
        raise FileError(f"{path}: the {noun} cannot be written ({error.strerror})") from error


def read_secret_file(path: Path, noun: str) -> bytes:
    """Return the secret in `path`; arguments and errors as for `create_secret_file`."""
    try:
        with open(path) as file:
            is_shared = os.fstat(file.fileno()).st_mode & 0o077
            text = file.read(1 << 12)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileError(f"{path}: the {noun} cannot be read ({reason})") from error
    if is_shared:
        raise UsageError(f"{path}: other users can read this {noun}: run chmod 600 {path}")
    return parse_secret(text, str(path), noun)


def parse_secret(text: str, source: str, noun: str) -> bytes:
    """Return the secret that `text`, from `source`, contains; UsageError if it contains none."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise UsageError(f"{source} contains no {noun}: {2 * SECRET_SIZE} hexadecimal digits")
    return bytes.fromhex(text.strip())
