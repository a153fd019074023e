"""The download: files from public mirrors, checked by SHA-256 before they get their name.

    mirror 1 ──chunks──> .NAME.XXXX (temporary) ──SHA-256 right──> NAME
       │ fails or differs
    mirror 2 ...

Several ranks may want one file at once: the first locks the folder, the others
wait and find the file. Where a folder cannot be locked each fetches its own
copy; the renaming is atomic, so that a torn file never has the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError

from lockstep.errors import FileError
from lockstep.files import replace_file

__all__ = ["Progress", "download"]

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes so far, and the bytes in all where known."""

CHUNK = 1 << 18  # bytes between two looks at the clock
ABANDONED = 3600.0  # seconds without a byte after which a part of a file is nobody's


def download(
    name: str,
    folder: Path,
    sha256: str,
    mirrors: Sequence[str],
    progress: Progress | None = None,
    stall: float = 30.0,
    deadline: float = 600.0,
) -> Path:
    """Fetch `name` from the first of `mirrors` that has it into `folder`; return its path.

    Does nothing where the file is there already. `stall` bounds one wait for the
    network, `deadline` the whole, waiting for another rank included, in seconds.
    Raises FileError that says what each mirror answered, or why the folder cannot
    be written.
    """
    path = folder / name
    end = time.monotonic() + deadline
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, end):
            if path.exists():
                return path
            answers = []
            for mirror in mirrors:
                answer = _fetched(mirror + name, path, sha256, progress, stall, end)
                if answer is None:
                    return path
                answers.append(f"{mirror} {answer}")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    raise FileError(
        f"cannot download {name}: {'; '.join(answers)}; "
        f"check the network, or put the file into {folder} yourself"
    )


def _fetched(
    url: str, path: Path, sha256: str, progress: Progress | None, stall: float, end: float
) -> str | None:
    """Fetch one URL to `path`; return what is wrong with it, or None where all is well."""
    _clear(path)
    try:
        with replace_file(path, mode=0o644) as file:
            found = _copied(url, file, path.name, progress, stall, end)
            if found != sha256:
                differs = f"{found[:12]}..., not {sha256[:12]}..."
                raise _Refused(f"sent a file whose SHA-256 is {differs}")
    except _Refused as refusal:
        return str(refusal)
    return None


def _clear(path: Path) -> None:
    """Remove what a download that was killed has left; not one that may still be going on."""
    for each in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - each.stat().st_mtime > ABANDONED:
                each.unlink()


class _Refused(Exception):
    """What a mirror answered instead of the file."""


def _copied(
    url: str, file: IO[bytes], name: str, progress: Progress | None, stall: float, end: float
) -> str:
    """Copy the body of `url` into `file`; return its SHA-256."""
    digest, size = hashlib.sha256(), 0
    for chunk, total in _chunks(url, stall, end):
        file.write(chunk)
        digest.update(chunk)
        size += len(chunk)
        if progress is not None:
            progress(name, size, total)
    return digest.hexdigest()


def _chunks(url: str, stall: float, end: float) -> Iterator[tuple[bytes, int | None]]:
    """Yield (chunk, bytes in all) of what `url` sends; whatever goes wrong is _Refused."""
    try:
        with urllib.request.urlopen(url, timeout=stall) as response:
            total = int(response.headers.get("Content-Length") or 0) or None
            received = 0
            while chunk := response.read1(CHUNK):  # what is there, so that the clock is seen
                received += len(chunk)
                yield chunk, total
                if time.monotonic() > end:
                    raise _Refused(f"was too slow: {received} bytes before the deadline")
            if total is not None and received < total:
                raise _Refused(f"stopped after {received} of {total} bytes")
    except HTTPError as error:
        raise _Refused(f"answered {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise _Refused(f"failed ({getattr(error, 'reason', None) or error})") from None


@contextlib.contextmanager
def _locked(folder: Path, end: float) -> Iterator[None]:
    """Hold the folder itself as the lock, which leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        while not _lock(handle):
            if time.monotonic() > end:
                raise FileError(f"another process held {folder} until the deadline; try again")
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)  # and with it the lock


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the renaming alone must do
        pass
    return True
