"""The messages of other libraries from which Lockstep takes a decision; there is no other place.

Gloo, NCCL and torch's store have one class of exception for all of their failures, so that only the
words of a message tell a lost rank from a timeout. Each entry names the library and the versions in
which the message was seen; `tests/test_foreign_messages.py` provokes it where that is possible
without an accelerator. A version with other words makes that test fail.

Lockstep's own errors have types (`lockstep.errors`).

The messages of torch 2.13 and of compilers, below, only lead to a better sentence or to another
attempt; the tests of the modules that use them provoke them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "BATCH_NORM_OF_ONE",
    "COMPILER_ERRORS",
    "CONNECTION_ENDS",
    "DEVICE_ASSERTION",
    "FULL_MEMORY",
    "GLOO_TIMEOUTS",
    "LOADER_TERMINATED",
    "LOADER_TIMEOUT",
    "LOST_PEERS",
    "META_DEVICE",
    "NOT_DETERMINISTIC",
    "OVERWRITTEN",
    "RECOMPILE_LIMIT",
    "REFUSED_CLASS",
    "ForeignMessage",
    "is_gloo_timeout",
    "is_of_gloo_connection",
    "says_lost_connection",
    "says_lost_peer",
]


@dataclass(frozen=True)
class ForeignMessage:
    """A part of a message of another library.

    Attributes:
        words: The part, in lower case.
        library: The library: "gloo", "nccl" or "store" (torch's TCPStore).
        seen: The versions in which it was seen.
        when: What provokes it.
    """

    words: str
    library: str
    seen: str
    when: str

    def is_in(self, message: str) -> bool:
        """Return whether a message has this part."""
        return self.words in message.lower()


CONNECTION_ENDS = (
    ForeignMessage("connection closed by peer", "gloo", "torch 2.13", "its process ended"),
    ForeignMessage("connection reset by peer", "gloo", "torch 2.13", "it had unread data"),
    ForeignMessage(
        "caused pair closure",
        "gloo",
        "torch 2.13",
        "a call in this process has timed out, which closes all connections",
    ),
)
"""What Gloo says of a connection that was there."""

LOST_PEERS = (
    *CONNECTION_ENDS,
    ForeignMessage("read error [", "gloo", "torch 2.13", "the system's reason follows"),
    ForeignMessage("writev [", "gloo", "torch 2.13, in its code", "not reproduced"),
    ForeignMessage("socket closed", "gloo", "torch 2.13, in its code", "not reproduced"),
    ForeignMessage(
        "timed out connecting",
        "gloo",
        "torch 2.13",
        "the process has ended that published the address; ends with 'Connection refused'",
    ),
    ForeignMessage(
        "remote process exited or there was a network error",
        "nccl",
        "NCCL 2.20 to 2.27, in reports of users",
        "needs two accelerators",
    ),
    ForeignMessage("failed to recv, got 0 bytes", "store", "torch 2.13", "while it answers"),
    ForeignMessage("broken pipe", "store", "torch 2.13", "a later request"),
    ForeignMessage("connection reset by peer", "store", "torch 2.13", "a later request"),
)
"""What says that a process at the other end of a connection is gone."""

GLOO_TIMEOUTS = (
    ForeignMessage("timed out waiting", "gloo", "torch 2.13", "a call that waits too long"),
    ForeignMessage("operation timed out", "gloo", "torch 2.13, in its code", "not reproduced"),
)
"""What Gloo says of a call that was not finished in time."""

BATCH_NORM_OF_ONE = "more than 1 value per channel"
"""In torch's ValueError about batch norm in training with one value per channel."""

OVERWRITTEN = "modified by an inplace operation"
"""In torch's RuntimeError about a tensor that backward needs."""

META_DEVICE = re.compile(r"\bmeta\b", re.IGNORECASE)
"""In torch's errors about an operator that gets a tensor on the meta device, among others."""

NOT_DETERMINISTIC = re.compile(
    r"(\S+)(?: with \S+.*?)? does not have a deterministic implementation"
)
"""In torch's RuntimeError about an operator, whose name it begins with."""

DEVICE_ASSERTION = "device-side assert"
"""In CUDA's error about an assertion of a kernel, such as an index out of range."""

LOADER_TIMEOUT = "timed out"
"""In torch's RuntimeError about a DataLoader whose workers have returned nothing in time."""

LOADER_TERMINATED = "signal: Terminated"
"""In torch's RuntimeError about a worker of a DataLoader that SIGTERM has ended."""

FULL_MEMORY = "No space left on device"
"""In torch's RuntimeError about a file in /dev/shm that it cannot write, and in an OSError."""

RECOMPILE_LIMIT = "Dynamo recompile limit exceeded"
"""The beginning of torch's reason for running a function without compilation."""

REFUSED_CLASS = re.compile(r"(?:GLOBAL|[Uu]nsupported class) ([\w.]+)")
"""In the UnpicklingError of torch.load(weights_only=True), the class that it does not load."""

COMPILER_ERRORS = ("error: ", "cannot find")
"""In the line of g++ 12, clang 14 or ld 2.40 that says what failed, with LC_ALL=C."""

# A part of the messages of Gloo's connections, with the path of the source file; the other messages
# of Gloo are about the arguments of a call.
GLOO_CONNECTION = ("gloo/transport", "pair closure")


def says_lost_peer(error: BaseException) -> bool:
    """Return whether an exception of another library says that another process is gone."""
    return _is_listed(str(error), _find_library(error))


def says_lost_connection(message: str) -> bool:
    """Return whether a message of Gloo says that another process is gone."""
    return _is_listed(message, "gloo")


def is_gloo_timeout(message: str) -> bool:
    """Return whether a message of Gloo says that a call was not finished in time."""
    return any(entry.is_in(message) for entry in GLOO_TIMEOUTS)


def is_of_gloo_connection(message: str) -> bool:
    """Return whether a message of Gloo is about a connection, and not about arguments."""
    return any(words in message for words in GLOO_CONNECTION)


def _is_listed(message: str, library: str) -> bool:
    return any(entry.library == library and entry.is_in(message) for entry in LOST_PEERS)


def _find_library(error: BaseException) -> str:
    """Return the library whose exception this is; "" for all others.

    Without an import of torch, which the launcher does without.
    """
    kind = type(error)
    if kind is RuntimeError and ("gloo" in str(error).lower() or "pair closure" in str(error)):
        return "gloo"
    if kind.__module__ != "torch.distributed":
        return ""
    return {"DistBackendError": "nccl", "DistNetworkError": "store"}.get(kind.__name__, "")
