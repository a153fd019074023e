"""The template process: pytest whose main loop is a fork server.

It is configured like the process that runs the tests, and collects the files with tests on ranks.
It never runs a test or a thread. Each rank of a test is a fork of it, in which the test is already
collected and its module imported.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import pickle
import sys
import threading
from collections.abc import Iterable
from typing import NoReturn

import pytest
from _pytest._io import TerminalWriter

from lockstep.comm import backend as comm
from lockstep.launcher.channel import Channel, open_channel, read_memfd
from lockstep.launcher.fork_server_main import ignore_sigterm, serve
from lockstep.launcher.signals import ignore_requests

__all__ = ["main"]

PRELOADED = (
    "torch.distributed",
    "lockstep.launcher.pickling",
    "lockstep.launcher.rendezvous",
    "lockstep.comm.native.binding",
    "pytest_lockstep.case",
    "pytest_lockstep.rank",
)
# Imported by the first step of any optimizer and by any TorchDispatchMode: 1.4 s.
PRELOADED_FOR_TRAINING = ("torch._dynamo",)
OPTIONAL = ("coverage",)


def main(descriptor: int, launcher: int) -> NoReturn:
    """Run the template process for the process with the id `launcher`."""
    ignore_sigterm()
    ignore_requests()
    channel = open_channel(descriptor)
    received = channel.receive()
    if received is None:
        os._exit(0)
    order, log = received[1]
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    options, arguments, sys.argv[:], trains = pickle.loads(read_memfd(order))
    gc.disable()  # until everything is imported: imports leave no garbage
    from pytest_lockstep import plugin, rank  # imports torch

    _import((*PRELOADED, *(PRELOADED_FOR_TRAINING if trains else ())))
    config = pytest.Config.fromdictargs(options, arguments)
    config.stash[plugin.IS_TEMPLATE] = True
    # Up to pytest 8, a failing comparison needs a terminal writer, which no plugin provides here.
    writer = TerminalWriter(io.StringIO())
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
    config.pluginmanager.register(Server(config, channel, launcher), "lockstep-template")
    config.pluginmanager.register(rank.RankRunner(), "lockstep-rank")
    config.hook.pytest_cmdline_main(config=config)
    os._exit(1)  # only after an error, which pytest has printed


def _import(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)


class Server:
    """Replaces pytest's main loop.

    Args:
        config: pytest's configuration.
        channel: The socket of the process that runs the tests.
        launcher: Its process id.
    """

    def __init__(self, config: pytest.Config, channel: Channel, launcher: int) -> None:
        self._config = config
        self._channel = channel
        self._launcher = launcher
        self._errors: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect the files that the other process names."""
        received = self._channel.receive()
        if received is None:
            os._exit(0)
        order = json.loads(read_memfd(received[1][0]))
        _import(PRELOADED_FOR_TRAINING if order["trains"] else ())
        factory = getattr(self._config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()  # only here, not in each rank: it empties the folder
        for name in ("timeout", "cacheprovider"):
            self._config.pluginmanager.unregister(name=name)
        session.perform_collect(order["files"])
        if len(threading.enumerate()) > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            self._errors[""] = (
                f"importing the test files starts threads ({names}), so their process cannot be "
                f"forked for ranks: start threads in a test or fixture"
            )
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep all tests, before other plugins deselect some."""
        from pytest_lockstep import rank

        rank.keep_items(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note the files that cannot be imported."""
        if report.failed:
            self._errors[report.nodeid] = (
                f"the ranks' template process could not import {report.nodeid}, unlike pytest's "
                f"own process:\n{report.longreprtext}"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        """Fork ranks until the other process closes the channel."""
        for name in OPTIONAL:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
        comm.available()  # loads the backend once, instead of in every rank
        gc.collect()
        gc.enable()
        gc.freeze()  # ranks neither traverse nor copy objects from before the fork
        self._channel.send({"kind": "ready", "errors": self._errors})
        serve(self._channel, self._launcher)
