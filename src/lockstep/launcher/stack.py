"""Where a rank is at this moment: read from outside, also while it waits deep in C.

Every rank gives its launcher an anonymous file and lets Python's fault handler
write its main thread's stack there on a signal. Nothing runs in the rank until
somebody asks; a stopped process does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig

__all__ = ["SIGNAL", "answer", "is_own", "waiting", "where"]

# One of the real-time signals, which programs and schedulers leave alone.
SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
OURS = os.path.dirname(os.path.abspath(__file__))
PACKAGES = (sysconfig.get_path("stdlib"), "<frozen", "<string>", OURS)
INSTALLED = ("/site-packages/", "/dist-packages/")  # of whichever environment


def is_own(file: str) -> bool:
    """Tell whether a file is the user's: not of Python, not installed, not the launcher."""
    return not file.startswith(PACKAGES) and not any(part in file for part in INSTALLED)


def answer(descriptor: int) -> None:
    """From now on write this process's stack to `descriptor` when asked."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(SIGNAL, descriptor, all_threads=False)


def where(dump: str) -> str:
    """Say in words where the last stack of `dump` is: "in all_reduce, train.py:31"."""
    frames = []
    for line in dump.rpartition("(most recent call first)")[2].splitlines():
        if match := FRAME.match(line):
            frames.append((match[1], match[2], match[3]))
    if not frames:
        return ""
    called = ""
    for file, line, function in frames:
        if is_own(file):
            place = f"{os.path.basename(file)}:{line}"
            return f"in {called}, {place}" if called else f"at {place}"
        if "wrapper" not in function:
            called = function
    return ""


def waiting(dump: str) -> bool:
    """Whether that stack is in a call of torch.distributed or of the roll call."""
    frames = dump.rpartition("(most recent call first)")[2].splitlines()
    inside = ("torch/distributed/", os.path.join(OURS, "rollcall"))
    return any(part in line for line in frames[:6] for part in inside)
