"""The module `lockstep.comm._native`, loaded from the binding that fits this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from lockstep.comm.native.binding_folder import (
    PACKAGE_FOLDER,
    get_cache_folder,
    list_bindings,
    reason_not_trusted,
)
from lockstep.comm.native.extension_abi import ExtensionABI, current_abi

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
        self.reason = reason
        self.advice = advice


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
        cache = get_cache_folder()
        wanted = current_abi()
    except OSError as error:
        reason = f"the C++ source {error.filename} cannot be read ({error.strerror})"
        raise BindingError(reason, "correct its permissions or reinstall torch-lockstep") from None
    untrusted = reason_not_trusted(cache.parent) or reason_not_trusted(cache)
    in_cache = {} if untrusted else list_bindings(cache, is_trusted=False)
    in_package = list_bindings(PACKAGE_FOLDER, is_trusted=True)
    modules = [bindings[wanted] for bindings in (in_cache, in_package) if wanted in bindings]
    if not modules:
        others = [*in_cache, *in_package]
        raise BindingError(*_explain(wanted, others, untrusted))
    return modules


def _explain(
    wanted: ExtensionABI, existing: Collection[ExtensionABI], untrusted: str | None
) -> tuple[str, str]:
    """Return why no binding fits, and what to do.

    Args:
        wanted: The ABI of this process.
        existing: The ABIs of all bindings.
        untrusted: Why the cache is not used, or None.
    """
    if untrusted is not None:
        other = f"set XDG_CACHE_HOME to a folder of user {os.geteuid()}, then {BUILD}"
        return f"the cache is not used, because {untrusted}", f"correct that or {other}"
    if not existing:
        return f"it has not been built for torch {wanted.torch} yet", BUILD
    torches = sorted({abi.torch for abi in existing if abi.python == wanted.python})
    if wanted.torch in torches:
        return "it was built for other C++ sources, or for another build of this torch", BUILD
    if torches:
        built = ", ".join(torches)
        return f"it was built for torch {built}, and this is torch {wanted.torch}", BUILD
    return f"it was built for another Python than {wanted.python}", BUILD
