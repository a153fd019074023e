"""Downloads from public mirrors, verified by SHA-256 before the file gets its final name.

    mirror 1 ──chunks──> .NAME.XXXX (temporary) ──SHA-256 matches──> NAME
       │ fails, or SHA-256 differs
    mirror 2 ...

If several ranks request the same file, each downloads its own copy. Renaming is atomic, so the file
is never incomplete.
"""

from __future__ import annotations

import hashlib
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from lockstep.files import replace_file
from lockstep.kernel.errors import FileError

__all__ = ["Progress", "download"]

Progress = Callable[[str, int, int | None], None]
"""A function of the file name, the bytes so far, and the total bytes (None if unknown)."""

CHUNK = 1 << 18  # bytes between two checks of the deadline


def download(
    name: str,
    folder: Path,
    sha256: str,
    mirrors: Sequence[str],
    progress: Progress | None = None,
    stall: float = 30.0,
    deadline: float = 600.0,
) -> Path:
    """Download a file unless it exists.

    Args:
        name: The name of the file.
        folder: The folder of the file.
        sha256: The SHA-256 of the file.
        mirrors: The base URLs, tried in order.
        progress: A function that is called after each chunk.
        stall: The longest wait for data from the network, in seconds.
        deadline: The limit for the whole download, in seconds.

    Returns:
        The path of the file.

    Raises:
        FileError: No mirror delivered the file (the message has the answer of each), or the folder
            cannot be written.
    """
    path, end, answers = folder / name, time.monotonic() + deadline, []
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for mirror in mirrors:
            try:
                _fetch(mirror + name, path, sha256, progress, stall, end)
                return path
            except _MirrorError as error:
                answers.append(f"{mirror} {error}")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    raise FileError(
        f"cannot download {name}: {'; '.join(answers)}; "
        f"check the network, or put the file into {folder} yourself"
    )


def _fetch(
    url: str, path: Path, sha256: str, progress: Progress | None, stall: float, end: float
) -> None:
    """Download one URL to `path`; _MirrorError if the mirror does not send the file."""
    digest, size = hashlib.sha256(), 0
    with replace_file(path, mode=0o644) as file:
        for chunk, total in _chunks(url, stall, end):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            if progress is not None:
                progress(path.name, size, total)
        if (actual := digest.hexdigest()) != sha256:
            raise _MirrorError(
                f"sent a file whose SHA-256 is {actual[:12]}..., not {sha256[:12]}..."
            )


class _MirrorError(Exception):
    """A mirror did not send the file; the message says what happened."""


def _chunks(url: str, stall: float, end: float) -> Iterator[tuple[bytes, int | None]]:
    """Yield (chunk, total bytes) of a response; every error raises _MirrorError."""
    try:
        with urllib.request.urlopen(url, timeout=stall) as response:
            total = int(response.headers.get("Content-Length") or 0) or None
            received = 0
            # read1 returns the data that has arrived, so that the deadline is checked.
            while chunk := response.read1(CHUNK):
                received += len(chunk)
                yield chunk, total
                if time.monotonic() > end:
                    raise _MirrorError(f"was too slow: {received} bytes before the deadline")
            if total is not None and received < total:
                raise _MirrorError(f"stopped after {received} of {total} bytes")
    except HTTPError as error:
        raise _MirrorError(f"answered {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise _MirrorError(f"failed ({getattr(error, 'reason', None) or error})") from None
