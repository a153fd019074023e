"""Builds: compiled in a temporary folder, verified, then published under their names.

setup.py imports this module: it needs torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.native.binding_folder import (
    CORE,
    PACKAGE_FOLDER,
    find_archive,
    publish,
    temporary_folder,
    write_key,
)
from lockstep.native.binding_key import BindingKey, core_key
from lockstep.native.compilation import ARCHIVE, MODULE, TorchBuild, compile_native

__all__ = ["build_binding", "build_core"]


def build_binding(
    folder: Path,
    key: BindingKey,
    log: Path,
    show_progress: Callable[[str, int, int], None],
    verify: Callable[[Path], None] = lambda module: None,
) -> Path:
    """Compile a binding into a folder of bindings, and the core too if it is not there yet.

    Args:
        folder: An existing folder; the caller holds its lock.
        key: The key of this process.
        log: File for the compiler's commands and their output.
        show_progress: Called with the part ("core" or "binding"), the number of its files that
            are compiled, and the number of all its files.
        verify: Called with the module before it is published; raises if it does not work.

    Returns:
        The published module.

    Raises:
        CompilationError: There is no compiler, or it failed.
        OSError: The folder cannot be written.
    """
    import torch

    built = TorchBuild(Path(torch.__file__).parent, key.cxx_abi)
    core = core_key(key.cxx_abi)
    archive = find_archive(folder, core) or find_archive(PACKAGE_FOLDER, core)
    with temporary_folder(folder) as work:
        compile_native(work, log, built, archive, show_progress)
        if archive is None:
            _publish_core(work, folder, core)
        complete = work / "binding"
        complete.mkdir(mode=folder.stat().st_mode & 0o777)
        (work / MODULE).rename(complete / MODULE)
        (complete / MODULE).chmod(0o755 & folder.stat().st_mode)
        write_key(complete, key)
        verify(complete / MODULE)
        publish(complete, folder / key.name)
    return folder / key.name / MODULE


def build_core(
    folder: Path, log: Path, show_progress: Callable[[str, int, int], None], cxx_abi: int = 1
) -> None:
    """Compile the core into a folder of bindings; needs no torch.

    Args:
        folder: An existing folder; the caller holds its lock.
        log: File for the compiler's commands and their output.
        show_progress: Called with the part ("core"), the number of its files that are compiled,
            and the number of all its files.
        cxx_abi: 1 for the C++11 ABI of libstdc++, which torch has had since 2.7.

    Raises:
        CompilationError: There is no compiler, or it failed.
        OSError: The folder cannot be written.
    """
    core = core_key(cxx_abi)
    if find_archive(folder, core) is not None:
        return
    with temporary_folder(folder) as work:
        compile_native(work, log, None, None, show_progress, cxx_abi)
        _publish_core(work, folder, core)


def _publish_core(work: Path, folder: Path, key: dict[str, str]) -> None:
    complete = work / CORE
    complete.mkdir(mode=folder.stat().st_mode & 0o777)
    (work / ARCHIVE).rename(complete / ARCHIVE)
    write_key(complete, key)
    publish(complete, folder / CORE)
