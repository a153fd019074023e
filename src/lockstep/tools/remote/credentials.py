"""The driver's key, which a driver and its workers share.

    workers that the driver starts        get the key through an anonymous file
    `lockstep worker` on another host     from LOCKSTEP_DRIVER_KEY or --key-file

Anyone who has it can run any code in the driver and its workers.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from lockstep.kernel.errors import UsageError
from lockstep.transport.secret import (
    SECRET_SIZE,
    create_secret_file,
    parse_secret,
    read_secret_file,
)

__all__ = ["KEY_SOURCE", "KEY_VARIABLE", "derive_store_secret", "make_key", "read_key"]

KEY_VARIABLE = "LOCKSTEP_DRIVER_KEY"
KEY_SOURCE = f"a key file or {KEY_VARIABLE}"
NOUN = "driver key"


def make_key(file: str | Path | None) -> bytes:
    """Return the driver's key: from `file`, from the environment, or a new one.

    A file that does not exist is created with a new key, readable by its owner only.
    """
    if file is not None:
        return create_secret_file(Path(file), NOUN)
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return secrets.token_bytes(SECRET_SIZE)
    return parse_secret(text, KEY_VARIABLE, NOUN)


def read_key(file: str | Path | None) -> bytes:
    """Return the key that a worker was given.

    Raises:
        UsageError: There is none, or other users can read it.
        FileError: The file cannot be read.
    """
    if file is not None:
        return read_secret_file(Path(file), NOUN)
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        raise UsageError(
            f"a worker needs its driver's key: copy the driver's key file to this host and pass "
            f"it with --key-file, or set {KEY_VARIABLE}"
        )
    return parse_secret(text, KEY_VARIABLE, NOUN)


def derive_store_secret(key: bytes) -> bytes:
    """Return the secret of the store in which the driver's workers meet."""
    return hmac.digest(key, b"store of the workers", "sha256")
