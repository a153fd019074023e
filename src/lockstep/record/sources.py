"""The sources of a run: copies of the program's own files at the time of the run.

    RUN/sources/home/ann/train.py       /home/ann/train.py, as it was when the run began
    RUN/sources-2/...                   the files of a resumed run, if they had changed

The program's own files are those of modules outside of installations. They are copied unchanged: a
secret in a source file is in the copy too. Other files that a program reads, such as its
configuration, are not copied.

Environment variables whose names are strings in these files are recorded too, since
`float(os.environ["LR"])` affects the bits just as an argument does.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.files import create_file, make_folder
from lockstep.record.program import find_started_folder
from lockstep.redaction import may_be_secret
from lockstep.user_code import is_user_code

__all__ = ["FOLDER", "SourceFolder", "find_named_variables", "find_sources", "locate_stored"]

FOLDER = "sources"
NAME = re.compile(rb"""["']([A-Z][A-Z0-9_]*)["']""")
# Variables of the rank, its launcher or its user: a replay has different ones.
FOREIGN = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE)_.*|(MASTER|OMPI|PMIX?|MPI|SLURM|PET|TORCHELASTIC)_.*"
    r"|LOCKSTEP_.*|(CUDA|HIP)_VISIBLE_DEVICES|COLUMNS|HOME|HOSTNAME|LANG|LOGNAME|PATH|PWD"
    r"|PYTHONPATH|SHELL|TEMP|TERM|TMP|TMPDIR|USER|VIRTUAL_ENV"
)


def find_sources() -> dict[str, bytes]:
    """Return the contents of the program's own files, by absolute path."""
    sources = {}
    for path in _find_files():
        try:
            sources[path] = Path(path).read_bytes()
        except OSError:
            continue
    return sources


def find_named_variables(sources: Iterable[bytes], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables whose names are strings in sources.

    Variables that are specific to this process or user, such as RANK and HOME, and variables that
    may be secrets are left out.
    """
    names = {name.decode() for source in sources for name in NAME.findall(source)}
    return {
        name: environ[name]
        for name in sorted(names & environ.keys())
        if not FOREIGN.fullmatch(name) and not may_be_secret(name, environ[name])
    }


def _find_files() -> list[str]:
    # A function of `ls.launch` comes from a script that is not a module of this process.
    script = [sys.argv[0]] if sys.argv[0].endswith(".py") else []
    started = find_started_folder()
    files = [*script, *find_module_files()]
    paths = (os.path.normpath(os.path.join(started, file)) for file in files)
    return [path for path in dict.fromkeys(paths) if is_user_code(path)]


def find_module_files() -> list[str]:
    """Return the `__file__` of each imported module of the program itself; some are relative."""
    # A module may run code when its attributes are read, so only its dict is read.
    names = [getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]]
    files = [file for file in names if isinstance(file, str) and file.endswith(".py")]
    return [file for file in files if is_user_code(file) or os.pardir in file]


def locate_stored(folder: Path, path: str) -> Path:
    """Return the path of a file's copy in a folder of sources; `path` is absolute."""
    return folder / os.path.relpath(path, os.sep)


class SourceFolder:
    """The folder of sources in a run that this process records.

    Args:
        run: The folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._stored: set[str] = set()
        self.name: str | None = None
        """The name of the folder, within the folder of the run. None: it has no file yet."""
        self.variables: dict[str, str] = {}
        """The environment variables that the sources name, with their values."""

    def open(self) -> None:
        """Store the sources of a process that begins or resumes the run.

        If a file differs from the copy of an earlier process, all files go into a new folder.

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
            copy = locate_stored(self._run / name, path)
            make_folder(copy.parent)
            with contextlib.suppress(FileExistsError), open(create_file(copy), "wb") as file:
                file.write(content)


def _has_changed(folder: Path, path: str, content: bytes) -> bool:
    """Return whether a folder of sources has a different copy of a file."""
    try:
        return locate_stored(folder, path).read_bytes() != content
    except OSError:
        return False


def _name(number: int) -> str:
    return FOLDER if number == 1 else f"{FOLDER}-{number}"


def _number(path: Path) -> int:
    """Return the number of a folder of sources, from 1; 0 if the name is not that of one."""
    match = re.fullmatch(rf"{FOLDER}(?:-([1-9]\d*))?", path.name)
    return 0 if match is None else int(match[1] or 1)
