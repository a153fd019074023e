"""How a launch ended: which rank failed first, in one sentence. Pure.

A rank that dies takes others with it: their connections to it break, and they
raise. What broke first is told apart from what broke in consequence, so that
the sentence names the cause even where a consequence was reported earlier.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RankError

__all__ = [
    "Outcome",
    "consequence",
    "deserted",
    "first_failure",
    "rank_error",
    "signal_name",
    "spoken",
]

# What torch's backends say when the other side of a connection is gone.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "failed to recv, got 0 bytes",
    "nccl remote error",
    "socket closed",
    "has left the group",  # these are lockstep's own
    "died (process",
    "stopped because rank",
)


@dataclass
class Outcome:
    """How one rank ended; times are `time.monotonic()` seconds.

    `status` is its exit status, negative for a signal, None while it runs.
    `error` is its report of an exception. `ended_by_us` means that the launcher
    signalled it first. `awaits` are the ranks that it said it waits for.
    `hint` is what else is known of a signal.
    """

    rank: int
    status: int | None = None
    when: float = 0.0
    error: dict[str, Any] | None = None
    returned: bool = False
    ended_by_us: bool = False
    awaits: tuple[int, ...] = ()
    hint: str = ""

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


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the failure that came first, causes before consequences."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    if not failures:
        return None
    return min(failures, key=lambda outcome: (consequence(outcome), _moment(outcome)))


def deserted(outcomes: Iterable[Outcome]) -> RankError | None:
    """Return an error where ranks wait in `init` for one that has ended well already."""
    outcomes = list(outcomes)
    left = {outcome.rank for outcome in outcomes if outcome.left}
    waiting = [outcome for outcome in outcomes if left & set(outcome.awaits)]
    if not waiting:
        return None
    gone = sorted(left & set(waiting[0].awaits))
    error = RankError(
        f"{spoken(gone)} returned without joining the world, while "
        f"{spoken([outcome.rank for outcome in waiting])} waited in lockstep.init(): every rank "
        f"must call it"
    )
    error.rank = gone[0]
    return error


def rank_error(outcomes: Iterable[Outcome]) -> RankError | None:
    """Return the error to raise for a launch; a traceback goes along as its note."""
    outcomes = list(outcomes)
    failure = first_failure(outcomes)
    if failure is None:
        return deserted(outcomes)
    error = RankError(_left_early(outcomes, failure) or _sentence(failure))
    error.rank, error.status = failure.rank, failure.status
    error.exception = None if failure.error is None else failure.error["type"]
    if failure.error is not None and not failure.error["plain"]:
        error.add_note(f"rank {failure.rank}:\n{failure.error['traceback'].rstrip()}")
    return error


def _sentence(failure: Outcome) -> str:
    """Say which rank failed and how; a message that names a rank itself stands alone."""
    error = failure.error
    if error is not None and error["plain"] and re.match(r"rank \d", str(error["message"])):
        return str(error["message"])
    return f"rank {failure.rank} {ending(failure)}"


def _moment(outcome: Outcome) -> float:
    return outcome.when if outcome.error is None else float(outcome.error["time"])


def _left_early(outcomes: Sequence[Outcome], failure: Outcome) -> str:
    """Name the ranks that had ended well where another lost its connection to them; or ""."""
    gone = [outcome.rank for outcome in outcomes if outcome.left]
    if not gone or not consequence(failure):
        return ""
    assert failure.error is not None
    where = f" ({failure.error['where']})" if failure.error["where"] else ""
    return f"{spoken(gone)} returned while rank {failure.rank} still waited in a collective{where}"


def ending(outcome: Outcome) -> str:
    """Say how a rank ended, as the end of a sentence about it."""
    if outcome.error is not None:
        return _raised(outcome.error)
    if outcome.status is None:
        return "is still running"
    if outcome.status < 0:
        return f"was killed by {signal_name(-outcome.status)}{outcome.hint}"
    return f"exited with status {outcome.status}"


def _raised(error: dict[str, Any]) -> str:
    if error["plain"]:
        return f"failed: {error['message']}"
    said = str(error["message"]).strip().partition("\n")[0]
    where = f" ({error['where']})" if error["where"] else ""
    return f"raised {error['type']}" + (f": {said}" if said else "") + where


def spoken(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0 and 2", "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def signal_name(number: int) -> str:
    """Return a signal's name, as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
