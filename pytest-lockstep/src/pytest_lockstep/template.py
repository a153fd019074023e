"""The interface of the template process in the process that runs pytest.

    pytest                               template (`template_main`)
       │ ── options, arguments, log ───────> │ configures pytest in the same way
       │    (collects)                       │ imports conftest.py files and plugins
       │ ── files with tests on ranks ─────> │ collects them: imports them rewritten
       │ <─ errors of the collection ─────── │
       │ ══ launches of a fork server ══════ │ forks the ranks of every test

It starts as soon as a file that mentions the marker is about to be collected. It imports torch
while pytest's own process does so, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from lockstep.launcher.channel import Channel, write_memfd
from lockstep.launcher.fork_server import ForkServer, spawn_fork_server

__all__ = ["Template", "TemplateError"]

START_TIMEOUT = 120.0  # seconds to wait for the template to import the test files
LOG_LINES = 20
SEE_FIRST = "the ranks have no template process: see the first test that failed for this reason"

# A process whose libraries have started threads cannot be forked.
ONE_THREAD = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    )
}

# Options that must not act twice: those that write files, show output, or select or repeat tests.
OPTIONS: dict[str, Any] = {
    "capture": "no",
    "xmlpath": None,
    "log_file": os.devnull,
    "usepdb": False,
    "trace": False,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "cacheclear": False,
    "stepwise": False,
    "collectonly": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "dist": "no",
    "numprocesses": None,
    "tx": [],
    "looponfail": False,
    "cov_source": [],
    "timeout": 0,
}


class TemplateError(Exception):
    """The template process cannot run a test; the message says why and what to do."""


class Template:
    """A running template process.

    Args:
        config: The configuration of pytest's own process.
        trains: Whether a test is known to use optimizers, whose first step imports torch's
            compiler.
    """

    def __init__(self, config: pytest.Config, *, trains: bool) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._errors: dict[str, str] | None = None
        self._server: ForkServer = spawn_fork_server(
            f"pytest_lockstep.template_main.main({{}}, {os.getpid()})",
            path=[os.fspath(place) for place in sys.path],
            environ={**os.environ, **ONE_THREAD},
        )
        order = write_memfd(pickle.dumps((_options(config), _arguments(config), sys.argv, trains)))
        self._server.channel.send({"kind": "configure"}, [order, self._log.fileno()])
        os.close(order)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._server.pid

    def collect(self, files: Sequence[Path], *, trains: bool) -> None:
        """Make the process collect all files with tests on ranks, and import what they need."""
        wanted = {"files": [os.fspath(file) for file in files], "trains": trains}
        order = write_memfd(json.dumps(wanted).encode())
        with contextlib.suppress(OSError):  # it has exited; `open_launch` says why
            self._server.channel.send({"kind": "collect"}, [order])
        os.close(order)

    def open_launch(self, nodeid: str) -> Channel:
        """Return the socket on which the ranks of a test are started.

        Raises:
            TemplateError: The process has failed, or could not import the test's file.
        """
        if self._errors is None:
            self._errors = self._receive_errors()
        for place in ("", nodeid.partition("::")[0]):
            if place in self._errors:
                error = self._errors[place]
                self._errors[place] = SEE_FIRST
                raise TemplateError(error)
        if self._server.has_exited():
            self._errors[""] = SEE_FIRST
            raise TemplateError(f"the template process of the ranks has exited{self._read_log()}")
        return self._server.open_launch()

    def close(self) -> None:
        """End the process and the processes that it started."""
        self._server.close()
        self._log.close()

    def _receive_errors(self) -> dict[str, str]:
        """Wait until the files are imported; return the errors by path relative to the root."""
        deadline = time.monotonic() + START_TIMEOUT
        readable, _, _ = select.select([self._server.channel], [], [], START_TIMEOUT)
        received = self._server.channel.receive() if readable else None
        if received is None:
            late = time.monotonic() >= deadline
            how = f"did not import the test files in {START_TIMEOUT:g} s" if late else "failed"
            return {"": f"the template process of the ranks {how}{self._read_log()}"}
        errors: dict[str, str] = received[0]["errors"]
        return errors

    def _read_log(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(["; it printed:", *lines[-LOG_LINES:]]) if lines else ""


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the options that can be pickled, changed where the template's options must differ."""
    options = {}
    for name, value in vars(config.option).items():
        try:
            options[name] = pickle.loads(pickle.dumps(value))
        except Exception:  # an option of any plugin may raise any exception
            continue
    options.update({name: value for name, value in OPTIONS.items() if name in options})
    options["rootdir"] = os.fspath(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = os.fspath(config.inipath)
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None:
        options["basetemp"] = os.fspath(factory.getbasetemp() / "ranks")
    return options


def _arguments(config: pytest.Config) -> list[str]:
    return ["-p", "no:terminal", *map(str, config.args)]
