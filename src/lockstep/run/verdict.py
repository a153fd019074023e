"""How a launch ended: which rank failed first, in one sentence. Pure.

A rank that dies takes others with it: their connections to it break, and they
raise. What broke first is told apart from what broke in consequence, so that
the sentence names the cause even where a consequence was reported earlier.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RankError

__all__ = ["Outcome", "consequence", "first_failure", "rank_error"]

# What torch's backends say when the other side of a connection is gone.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "failed to recv, got 0 bytes",
    "nccl remote error",
    "socket closed",
)


@dataclass
class Outcome:
    """How one rank ended; times are `time.monotonic()` seconds.

    `status` is its exit status, negative for a signal, None while it runs.
    `error` is its report of an exception. `ended_by_us` means that the launcher
    signalled it first.
    """

    rank: int
    status: int | None = None
    when: float = 0.0
    error: dict[str, Any] | None = None
    returned: bool = False
    ended_by_us: bool = False

    @property
    def left(self) -> bool:
        """Whether this rank ended well, of itself."""
        return self.returned or (self.status == 0 and not self.ended_by_us)

    @property
    def failed(self) -> bool:
        """Whether this rank failed of itself."""
        if self.error is not None:
            return True
        return self.status not in (None, 0) and not self.ended_by_us


def consequence(outcome: Outcome) -> bool:
    """Whether this failure looks like the echo of another rank's end."""
    if outcome.error is None:
        return False
    message = str(outcome.error["message"]).lower()
    return any(phrase in message for phrase in LOST_PEER)


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the failure that came first, causes before consequences."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    if not failures:
        return None
    return min(failures, key=lambda outcome: (consequence(outcome), _moment(outcome)))


def _moment(outcome: Outcome) -> float:
    return outcome.when if outcome.error is None else float(outcome.error["time"])


def rank_error(outcomes: Sequence[Outcome]) -> RankError | None:
    """Return the error to raise for a launch; a traceback goes along as its note."""
    failure = first_failure(outcomes)
    if failure is None:
        return None
    error = RankError(f"{_left_early(outcomes, failure)}rank {failure.rank} {ending(failure)}")
    if failure.error is not None and not failure.error["plain"]:
        error.add_note(f"\nrank {failure.rank}:\n{failure.error['traceback'].rstrip()}")
    return error


def _left_early(outcomes: Sequence[Outcome], failure: Outcome) -> str:
    """Name the ranks that had ended well where another lost its connection to them."""
    gone = [outcome for outcome in outcomes if outcome.left]
    if not gone or not consequence(failure):
        return ""
    names = ", ".join(str(outcome.rank) for outcome in gone)
    return f"rank {names} returned while others still waited in a collective: "


def ending(outcome: Outcome) -> str:
    """Say how a rank ended, as the end of a sentence about it."""
    if outcome.error is not None and outcome.error["plain"]:
        return f"failed: {outcome.error['message']}"
    if outcome.error is not None:
        first_line = str(outcome.error["message"]).strip().partition("\n")[0]
        return f"raised {outcome.error['type']}" + (f": {first_line}" if first_line else "")
    if outcome.status is None:
        return "is still running"
    if outcome.status < 0:
        return f"was killed by {_signal_name(-outcome.status)}"
    return f"exited with status {outcome.status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
