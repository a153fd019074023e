"""What kind of failure an exception is, as a rank decides it and reports it to its launcher.

    ""                any other exception
    "lost"            another rank is gone: a consequence of its end
    "stopped"         another rank has failed, and has told this one
    "rendezvous"      the ranks did not connect to each other
    "communication"   a call of the backend failed for another reason, such as a timeout
    "layout"          the program, or this machine, does not allow the layout

The type of an exception decides. Only exceptions of other libraries are judged by their words
(`lockstep.foreign_messages`).
"""

from __future__ import annotations

from typing import Literal

from lockstep.foreign_messages import says_lost_peer
from lockstep.kernel.errors import (
    CommunicationError,
    LayoutError,
    LostError,
    RendezvousError,
    StoppedError,
)

__all__ = ["CONSEQUENCES", "OF_BACKEND", "STOPPED", "FailureCode", "find_code", "is_lost_peer"]

STOPPED = 75
"""The exit status of a rank that stopped on request and can be resumed (EX_TEMPFAIL)."""

FailureCode = Literal["", "lost", "stopped", "rendezvous", "communication", "layout"]

CONSEQUENCES = ("lost", "stopped")
"""The codes of failures that another rank's end has caused, if there is one."""

OF_BACKEND = ("lost", "communication")
"""The codes of failures of a call of the backend."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error`, or what it was raised from, says that another rank is gone."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, LostError) or says_lost_peer(current):
            return True
        current = current.__cause__
    return False


def find_code(error: BaseException) -> FailureCode:
    """Return the code of an exception."""
    if is_lost_peer(error):
        return "lost"
    if isinstance(error, StoppedError):
        return "stopped"
    if isinstance(error, RendezvousError):
        return "rendezvous"
    if isinstance(error, LayoutError):
        return "layout"
    return "communication" if isinstance(error, CommunicationError) else ""
