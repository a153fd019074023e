"""Compiles the backend "lockstep" into the package where that is possible.

    torch, ninja and a compiler    the binding for this torch (--no-build-isolation)
    else                           nothing; `lockstep build` compiles it

Everything works on Gloo without the backend, so a failure is one line and not the end of the
installation. The reason is kept in the package, for `lockstep doctor`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build import build

SOURCE = Path(__file__).parent / "src"
# The package is not installed yet. These modules need the standard library and torch only.
sys.path.insert(0, str(SOURCE))

from lockstep.comm.native.binding_folder import lock_folder, write_reason  # noqa: E402
from lockstep.comm.native.build import CompilationError, build_binding, find_compiler  # noqa: E402
from lockstep.comm.native.extension_abi import current_abi  # noqa: E402
from lockstep.files import remove_tree  # noqa: E402

LOCK_TIMEOUT = 3600.0  # seconds to wait for another build in the same folder


def reason_to_skip() -> str | None:
    """Return why nothing can be compiled here, or None if there is a compiler."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if os.environ.get("LOCKSTEP_BUILD") == "python":
        return "LOCKSTEP_BUILD=python was set at the installation"
    try:
        find_compiler()
    except CompilationError as error:
        return f"at the installation: {error}"
    return None


class BuildBinding(Command):
    """Compiles the binding into the package's folder of bindings."""

    description = "compile the backend 'lockstep'"
    user_options: ClassVar = [("build-lib=", "d", "folder of the package lockstep")]

    def initialize_options(self) -> None:
        """Set what setuptools fills in; `editable_mode` is part of its protocol."""
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        """Take the folder of the command `build`."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Compile what can be compiled, and write down why the rest was not."""
        parent = SOURCE if self.editable_mode else Path(str(self.build_lib))
        folder = parent / "lockstep" / "bindings"
        if not self.editable_mode:
            remove_tree(folder)  # by an earlier build of this folder, perhaps of other sources
        folder.mkdir(parents=True, exist_ok=True)
        reason = reason_to_skip()
        if reason is None:
            with lock_folder(folder, LOCK_TIMEOUT):
                reason = self._compile(folder)
        write_reason(folder, reason)
        (folder / ".lock").unlink(missing_ok=True)
        if reason is not None:
            print(
                f"lockstep: the backend 'lockstep' is not built ({reason}); everything works on "
                "gloo, more slowly, until `lockstep build` has built it",
                file=sys.stderr,
            )

    def _compile(self, folder: Path) -> str | None:
        """Return why there is no binding, or None if there is one now."""
        temporary = Path(self.get_finalized_command("build").build_temp)
        temporary.mkdir(parents=True, exist_ok=True)
        log = temporary / "native.log"
        try:
            abi = current_abi()
        except (ImportError, OSError):
            return "torch is not in the build environment"
        try:
            if not (folder / abi.name).is_dir():
                build_binding(folder, abi, log, show_progress)
        except (CompilationError, OSError) as error:
            return str(error)
        return None

    def get_source_files(self) -> list[str]:
        """Return no files: MANIFEST.in lists the C++ sources."""
        return []

    def get_outputs(self) -> list[str]:
        """Return the files that were built."""
        folder = Path(str(self.build_lib)) / "lockstep" / "bindings"
        return [str(path) for path in folder.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """Return nothing: an editable installation builds in place."""
        return {}


class BuiltDistribution(Distribution):
    """A distribution whose wheels are for this platform if there is a compiler."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel may contain compiled files."""
        return reason_to_skip() is None


class Build(build):
    """The command `build`, with the binding."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_binding", None)]


def show_progress(done: int, total: int) -> None:
    """Print a line when everything is compiled."""
    if done == total:
        print(f"lockstep: {done} of {total} files compiled", file=sys.stderr)


setup(distclass=BuiltDistribution, cmdclass={"build": Build, "build_binding": BuildBinding})
