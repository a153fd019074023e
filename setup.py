"""Adds the native backend to the package if a compiler and torch's headers are available.

The extension is optional: without it everything works on gloo.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "lockstep" / "csrc"
EXTENSION = "lockstep.comm._native"


def options() -> dict[str, Any]:
    """Return the arguments of setup() that build the extension, or none if it can't be built."""
    if not sys.platform.startswith("linux") or os.environ.get("LOCKSTEP_BUILD") == "python":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except (ImportError, OSError):
        print(
            "lockstep: torch is not in the build environment, so the backend 'lockstep' is "
            "not built; install with --no-build-isolation to build it",
            file=sys.stderr,
        )
        return {}

    class OptionalBuild(BuildExtension):  # type: ignore[misc]
        """Builds the extension, or prints in one line why it was not built."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                print(
                    f"lockstep: the backend 'lockstep' was not built ({first}); everything "
                    f"works on gloo, more slowly",
                    file=sys.stderr,
                )
                self.extensions = []

    sources = sorted(str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.cpp"))
    extension = CppExtension(
        EXTENSION,
        sources,
        include_dirs=[str(SOURCES / "core")],
        # No fused multiply-add: all processors must compute the same bits.
        extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0"],
        extra_link_args=["-Wl,-s"],
        optional=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {
            "build_ext": OptionalBuild.with_options(use_ninja=shutil.which("ninja") is not None)
        },
    }


setup(**options())
