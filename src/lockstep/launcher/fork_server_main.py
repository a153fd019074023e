"""The fork server: a process that imports torch once and forks the ranks of every launch.

    launcher                          fork server                     rank
       │ ── launch {} + socket ───────> │
       │ ══ on the launch's socket ════ │
       │ ── store {} + listening ─────> │ fork: serves the store of ranks on several hosts
       │ ── rank {...} + descriptors ─> │ fork ────────────────────────> │ runs; reports directly
       │ <─ started {rank, pid} ─────── │ (or failed {rank, reason})     │ to the launcher
       │ ── signal {rank, number} ────> │ to the rank's process group ─> │
       │ <─ ended {rank, status} ────── │ <──────────────────────── exit │
       │ ── folder {path} ────────────> │ removed after the ranks, if the launcher cannot
       │ ── end {} ───────────────────> │ SIGKILL to the remaining ranks
       │ ── end of file ──────────────> │ the same, because the launcher has exited

The server never computes and starts no thread, so it can fork safely. It watches the
launcher: by end of file on the sockets, and by a pidfd where the system has them, because
another child of the launcher may hold the sockets open. Before it serves, it looks whether the
launcher still runs each time that it imports a module. When the launcher is killed, the
server kills the ranks and exits. A retired server (the first socket is closed) exits after its last
launch. If the server itself is killed, the ranks' parent-death pipe breaks (`rank_process.py`), and
they are killed, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from lockstep.comm.native_module import load_native
from lockstep.launcher.channel import Channel, Message, open_channel
from lockstep.launcher.huge_pages import collapse_memory
from lockstep.launcher.rank_process import ForkedProcess, exit_process
from lockstep.launcher.signals import ignore_requests

__all__ = ["Server", "ignore_sigterm", "import_for_ranks", "main", "serve"]

GRACE = 2.0  # seconds from SIGTERM to SIGKILL for what remains of a rank's process group
MANY_FORKS = 16  # after which huge pages save more than they cost, if there is another launch

PR_SET_CHILD_SUBREAPER = 36  # of prctl, on Linux


@dataclass
class Launch:
    """The processes of one launch.

    Attributes:
        channel: The launcher's socket for this launch.
        ranks: The rank (-1: the store) of each process id.
        folders: Folders to remove after the ranks have been killed.
    """

    channel: Channel
    ranks: dict[int, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


class Server:
    """The fork server of one launcher, until the launcher exits.

    Args:
        channel: The launcher's socket.
        launcher: Its process id.
    """

    def __init__(self, channel: Channel, launcher: int) -> None:
        self._main = channel
        self._launches: dict[int, Launch] = {}
        self._leftover_groups: dict[int, float] = {}  # process groups, and when to kill them
        self._is_retired = False  # no new launches; running ones continue
        self._forks = 0
        self._has_huge_pages = False
        self._parent_death_pipe = os.pipe()
        self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        self._launcher: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._launcher = os.pidfd_open(launcher)
            self._selector.register(self._launcher, selectors.EVENT_READ)
        for end in self._wake:
            end.setblocking(False)
        _become_subreaper()
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        ignore_requests()

    def serve(self) -> ForkedProcess | None:
        """Serve until the launcher has exited.

        Returns:
            None in the server; in a forked process, what that process has to run.
        """
        while True:
            for key, _ in self._selector.select(self._timeout()):
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # an earlier event has closed it
                if key.fileobj == self._launcher:
                    self._shut_down()
                    return None
                elif key.fileobj is self._main:
                    self._is_retired |= not self._accept_launch()
                elif key.fileobj is self._wake[0]:
                    self._drain_wakeups()
                elif process := self._serve_launch(self._launches.get(key.fd)):
                    return process
            self._reap()
            self._kill_leftover_groups()
            if self._is_retired and not self._launches:
                self._shut_down()
                return None

    def _timeout(self) -> float | None:
        deadlines = self._leftover_groups.values()
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept_launch(self) -> bool:
        """Open a launch; return False if there will be no more of them."""
        received = self._main.receive()
        if received is None:
            self._selector.unregister(self._main)
            return False
        if received[0]["kind"] == "exit":
            for launch in list(self._launches.values()):
                self._drop_launch(launch)
            return False
        if self._forks >= MANY_FORKS and not self._has_huge_pages:
            self._has_huge_pages = True
            collapse_memory()
        channel = open_channel(received[1][0])
        self._launches[channel.fileno()] = Launch(channel)
        self._selector.register(channel, selectors.EVENT_READ)
        return True

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake[0].recv(4096):
                pass

    def _serve_launch(self, launch: Launch | None) -> ForkedProcess | None:
        if launch is None:
            return None
        received = launch.channel.receive()
        if received is None or received[0]["kind"] == "end":
            self._drop_launch(launch)
            return None
        message, descriptors = received
        if message["kind"] == "folder":
            launch.folders.append(message["path"])
            return None
        if message["kind"] == "signal":
            self._send_signal(launch, message)
            return None
        return self._fork(launch, message, descriptors)

    def _fork(
        self, launch: Launch, message: Message, descriptors: list[int]
    ) -> ForkedProcess | None:
        # Block SIGTERM until the child has replaced the inherited handler, which ignores it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of numpy's threads
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or no memory
                pid = -1
                reason = error.strerror
        if pid < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            failed = {"kind": "failed", "rank": message["rank"], "reason": reason}
            self._notify(launch, failed)  # first: a rank may fail for that reason
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        if pid == 0:
            parent_death_pipe = self._close_in_child()
            if message["kind"] == "rank":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return ForkedProcess(message, descriptors, parent_death_pipe)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._forks += 1
        with contextlib.suppress(OSError):  # the child does it too; either may come first
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        launch.ranks[pid] = message["rank"]
        self._notify(launch, {"kind": "started", "rank": message["rank"], "pid": pid})
        return None

    def _close_in_child(self) -> int:
        """Close what belongs to the server; return the parent-death pipe's reading end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._main.close()
        for launch in self._launches.values():
            launch.channel.close()
        for end in self._wake:
            end.close()
        if self._launcher is not None:
            os.close(self._launcher)
        reading, writing = self._parent_death_pipe
        os.close(writing)
        return reading

    def _send_signal(self, launch: Launch, message: Message) -> None:
        for pid, rank in launch.ranks.items():
            if rank == message["rank"]:
                send = os.killpg if message["group"] else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(pid, message["number"])

    def _reap(self) -> None:
        """Report every rank that has exited, and end what remains of its process group."""
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for launch in self._launches.values():
                if pid in launch.ranks:
                    self._end_group(pid, signal.SIGTERM)
                    status = os.waitstatus_to_exitcode(code)
                    message = {"kind": "ended", "rank": launch.ranks.pop(pid), "status": status}
                    self._notify(launch, message)

    def _end_group(self, group: int, number: int) -> None:
        # A group that still has members keeps its number after its leader has exited.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            self._leftover_groups[group] = time.monotonic() + GRACE

    def _kill_leftover_groups(self) -> None:
        now = time.monotonic()
        for group, deadline in list(self._leftover_groups.items()):
            try:
                os.killpg(group, signal.SIGKILL if deadline <= now else 0)
            except (ProcessLookupError, PermissionError):
                deadline = now
            if deadline <= now:
                del self._leftover_groups[group]

    def _notify(self, launch: Launch, message: Message) -> None:
        with contextlib.suppress(OSError):  # the launcher may have closed this launch
            launch.channel.send(message)

    def _drop_launch(self, launch: Launch) -> None:
        """Kill what remains of a launch."""
        self._selector.unregister(launch.channel)
        del self._launches[launch.channel.fileno()]
        launch.channel.close()
        for pid in launch.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for folder in launch.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _shut_down(self) -> None:
        signal.set_wakeup_fd(-1)
        for launch in list(self._launches.values()):
            self._drop_launch(launch)
        for group in self._leftover_groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _become_subreaper() -> None:
    """Become the parent of processes that ranks leave behind, to reap them at once (Linux).

    The init process of a container may reap them only after seconds, or never.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ignore_sigterm() -> None:
    """Ignore SIGTERM.

    Batch systems send SIGTERM to every process of a job. The ranks decide when they stop, and
    until then they need the fork server and the store.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(descriptor: int, launcher: int, modules: Sequence[str]) -> NoReturn:
    """Import what ranks need and serve; in a forked process, run that process to its end."""
    ignore_sigterm()
    ignore_requests()  # before the imports, which take a second
    gc.disable()  # during the imports, which create no garbage
    with _exiting_with(launcher):
        _exit_without_folder()
        try:
            import_for_ranks(modules)
        except FileNotFoundError:
            _exit_without_folder()
            raise
        with contextlib.suppress(ImportError):  # without one, each rank says why it uses Gloo
            load_native()
    gc.enable()
    gc.freeze()  # ranks neither traverse nor copy objects from before the fork
    serve(open_channel(descriptor), launcher)


