"""Stacks of ranks, as Python's fault handler writes them on a signal, and their locations.

    Current thread 0x00007f (most recent call first):
      File ".../torch/distributed/distributed_c10d.py", line 3168 in all_reduce
      File "/home/ann/train.py", line 31 in main          -> "in all_reduce, train.py:31"

A location names the innermost line of user code, and the function that it called.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Callable, Mapping

from lockstep.user_code import INSTALLED, is_user_code, shorten_path

__all__ = [
    "STACK_SIGNAL",
    "describe_location",
    "is_receiving",
    "is_waiting",
    "may_wait",
    "parse_frames",
    "read_stacks",
]

# A real-time signal, which programs and schedulers do not use.
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

TIMEOUT = 1.0  # seconds that ranks have to write their stacks
# Seconds that a rank has which could run but got no processor: machines share theirs with others.
STARVED_TIMEOUT = 15.0
POLL = 0.005  # seconds between two checks of what they have written
MAX_STACK = 1 << 16  # bytes that are read of a stack

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
LAUNCHER = os.path.dirname(os.path.abspath(__file__))
# Files in which a rank waits for others: in a collective or in the rendezvous check.
WAITING = ("torch/distributed/", os.path.join(LAUNCHER, "rendezvous_check"))
# Places where a rank either waits for others or computes: DistributedDataParallel waits in
# backward, and `work.wait()` is a C++ function without a frame.
MAY_WAIT = ("torch/autograd/",)
WAIT_CALL = ".wait("


def read_stacks(files: Mapping[int, int], is_starved: Callable[[int], bool]) -> dict[int, str]:
    """Return what ranks write into files within a second after the signal; "" for no answer.

    Args:
        files: The descriptor of each rank's file, which is empty.
        is_starved: Whether a rank could run, but has had no processor since the signal. Such a
            rank has 15 seconds.
    """
    began = time.monotonic()
    sizes: dict[int, int] = {}
    while (waited := time.monotonic() - began) < STARVED_TIMEOUT:
        before = sizes
        sizes = {rank: os.fstat(file).st_size for rank, file in files.items()}
        silent = [rank for rank, size in sizes.items() if size == 0]
        if sizes == before and not silent:
            break  # all have answered, and none is still writing
        if waited >= TIMEOUT and not any(is_starved(rank) for rank in silent):
            break
        time.sleep(POLL)
    return {
        rank: os.pread(file, MAX_STACK, 0).decode(errors="replace") for rank, file in files.items()
    }


def describe_location(dump: str) -> str:
    """Return the location of the last stack of `dump`, such as "in all_reduce, train.py:31"."""
    called = ""
    frames = _all_frames(dump)
    for file, line, function in frames:
        if is_user_code(file):
            location = f"{os.path.basename(file)}:{line}"
            return f"in {called}, {location}" if called else f"at {location}"
        if "wrapper" not in function:
            called = function
    return f"in {frames[0][2]}, {shorten_path(frames[0][0])}:{frames[0][1]}" if frames else ""


def is_waiting(dump: str) -> bool:
    """Return whether the last stack of `dump` is in torch.distributed or the rendezvous check."""
    return any(part in file for file, _, _ in _all_frames(dump)[:6] for part in WAITING)


def is_receiving(dump: str) -> bool:
    """Return whether the last stack of `dump` is in torch's `recv` or `recv_object_list`."""
    return any(
        WAITING[0] in file and function.startswith("recv")
        for file, _, function in _all_frames(dump)[:6]
    )


def may_wait(dump: str) -> bool:
    """Return whether the last stack of `dump` is where a rank waits for others or computes."""
    for file, line, _ in _all_frames(dump)[:1]:
        is_in_backward = any(part in file for part in MAY_WAIT)
        return is_in_backward or WAIT_CALL in linecache.getline(file, int(line))
    return False


def _all_frames(dump: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of each frame of the last stack, the innermost first."""
    lines = dump.rpartition("(most recent call first)")[2].splitlines()
    return [(match[1], match[2], match[3]) for line in lines if (match := FRAME.match(line))]


def parse_frames(dump: str) -> list[tuple[str, str, str]]:
    """Return the frames of the last stack, without the launcher's that called the program."""
    frames = _all_frames(dump)
    while frames and not is_user_code(frames[-1][0]):
        if any(part in frames[-1][0] for part in INSTALLED):
            break
        frames.pop()
    return frames
