"""Stored sources: a program runs from the copies in its run, under its original file names.

    import model  ──> finder: sys.path has /home/ann; is there a stored /home/ann/model.py?
                      yes: a module with that `__file__`, whose code is the stored text
                      no: an ordinary import

So relative paths, tracebacks, pdb and `inspect` show the program as it was recorded, even if its
files have moved or no longer exist.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["StoredSources"]


class StoredSources(MetaPathFinder):
    """Finds modules among the stored sources of a run.

    Args:
        folder: The folder with the copies: /home/ann/train.py is in FOLDER/home/ann/train.py.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {
            os.path.join(os.sep, file.relative_to(folder)): file.read_bytes()
            for file in sorted(folder.rglob("*.py"))
        }
        self._folders = {parent for path in self._files for parent in map(str, Path(path).parents)}

    def install(self) -> None:
        """Use the stored sources for all imports of this process, and for `linecache`."""
        sys.meta_path.insert(0, self)
        for path, content in self._files.items():
            lines = decode_source(content).splitlines(keepends=True)
            linecache.cache[path] = len(content), None, lines, path

    def contents(self) -> Iterable[bytes]:
        """Return the content of every file."""
        return self._files.values()

    def read(self, path: str) -> bytes | None:
        """Return the stored content of a file; None if it is not stored."""
        return self._files.get(os.path.abspath(path)) or self._files.get(os.path.realpath(path))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stored module; None for any other module."""
        tail = fullname.rpartition(".")[2]
        portions = []
        for entry in sys.path if path is None else path:
            base = os.path.join(os.path.abspath(entry), tail)
            package = os.path.join(base, "__init__.py")
            for file, folders in ((package, [base]), (f"{base}.py", None)):
                if file in self._files:
                    loader = StoredLoader(fullname, file, self._files[file])
                    return spec_from_file_location(
                        fullname, file, loader=loader, submodule_search_locations=folders
                    )
            if base in self._folders and not os.path.exists(package):
                portions.append(base)
        if not portions:
            return None
        spec = ModuleSpec(fullname, None, is_package=True)  # a package without __init__.py
        spec.submodule_search_locations = portions
        return spec


class StoredLoader(SourceFileLoader):
    """Loads one stored module; bytecode of the file as it is today is not used.

    Args:
        name: The name of the module.
        path: The path of its file when it was recorded.
        content: The content of the file.
    """

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        """Return the stored text, or the content of another file beside it."""
        return self._content if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the stored text."""
        code: CodeType = self.source_to_code(self._content, self.path)
        return code
