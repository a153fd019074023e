"""User code: the files of a program that belong neither to Python nor to an installed package."""

from __future__ import annotations

import os
import sysconfig

__all__ = ["INSTALLED", "NOT_USER_CODE", "PACKAGE", "is_user_code", "shorten_path"]

PACKAGE = os.path.dirname(os.path.abspath(__file__))
NOT_USER_CODE = (sysconfig.get_path("stdlib"), "<frozen", "<string>", PACKAGE)
INSTALLED = ("/site-packages/", "/dist-packages/")  # of any environment


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not Python's, not an installed package's, not ours."""
    return not file.startswith(NOT_USER_CODE) and not any(part in file for part in INSTALLED)


def shorten_path(file: str) -> str:
    """Return a path without the working directory, or the folder of installed packages."""
    for part in INSTALLED:
        file = file.rpartition(part)[2]
    return file.removeprefix(os.path.join(os.getcwd(), ""))
