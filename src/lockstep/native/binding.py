"""The module `lockstep.comm._native`, loaded from the binding that fits this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from types import ModuleType

from lockstep.native.binding_folder import (
    PACKAGE_FOLDER,
    get_cache_folder,
    list_bindings,
    reason_not_trusted,
)
from lockstep.native.binding_key import BindingKey, current_key, describe_difference
from lockstep.native.compilation import CompilationError, find_compiler

__all__ = ["NAME", "BindingError", "find_bindings", "load_binding", "load_file"]

NAME = "lockstep.comm._native"

BUILD = "run `lockstep build`"


class BindingError(ImportError):
    """No binding fits this process.

    Args:
        reason: Why no binding fits, without advice.
        advice: What the user can do about it.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason, self.advice = reason, advice


def load_binding() -> ModuleType:
    """Return the native module of the binding that was built for this process.

    Raises:
        BindingError: There is no such binding, or it cannot be loaded.
    """
    reason = ""
    for path in find_bindings():
        try:
            return load_file(path)
        except ImportError as error:
            reason = reason or str(error).partition("\n")[0]
    raise BindingError(f"it cannot be loaded ({reason})", BUILD)


def load_file(path: Path) -> ModuleType:
    """Load the native module from a file; raise ImportError if the file is not such a module."""
    import torch  # noqa: F401 (loads the libraries that the module is linked with)

    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def find_bindings() -> list[Path]:
    """Return the native modules that fit this process, at least one, the preferred one first.

    A module in the cache comes first: `lockstep build` puts one there if the package's does not
    work.

    Raises:
        BindingError: There is none.
    """
    if sys.platform != "linux":
        raise BindingError(f"it needs Linux, and this is {sys.platform}", "use gloo")
    try:
        cache, wanted = get_cache_folder(), current_key()
    except OSError as error:
        reason = f"the C++ source {error.filename} cannot be read ({error.strerror})"
        raise BindingError(reason, "correct its permissions or reinstall torch-lockstep") from None
    untrusted = reason_not_trusted(cache.parent) or reason_not_trusted(cache)
    in_cache = {} if untrusted else list_bindings(cache, is_trusted=False)
    in_package = list_bindings(PACKAGE_FOLDER, is_trusted=True)
    found = [each[wanted] for each in (in_cache, in_package) if wanted in each]
    if not found:
        others = [*in_cache, *in_package]
        raise BindingError(*_explain(wanted, others, untrusted, _has_compiler()))
    return found


def _has_compiler() -> bool:
    try:
        find_compiler()
    except CompilationError:
        return False
    return True


def _explain(
    wanted: BindingKey, found: Collection[BindingKey], untrusted: str | None, has_compiler: bool
) -> tuple[str, str]:
    """Return why no binding fits, and what to do.

    Args:
        wanted: The key of this process.
        found: Keys of the bindings that exist.
        untrusted: Why the cache is not used, or None.
        has_compiler: Whether a C++ compiler is installed.
    """
    build = BUILD if has_compiler else f"install a C++ compiler (such as g++), then {BUILD}"
    if untrusted is not None:
        other = f"set XDG_CACHE_HOME to a folder of user {os.geteuid()}, then {BUILD}"
        return f"the cache is not used, because {untrusted}", f"correct that or {other}"
    if not found:
        return f"it has not been built for torch {wanted.torch} yet", build
    nearest = min(found, key=lambda key: _count_differences(key, wanted))
    return _describe(nearest, wanted), build


def _count_differences(found: BindingKey, wanted: BindingKey) -> int:
    names = [each.name for each in fields(wanted)]
    return sum(getattr(found, name) != getattr(wanted, name) for name in names)


def _describe(found: BindingKey, wanted: BindingKey) -> str:
    """Return in words why a binding does not fit."""
    if found.torch != wanted.torch and found.python == wanted.python:
        change = "upgraded" if _numbers(found.torch) < _numbers(wanted.torch) else "changed"
        return (
            f"torch was {change} from {found.torch} to {wanted.torch}, and it was built for "
            f"{found.torch}"
        )
    return f"it was built for {describe_difference(found, wanted)}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
