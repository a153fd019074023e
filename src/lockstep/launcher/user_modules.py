"""The modules of the program itself, as opposed to those of installed packages.

A process that trains has imported thousands of modules. Looking at each takes 5 ms, and in a forked
rank also copies the pages that contain them. So each module is looked at once, if possible by the
fork server.
"""

from __future__ import annotations

import os
import sys

from lockstep.launcher.stacks import is_user_code

__all__ = ["find_module_files"]

_latest: tuple[str, object] = ("", None)  # the newest module that was looked at
_own: list[str] = []  # the program's own modules among those up to it


def find_module_files() -> list[str]:
    """Return the `__file__` of each imported module of the program itself; some are relative."""
    global _latest
    new = _list_newer(*_latest)
    if new:
        _latest = (new[-1], sys.modules.get(new[-1]))
        is_new = set(new)
        _own[:] = [name for name in _own if name not in is_new]
        _own.extend(name for name in new if name != "__main__" and _get_file(name))
    files = map(_get_file, ["__main__", *_own])  # a forked rank has a __main__ of its own
    return [file for file in files if file]


def _list_newer(latest: str, module: object) -> list[str]:
    """Return the modules imported after `latest`, oldest first; all if that one is gone."""
    while True:
        names: list[str] = []
        try:
            for name in reversed(sys.modules):
                if name == latest and sys.modules[name] is module:
                    break
                names.append(name)
        except RuntimeError:  # another thread imports
            continue
        return names[::-1]


def _get_file(name: str) -> str:
    """Return the file of a module of the program itself; "" for others."""
    # A module may run code when its attributes are read, so only its dict is read.
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return ""
    return file if is_user_code(file) or os.pardir in file else ""
