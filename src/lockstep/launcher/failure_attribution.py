"""Failure attribution: which rank of a launch failed first, and why, in one sentence.

A rank that dies takes others with it: their connections to it break, and they raise. Such
consequences are separated from causes, so that the message names the cause even if a
consequence was reported earlier. If the kernel killed a process because memory ran out, a counter
of the control group says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.formatting import format_numbered
from lockstep.kernel.errors import RankError
from lockstep.launcher.failure_codes import CONSEQUENCES, OF_BACKEND, STOPPED

__all__ = [
    "Outcome",
    "count_oom_kills",
    "describe_end",
    "describe_failed_start",
    "describe_own_failure",
    "explain_sigkill",
    "find_early_exit",
    "find_first_failure",
    "find_same_failures",
    "is_consequence",
    "make_rank_error",
    "make_report",
    "signal_name",
]

# The beginning of an error message that names the process that failed, which a sentence does not
# name twice. Nothing else is decided by it: any other message follows the name of the process.
BEGINS_WITH_WHO = r"(rank|member) \d|the process of"


@dataclass
class Outcome:
    """How one rank ended; times are in `time.monotonic()` seconds.

    Attributes:
        rank: The rank.
        status: Exit status, negative for a signal; None while the rank runs.
        when: When it ended.
        error: Its report of an exception (`rank_process.describe_error`).
        returned: Whether its function returned.
        was_terminated: Whether the launcher signalled it before it ended.
        waiting_for: The ranks that it waits for in `init`, according to its last report.
        hint: Further explanation of a signal.
        lost_with: The host that it was lost with, such as "host 1 (node7)"; "" if it was not.
        is_replaced: Whether the launch continues without it; only in an elastic run.
        noun: What `rank` is: "rank", or "member" in an elastic run.
        rank_in_world: Its rank in the world if `rank` is the number of a member; else None.
        is_outside: Whether it is a member that has not joined the others yet, so that none of
            them waits for it.
    """

    rank: int
    status: int | None = None
    when: float = 0.0
    error: dict[str, Any] | None = None
    returned: bool = False
    was_terminated: bool = False
    waiting_for: tuple[int, ...] = ()
    hint: str = ""
    lost_with: str = ""
    is_replaced: bool = False
    noun: str = "rank"
    rank_in_world: int | None = None
    is_outside: bool = False

    @property
    def name(self) -> str:
        """Its name in messages: "rank 2", or "member 2" in an elastic run."""
        return f"{self.noun} {self.rank}"

    @property
    def own_rank(self) -> int:
        """The rank that it gives in its own messages."""
        return self.rank if self.rank_in_world is None else self.rank_in_world

    @property
    def has_returned(self) -> bool:
        """Whether this rank ended successfully, without being terminated."""
        return self.returned or (self.status == 0 and not self.was_terminated)

    @property
    def has_stopped(self) -> bool:
        """Whether this rank stopped on request: it exited with status 75."""
        return self.status == STOPPED and self.error is None

    @property
    def has_failed(self) -> bool:
        """Whether this rank failed, without being terminated."""
        if self.error is not None:
            return True
        return self.status not in (None, 0, STOPPED) and not self.was_terminated

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed this rank, other than one that asked it to stop."""
        if self.status is None or self.status >= 0:
            return False
        return not (self.was_terminated and self.status == -signal.SIGTERM)


def is_consequence(outcome: Outcome) -> bool:
    """Return whether this failure looks like the consequence of another rank's end."""
    return outcome.error is not None and outcome.error["code"] in CONSEQUENCES


