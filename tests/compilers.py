"""A compiler for tests: it records its calls, and creates what a real one would create.

The objects are empty; the module is a copy of one that works. It fails at a call that contains
the word in FAIL, and waits forever, after it has created FILE.started, at one with that in BLOCK.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.comm.native import binding, binding_folder

PROGRAM = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *"${FAIL:-/no/call}"*) echo "x.cpp:3:7: error: no room for $FAIL" >&2; exit 1;; esac
case "$*" in *"${BLOCK:-/no/call}"*)
  echo $$ > "$CALLS.new"; mv "$CALLS.new" "$CALLS.started"; read line < "$CALLS.fifo";;
esac
made=object
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2;; -shared) made=module;; esac
  shift
done
if [ $made = module ]; then cp "$MODULE" "$out"; else echo $made > "$out"; fi
"""


@dataclass
class Recorder:
    """The compiler of a test.

    Attributes:
        log: The file of its calls.
    """

    log: Path

    def calls(self) -> list[str]:
        """Return the arguments of its calls so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def parts(self) -> list[str]:
        """Return what was compiled and linked, sorted: "core", "binding", "link"."""
        return sorted({_part(call) for call in self.calls()})

    @property
    def started(self) -> Path:
        """The file that a waiting call creates; it contains the process id."""
        return self.log.with_name(self.log.name + ".started")


def _part(call: str) -> str:
    if "-shared" in call:
        return "link"
    return "core" if "/csrc/core/" in call.rpartition(" -c ")[2] else "binding"


def install_recorder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Path | None
) -> Recorder:
    """Let CXX be the recorder, and keep bindings in `folder` only.

    Args:
        folder: An empty folder; the cache is FOLDER/cache/lockstep/bindings.
        monkeypatch: Restores everything at the end of the test.
        module: The module that linking creates; None for a file that is none.
    """
    program = folder / "recorder"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    if module is None:
        module = folder / "no_module"
        module.write_text("no module")
    recorder = Recorder(folder / "calls")
    os.mkfifo(f"{recorder.log}.fifo")
    variables = {"CXX": program, "CALLS": recorder.log, "MODULE": module}
    for name, value in {**variables, "XDG_CACHE_HOME": folder / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    package = folder / "package"
    package.mkdir()
    for imported in (binding, binding_folder):
        monkeypatch.setattr(imported, "PACKAGE_FOLDER", package)
    return recorder