def _exit_without_folder() -> None:
    """Exit if the working directory has been deleted, which the launcher then says.

    torch cannot be imported there: Intel MKL ends the process, and Python's paths are missing.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os._exit(1)


@contextlib.contextmanager
def _exiting_with(launcher: int) -> Iterator[None]:
    """Exit as soon as the body imports another module and the launcher has exited.

    On a busy machine the imports take many seconds, in which nothing is served.
    """

    def exit_if_alone(*_: object) -> None:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            os._exit(0)

    finder: Any = SimpleNamespace(find_spec=exit_if_alone)  # finds no module
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def import_for_ranks(modules: Sequence[str]) -> None:
    """Import modules, and do what every forked rank would do with memory that it has to copy.

    A rank that writes to a page of 4 KiB copies it, in 2 to 7 us; a rank that joins and trains
    one step copies thousands.
    """
    for name in modules:
        importlib.import_module(name)
    if "torch._dynamo" in modules:
        with contextlib.suppress(ImportError):  # no part of older versions of torch
            importlib.import_module("torch.profiler._cupti_monitor")  # by the first optimizer step
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._subclasses.schema_check_mode")  # by copies of the loss
        with contextlib.suppress(AttributeError):  # by init_process_group
            sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()


def serve(channel: Channel, launcher: int) -> NoReturn:
    """Serve, then exit; in a forked process, run that process to its end.

    Args:
        channel: The launcher's socket.
        launcher: Its process id.
    """
    # Ranks must not finalize objects of this process, such as a temporary folder, when they exit.
    # torch alone has hundreds of finalizers, which would copy pages for 50 ms in every rank.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    process = Server(channel, launcher).serve()
    if process is None:
        os._exit(0)  # destroying torch's modules takes a second
    # The frames on this stack are not the rank's and must not be unwound.
    exit_process(process.run())
