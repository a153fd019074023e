"""The hang monitor: finds ranks that are stopped, or that never join the others.

The launcher cannot see that a rank waits, so it asks: every rank gives its launcher an
anonymous file, and Python's fault handler writes the stack of the rank's main thread there
on a signal. That works while the rank waits deep in C code, and runs nothing in the rank
unless the launcher asks; only a stopped process does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.launcher.failure_attribution import Outcome, format_ranks
from lockstep.messages import say

__all__ = [
    "STACK_SIGNAL",
    "HangMonitor",
    "describe_location",
    "dump_stack_on_signal",
    "is_user_code",
    "is_waiting",
]

# A real-time signal, which programs and schedulers do not use.
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
FIRST_CHECK = 5.0  # seconds to the first check; each later interval is twice as long

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
LAUNCHER = os.path.dirname(os.path.abspath(__file__))
NOT_USER_CODE = (sysconfig.get_path("stdlib"), "<frozen", "<string>", LAUNCHER)
INSTALLED = ("/site-packages/", "/dist-packages/")  # of any environment
# Where a rank is that waits for others: in a collective or in the rendezvous check.
WAITING = ("torch/distributed/", os.path.join(LAUNCHER, "rendezvous_check"))


class Ranks(Protocol):
    """What the monitor needs to know of a launch's ranks."""

    @property
    def outcomes(self) -> Mapping[int, Outcome]:
        """How each rank ended, or that it runs."""

    @property
    def pids(self) -> Mapping[int, int]:
        """The ranks' process ids."""

    @property
    def running(self) -> Sequence[int]:
        """The ranks that have not exited."""

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped a rank."""

    def dump_stack(self, rank: int) -> str:
        """Return the stack of a rank's main thread; empty if it does not answer."""


class HangMonitor:
    """Reports each stopped or missing rank of a launch once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._interval = FIRST_CHECK
        self._next_check = time.monotonic() + FIRST_CHECK
        self._reported: set[int] = set()

    def check(self) -> None:
        """Print what there is to report, if a check is due; may be called at any time."""
        if time.monotonic() < self._next_check:
            return
        for rank in self._ranks.running:
            if rank not in self._reported and self._ranks.is_stopped(rank):
                self._reported.add(rank)
                pid = self._ranks.pids[rank]
                say(f"rank {rank} (process {pid}) is stopped; continue it with kill -CONT {pid}")
        if self._check_returned():
            self._interval *= 2
        self._next_check = time.monotonic() + self._interval

    def _check_returned(self) -> bool:
        """Ask where the other ranks are if a rank has returned; return whether it asked."""
        outcomes = self._ranks.outcomes.values()
        returned = [o.rank for o in outcomes if o.has_returned and o.rank not in self._reported]
        if not returned:
            return False
        waiting = []
        for rank in self._ranks.running:
            dump = self._ranks.dump_stack(rank)
            if is_waiting(dump):
                waiting.append(f"rank {rank} waits {describe_location(dump)}".strip())
        if waiting:
            self._reported.update(returned)
            say(f"{format_ranks(returned)} returned, while {'; '.join(waiting)}")
        return True


def dump_stack_on_signal(descriptor: int) -> None:
    """Make this process write its stack to `descriptor` when it receives STACK_SIGNAL."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(STACK_SIGNAL, descriptor, all_threads=False)


def is_user_code(file: str) -> bool:
    """Return whether a file belongs to the user: not Python's, not installed, not ours."""
    return not file.startswith(NOT_USER_CODE) and not any(part in file for part in INSTALLED)


def describe_location(dump: str) -> str:
    """Return where the last stack of `dump` is, such as "in all_reduce, train.py:31"."""
    frames = []
    for line in dump.rpartition("(most recent call first)")[2].splitlines():
        if match := FRAME.match(line):
            frames.append((match[1], match[2], match[3]))
    called = ""
    for file, line, function in frames:
        if is_user_code(file):
            location = f"{os.path.basename(file)}:{line}"
            return f"in {called}, {location}" if called else f"at {location}"
        if "wrapper" not in function:
            called = function
    return ""


def is_waiting(dump: str) -> bool:
    """Return whether that stack is in a call of torch.distributed or the rendezvous check."""
    frames = dump.rpartition("(most recent call first)")[2].splitlines()
    return any(part in line for line in frames[:6] for part in WAITING)
