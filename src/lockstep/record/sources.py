"""The sources of a run: the program's own files, as they were when it ran.

    RUN/sources/home/ann/train.py       what /home/ann/train.py held when the run began
    RUN/sources-2/...                   the same of a resumed run whose files had changed

Own files are those of modules that belong to no installation. They are copied as they are:
a secret that someone wrote into a source is in the copy, too. Files that a program reads
by itself, such as its configuration, are not copied.

Variables of the environment whose names are strings in these files are recorded beside them, since
`float(os.environ["LR"])` decides the bits as an argument does.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.files import create_file, make_folder
from lockstep.launcher.stacks import is_user_code
from lockstep.record.program import find_started_folder
from lockstep.redaction import may_be_secret

__all__ = ["FOLDER", "SourceFolder", "find_named_variables", "find_sources", "locate_stored"]

FOLDER = "sources"
NAME = re.compile(rb"""["']([A-Z][A-Z0-9_]*)["']""")
# Variables of the rank, its launcher or its user: a replay has its own.
FOREIGN = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE)_.*|(MASTER|OMPI|PMIX?|MPI|SLURM|PET|TORCHELASTIC)_.*"
    r"|LOCKSTEP_.*|(CUDA|HIP)_VISIBLE_DEVICES|COLUMNS|HOME|HOSTNAME|LANG|LOGNAME|PATH|PWD"
    r"|PYTHONPATH|SHELL|TEMP|TERM|TMP|TMPDIR|USER|VIRTUAL_ENV"
)


def find_sources() -> dict[str, bytes]:
    """Return the program's own files by absolute path, with their content."""
    found = {}
    for path in _find_files():
        try:
            found[path] = Path(path).read_bytes()
        except OSError:
            continue
    return found


def find_named_variables(sources: Iterable[bytes], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment whose names are strings in sources.

    Variables such as RANK and HOME, which only this process is meant to have, and those that may
    be secrets are left out.
    """
    names = {name.decode() for source in sources for name in NAME.findall(source)}
    return {
        name: environ[name]
        for name in sorted(names & environ.keys())
        if not FOREIGN.fullmatch(name) and not may_be_secret(name, environ[name])
    }


def _find_files() -> list[str]:
    # A function of `ls.launch` comes from a script that is no module of this process. A module
    # may run code where its attributes are read, so only its dict is.
    modules = [getattr(each, "__dict__", {}) for each in list(sys.modules.values())]
    files = [sys.argv[0], *(each.get("__file__") for each in modules)]
    python = [each for each in files if isinstance(each, str) and each.endswith(".py")]
    # First, because resolving the paths of thousands of library files takes milliseconds.
    python = [each for each in python if is_user_code(each) or os.pardir in each]
    started = find_started_folder()
    paths = (os.path.normpath(os.path.join(started, each)) for each in python)
    return [path for path in dict.fromkeys(paths) if is_user_code(path)]


def locate_stored(folder: Path, path: str) -> Path:
    """Return where a folder of sources has the copy of a file, by its absolute path."""
    return folder / os.path.relpath(path, os.sep)


class SourceFolder:
    """The folder of sources of a run that this process records.

    Args:
        run: The folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._stored: set[str] = set()
        self.name: str | None = None
        """The name of the folder in the run's; None while it has no file."""
        self.variables: dict[str, str] = {}
        """The variables that the sources name, with the values that they have."""

    def open(self) -> None:
        """Store the sources of a process that begins or resumes the run.

        Where a file differs from the copy that an earlier process stored, a new folder is begun.

        Raises:
            OSError: A file cannot be written.
        """
        sources = find_sources()
        self.variables = find_named_variables(sources.values(), os.environ)
        number = max(map(_number, self._run.glob(f"{FOLDER}*")), default=0) or 1
        latest = self._run / _name(number)
        if any(_has_changed(latest, path, content) for path, content in sources.items()):
            number += 1
        self._store(sources, _name(number))

    def add(self) -> None:
        """Store the files of modules that were imported since the last call.

        Raises:
            OSError: A file cannot be written.
        """
        if self.name is not None and set(_find_files()) - self._stored:
            sources = find_sources()
            self.variables = find_named_variables(sources.values(), os.environ)
            self._store(sources, self.name)

    def _store(self, sources: dict[str, bytes], name: str) -> None:
        for path, content in sources.items():
            self.name = name
            if path in self._stored:
                continue
            self._stored.add(path)
            place = locate_stored(self._run / name, path)
            make_folder(place.parent)
            with contextlib.suppress(FileExistsError), open(create_file(place), "wb") as file:
                file.write(content)


def _has_changed(folder: Path, path: str, content: bytes) -> bool:
    """Return whether a folder of sources has another copy of a file."""
    try:
        return locate_stored(folder, path).read_bytes() != content
    except OSError:
        return False


def _name(number: int) -> str:
    return FOLDER if number == 1 else f"{FOLDER}-{number}"


def _number(path: Path) -> int:
    """Return the number of a folder of sources, from 1; 0 for another name."""
    match = re.fullmatch(rf"{FOLDER}(?:-([1-9]\d*))?", path.name)
    return 0 if match is None else int(match[1] or 1)
