"""The secret of a run that spans hosts: only processes that have it can join the run.

    lockstep run --secret-file FILE      host 0 creates the file, the others need a copy
    LOCKSTEP_SECRET_FILE                 the same for other launchers
    LOCKSTEP_SECRET                      the secret itself: 64 hexadecimal digits

Ranks on one host need none: their store cannot be reached by other users
(`local_rendezvous.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.kernel.errors import UsageError
from lockstep.launcher.environment import SECRET_FILE
from lockstep.transport.secret import create_secret_file, parse_secret, read_secret_file

_given: list[bytes] = []

__all__ = [
    "SECRET",
    "SECRET_FILE",
    "give_secret",
    "make_secret",
    "read_secret",
    "warn_without_secret",
]

SECRET = "LOCKSTEP_SECRET"
NOUN = "secret of a run"


def give_secret(secret: bytes) -> None:
    """Give this process a secret that is in no file and no variable: that of its driver."""
    _given[:] = [secret]


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return this process's secret, else the one that `environ` names; None if there is none.

    Raises:
        FileError: The file cannot be read.
        UsageError: Other users can read the file, or the file or variable contains no secret.
    """
    if _given:
        return _given[0]
    if file := environ.get(SECRET_FILE):
        return read_secret_file(Path(file), NOUN)
    if text := environ.get(SECRET):
        return parse_secret(text, SECRET, NOUN)
    return None


def make_secret(file: str | None, node_rank: int, environ: Mapping[str, str]) -> bytes | None:
    """Return the secret in `file`, which host 0 creates; without a file that of `environ`.

    Raises:
        FileError: The file cannot be read or written.
        UsageError: It is missing on another host, other users can read it, or it contains no
            secret.
    """
    if file is None:
        return read_secret(environ)
    path = Path(file)
    if node_rank == 0:
        return create_secret_file(path, NOUN)
    if not path.exists():
        raise UsageError(
            f"--secret-file {file}: there is no such file here; host 0 creates it: copy it from "
            f"there, readable by its owner only"
        )
    return read_secret_file(path, NOUN)


def warn_without_secret(address: str, port: int) -> str:
    """Return the warning that a store on the network admits anybody."""
    return (
        f"anyone who can reach {address}:{port} can join or disturb this run, because it has no "
        f"secret: use a private network, or give every host the same --secret-file "
        f"({SECRET_FILE})"
    )