def find_first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the failure that came first, causes before consequences.

    A rank that only lost the connection to one that stopped on request has not failed.
    """
    outcomes = list(outcomes)
    failures = [outcome for outcome in outcomes if outcome.has_failed]
    if any(outcome.has_stopped for outcome in outcomes):
        failures = [outcome for outcome in failures if not is_consequence(outcome)]
    if not failures:
        return None
    return min(failures, key=lambda outcome: (is_consequence(outcome), _failure_time(outcome)))


def find_early_exit(outcomes: Iterable[Outcome]) -> RankError | None:
    """Return an error if ranks wait in `init` for a rank that has returned successfully."""
    outcomes = list(outcomes)
    returned = {outcome.rank for outcome in outcomes if outcome.has_returned}
    waiting = [outcome for outcome in outcomes if returned & set(outcome.waiting_for)]
    if not waiting:
        return None
    gone = sorted(returned & set(waiting[0].waiting_for))
    noun = waiting[0].noun
    error = RankError(
        f"{format_numbered(noun, gone)} returned without joining the world, while "
        f"{format_numbered(noun, [outcome.rank for outcome in waiting])} waited in "
        f"lockstep.init(): every rank must call it"
    )
    error.rank = gone[0]
    return error


def make_rank_error(outcomes: Iterable[Outcome]) -> RankError | None:
    """Return the error to raise for a launch, with the traceback as a note; None if none failed."""
    outcomes = list(outcomes)
    failure = find_first_failure(outcomes)
    if failure is None:
        return find_early_exit(outcomes)
    error = RankError(_describe_early_return(outcomes, failure) or _describe_failure(failure))
    error.rank = failure.rank
    error.status = failure.status
    report = failure.error
    if report is None:
        return error
    error.exception = report["type"]
    error.code = report["code"]
    error.reason = report["message"]
    if report["traceback"]:
        error.add_note(f"{failure.name}:\n{report['traceback'].rstrip()}")
    return error


def _describe_failure(failure: Outcome) -> str:
    """Return which rank failed and how: the message itself if it begins with a rank."""
    error = failure.error
    if error is not None and error["plain"] and re.match(BEGINS_WITH_WHO, str(error["message"])):
        return str(error["message"])
    return f"{failure.name} {describe_end(failure)}"


def find_same_failures(outcomes: Iterable[Outcome], failure: Outcome) -> list[Outcome]:
    """Return the outcomes with the same Lockstep error as `failure`; none for other errors."""
    own = _identify(failure)
    same = [outcome for outcome in outcomes if _identify(outcome) == own]
    return [] if own is None else same


def _identify(outcome: Outcome) -> str | None:
    """Return a Lockstep error's message without its numbers; None for other errors.

    They may be this rank and its micro-batch, and so differ where ranks fail in the same way.
    """
    error = outcome.error
    return re.sub(r"\d", "", error["message"]) if error is not None and error["plain"] else None


def describe_own_failure(outcomes: Sequence[Outcome], failure: Outcome) -> str:
    """Return the message of a Lockstep error, after the lines of user code that raised it.

    "train.py:31: rank 2 failed: ...", or "train.py:31 on rank 0, train.py:40 on rank 1: ...".
    """
    assert failure.error is not None
    ranks_by_line: dict[str, list[int]] = {}
    same = find_same_failures(outcomes, failure)
    for outcome in same:
        if outcome.error is not None and outcome.error["where"]:
            ranks_by_line.setdefault(outcome.error["where"], []).append(outcome.rank)
    alone = len(ranks_by_line) == 1
    is_of_backend = failure.error["code"] in OF_BACKEND
    if is_of_backend and (early := _describe_early_return(outcomes, failure)):
        return early
    said = failure.error["message"] if len(same) == len(outcomes) else _describe_failure(failure)
    if is_of_backend and len(same) > 1:
        said = said.removeprefix(f"rank {failure.own_rank}: ")  # each rank's message begins with it
    lines = [
        where if alone else f"{where} on {format_numbered(failure.noun, at)}"
        for where, at in ranks_by_line.items()
    ]
    return f"{', '.join(lines)}: {said}" if lines else said


def _failure_time(outcome: Outcome) -> float:
    return outcome.when if outcome.error is None else float(outcome.error["time"])


def _describe_early_return(outcomes: Sequence[Outcome], failure: Outcome) -> str:
    """Return which ranks had returned when another rank lost its connection to them; or ""."""
    gone = [outcome.rank for outcome in outcomes if outcome.has_returned]
    if not gone or not is_consequence(failure):
        return ""
    assert failure.error is not None
    where = f" ({failure.error['where']})" if failure.error["where"] else ""
    operation = failure.error["operation"] or "a collective"
    return (
        f"{format_numbered(failure.noun, gone)} returned while {failure.name} still waited in "
        f"{operation}{where}{failure.error['hint']}"
    )


def describe_end(outcome: Outcome, also: str = "") -> str:
    """Return how a rank ended, as the predicate of a sentence; `also` may be "also "."""
    if outcome.error is not None:
        return also + _describe_exception(outcome.error)
    if outcome.status is None:
        return f"{also}is still running"
    if outcome.lost_with:
        return f"was {also}lost with {outcome.lost_with}"
    if outcome.status < 0:
        return f"was {also}killed by {signal_name(-outcome.status)}{outcome.hint}"
    return f"{also}exited with status {outcome.status}"


def describe_failed_start(rank: int, reason: str, noun: str = "rank") -> dict[str, Any]:
    """Return the report for a rank, or the store's process (-1), that could not be forked.

    Without a reason, the fork server has ended before it forked any; its traceback is shown.
    """
    advice = f"fork failed ({reason}); see ulimit -u, the pids limit of the control group, and "
    advice += "free memory"
    if not reason and _is_working_directory_gone():
        advice = "the working directory has been deleted"
    elif not reason:
        advice = "the fork server ended while it imported torch"
        names = sorted(name for name in sys.stdlib_module_names if os.path.exists(f"{name}.py"))
        if names:
            files = ", ".join(f"{name}.py" for name in names)
            advice += f": rename {files}, which Python imports instead of a module of its own"
    who = f"{noun} {rank}" if rank >= 0 else "the process of the ranks' store"
    return make_report("OSError", f"{who} could not be started: {advice}")


def _is_working_directory_gone() -> bool:
    """Return whether it has been deleted; Intel MKL ends a process that loads torch there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def make_report(kind: str, message: str) -> dict[str, Any]:
    """Return the report of an error that the rank itself has not reported."""
    return {
        "kind": "error",
        "time": time.monotonic(),
        "type": kind,
        "message": message,
        "where": "",
        "traceback": "",
        "plain": True,
        "code": "",
        "operation": "",
        "hint": "",
    }


def _describe_exception(error: dict[str, Any]) -> str:
    if error["plain"]:
        return f"failed: {error['message']}"
    said = str(error["message"]).strip().partition("\n")[0]
    where = f" ({error['where']})" if error["where"] else ""
    return f"raised {error['type']}" + (f": {said}" if said else "") + where


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def explain_sigkill(oom_kills_before: int | None) -> str:
    """Return what to add to "was killed by SIGKILL"; empty if nothing is known.

    Args:
        oom_kills_before: `count_oom_kills()` at the start of the launch.
    """
    now = count_oom_kills()
    if now is not None and oom_kills_before is not None and now > oom_kills_before:
        return "; this control group ran out of memory"
    return ""


def count_oom_kills() -> int | None:
    """Return how many processes of this control group were killed to free memory, if known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
        events = (Path("/sys/fs/cgroup") / own.lstrip("/") / "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    return None
