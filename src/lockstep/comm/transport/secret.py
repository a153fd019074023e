"""Secrets: 32 random bytes that processes share, written as 64 hexadecimal digits.

A secret is passed in a file that only its owner can read, or in an environment variable. It is
never on a command line, which every user of a machine can read.

The secret of an elastic run that spans hosts: only launchers that have it can take part.

    lockstep run --secret-file FILE      host 0 creates the file, the others need a copy
    LOCKSTEP_SECRET_FILE                 the same
    LOCKSTEP_SECRET                      the secret itself

The driver's key, which a driver and its workers share. Anyone who has it can run any code in the
driver and its workers.

    workers that the driver starts        get the key through an anonymous file
    `lockstep worker` on another host     from LOCKSTEP_DRIVER_KEY or --key-file
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from lockstep.files import create_file
from lockstep.kernel.errors import FileError, UsageError

__all__ = [
    "KEY_SOURCE",
    "KEY_VARIABLE",
    "SECRET",
    "SECRET_FILE",
    "SECRET_SIZE",
    "create_secret_file",
    "make_key",
    "make_secret",
    "read_key",
    "read_secret_file",
    "warn_without_secret",
]

SECRET_SIZE = 32  # bytes
SECRET = "LOCKSTEP_SECRET"
SECRET_FILE = "LOCKSTEP_SECRET_FILE"
KEY_VARIABLE = "LOCKSTEP_DRIVER_KEY"
KEY_SOURCE = f"a key file or {KEY_VARIABLE}"
# their names in messages
RUN_SECRET = "secret of a run"
DRIVER_KEY = "driver key"


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


# --- the secret of a run -------------------------------------------------------------------


def make_secret(file: str | None, node_rank: int, environ: Mapping[str, str]) -> bytes | None:
    """Return the secret in `file`, which host 0 creates.

    Without a file, return that of the variable LOCKSTEP_SECRET; None if there is none.

    Raises:
        FileError: The file cannot be read or written.
        UsageError: It is missing on another host, other users can read it, or it contains no
            secret.
    """
    if file is None:
        text = environ.get(SECRET)
        return parse_secret(text, SECRET, RUN_SECRET) if text else None
    path = Path(file)
    if node_rank == 0:
        return create_secret_file(path, RUN_SECRET)
    if not path.exists():
        raise UsageError(
            f"--secret-file {file}: there is no such file here; host 0 creates it: copy it from "
            f"there, readable by its owner only"
        )
    return read_secret_file(path, RUN_SECRET)


def warn_without_secret(address: str, port: int) -> str:
    """Return the warning that a store on the network admits anybody."""
    return (
        f"anyone who can reach {address}:{port} can join or disturb this run, because it has no "
        f"secret: use a private network, or give every host the same --secret-file "
        f"({SECRET_FILE})"
    )


# --- the key of a driver --------------------------------------------------------------------


def make_key(file: str | Path | None) -> bytes:
    """Return the driver's key: from `file`, from the environment, or a new one.

    A file that does not exist is created with a new key, readable by its owner only.
    """
    if file is not None:
        return create_secret_file(Path(file), DRIVER_KEY)
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return secrets.token_bytes(SECRET_SIZE)
    return parse_secret(text, KEY_VARIABLE, DRIVER_KEY)


def read_key(file: str | Path | None) -> bytes:
    """Return the key that a worker was given.

    Raises:
        UsageError: There is none, or other users can read it.
        FileError: The file cannot be read.
    """
    if file is not None:
        return read_secret_file(Path(file), DRIVER_KEY)
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        raise UsageError(
            f"a worker needs its driver's key: copy the driver's key file to this host and pass "
            f"it with --key-file, or set {KEY_VARIABLE}"
        )
    return parse_secret(text, KEY_VARIABLE, DRIVER_KEY)
