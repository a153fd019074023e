"""The process that ranks are forked from: torch imported once, for every launch.

    launcher                          template                        rank
       │ ── job {} + socket ──────────> │
       │ ══ on the job's socket ═══════ │
       │ ── store {} + listening ─────> │ fork: serves the ranks' TCPStore
       │ ── rank {...} + descriptors ─> │ fork ────────────────────────> │ runs, reports to the
       │ <─ started {rank, pid} ─────── │                                │ launcher by itself
       │ ── signal {rank, number} ────> │ to the rank's process group ─> │
       │ <─ ended {rank, status} ────── │ <──────────────────────── exit │
       │ ── end of file ──────────────> │ SIGKILL to what is left

It never computes and starts no thread, so that a fork is safe. It watches
the launcher (end of file on the first socket, and a pidfd where there are some,
for another child of the launcher may hold the socket open). When the launcher is
gone it kills every process group it started and ends; retired, with the first
socket closed, it ends after its last job. When the template itself
is killed, the ranks' life line (launcher/rank.py) breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lockstep.launcher.channel import Channel, Message, adopt
from lockstep.launcher.rank import Task, finish

__all__ = ["Template", "main", "serve_fork"]

# How long the rest of a rank's process group has after SIGTERM.
GRACE = 2.0

PR_SET_CHILD_SUBREAPER = 36  # of prctl, on Linux


@dataclass
class Job:
    """The processes of one launch: rank (or -1 for the store) by process id."""

    channel: Channel
    ranks: dict[int, int] = field(default_factory=dict)


class Template:
    """Serves one launcher until that is gone; `life` is the descriptor ranks hang on."""

    def __init__(self, channel: Channel, launcher: int) -> None:
        self._main = channel
        self._jobs: dict[int, Job] = {}
        self._leftover: dict[int, float] = {}  # process groups to kill, and when
        self._retired = False  # no more jobs will come; those that run go on
        self._life = os.pipe()
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
        _adopt_orphans()
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> Task | None:
        """Serve until the launcher is gone, then return None; in a forked rank, its task."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj == self._launcher:
                    self._end()
                    return None
                if key.fileobj is self._main:
                    self._retired = not self._accept()
                elif key.fileobj is self._wake[0]:
                    self._drain()
                elif task := self._serve_job(self._jobs.get(key.fd)):
                    return task
            self._reap()
            self._kill_leftover()
            if self._retired and not (self._jobs and self._launcher is not None):
                self._end()
                return None

    def _patience(self) -> float | None:
        if not self._leftover:
            return None
        return max(0.0, min(self._leftover.values()) - time.monotonic())

    def _accept(self) -> bool:
        received = self._main.receive()
        if received is None:
            self._selector.unregister(self._main)
            return False
        channel = adopt(received[1][0])
        self._jobs[channel.fileno()] = Job(channel)
        self._selector.register(channel, selectors.EVENT_READ)
        return True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake[0].recv(4096):
                pass

    def _serve_job(self, job: Job | None) -> Task | None:
        if job is None:
            return None
        received = job.channel.receive()
        if received is None:
            self._drop(job)
            return None
        message, descriptors = received
        if message["kind"] == "signal":
            self._signal(job, message)
            return None
        return self._fork(job, message, descriptors)

    def _fork(self, job: Job, message: Message, descriptors: list[int]) -> Task | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads may be forked
            pid = os.fork()
        if pid == 0:
            return Task(message, descriptors, self._become_rank())
        with contextlib.suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        job.ranks[pid] = message["rank"]
        self._tell(job, {"kind": "started", "rank": message["rank"], "pid": pid})
        return None

    def _become_rank(self) -> int:
        """Close what belongs to the template; return the reading end of the life line."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._main.close()
        for job in self._jobs.values():
            job.channel.close()
        for end in self._wake:
            end.close()
        if self._launcher is not None:
            os.close(self._launcher)
        os.close(self._life[1])
        return self._life[0]

    def _signal(self, job: Job, message: Message) -> None:
        for pid, rank in job.ranks.items():
            if rank == message["rank"]:
                send = os.killpg if message["group"] else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(pid, message["number"])

    def _reap(self) -> None:
        """Report every rank that ended; what it left in its process group is ended too."""
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in self._jobs.values():
                if pid in job.ranks:
                    self._end_group(pid, signal.SIGTERM)
                    status = os.waitstatus_to_exitcode(code)
                    news = {"kind": "ended", "rank": job.ranks.pop(pid), "status": status}
                    self._tell(job, news)

    def _end_group(self, group: int, number: int) -> None:
        # A group that has members left keeps its number after its leader's end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            self._leftover[group] = time.monotonic() + GRACE

    def _kill_leftover(self) -> None:
        now = time.monotonic()
        for group, deadline in list(self._leftover.items()):
            try:
                os.killpg(group, signal.SIGKILL if deadline <= now else 0)
            except (ProcessLookupError, PermissionError):
                deadline = now
            if deadline <= now:
                del self._leftover[group]

    def _tell(self, job: Job, message: Message) -> None:
        with contextlib.suppress(OSError):  # a launch that is no longer interested
            job.channel.send(message)

    def _drop(self, job: Job) -> None:
        self._selector.unregister(job.channel)
        del self._jobs[job.channel.fileno()]
        job.channel.close()
        for pid in job.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _end(self) -> None:
        signal.set_wakeup_fd(-1)
        for job in list(self._jobs.values()):
            self._drop(job)
        for group in self._leftover:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _adopt_orphans() -> None:
    """Become the parent of what ranks leave behind, to wait for it at once (Linux).

    The first process of a container may take seconds over that, or never do it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(descriptor: int, launcher: int, modules: Sequence[str]) -> None:
    """Import what ranks need, serve, and in a forked rank run its task to the end."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # ranks neither search nor copy what was here before them
    task = Template(adopt(descriptor), launcher).serve()
    if task is not None:
        finish(task.run())


def serve_fork(channel: Channel, launcher: int) -> NoReturn:
    """Serve in a fork of the launcher, and run the ranks' tasks; neither ever returns."""
    os.setsid()
    task = Template(channel, launcher).serve()
    if task is None:
        os._exit(0)
    # The launcher's frames are below this one and must not be unwound in its copy.
    finish(task.run())
