"""The plan of the next round: who takes part, and whether the unfinished operation is repeated.

Ranks that lost a peer report the operation that they were in. A rank that has passed the
barrier of operation n and committed it is at n + 1, while a slower one may still be at n:

    prepare n ──> barrier n ──> commit n ──> prepare n + 1        reports (n + 1, not prepared)
    prepare n ──> barrier n: a peer is lost                       reports (n, prepared)

A rank passes a barrier only when every rank has prepared. So if any survivor is at n + 1, or
all survivors at n have prepared, those at n commit; otherwise they undo n and repeat it. Then
all are at the same operation. All functions here are pure functions of plain values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.formatting import format_numbered, format_quantity

__all__ = [
    "Continue",
    "Report",
    "Restart",
    "RestartTransfer",
    "RoundPlan",
    "choose_world_size",
    "has_to_be_replaced",
    "plan_round",
]


@dataclass(frozen=True)
class Report:
    """The report of a member at the end of a round.

    Attributes:
        member: The member's number.
        operation: The number of the operation that it was in, or of the next one.
        is_prepared: Whether it had prepared that operation.
        is_admission: Whether it reported at a safe point, to admit newcomers or let members
            leave, and not because it lost a peer.
        can_stay: Whether its process can take part in the next round.
        can_transfer_state: Whether it can write its state, for processes that replace the round's.
        part: The part of the state that it holds, from 0 to `parts` - 1.
        parts: The number of parts: of pipeline stages, or of shards.
        microbatches: The number of micro-batches, for ranks that take turns at them, as with
            sharded storage; 0 for others.
        has_state: Whether it has the state of the training; a newcomer gets it in its first
            round.
    """

    member: int
    operation: int
    is_prepared: bool = False
    is_admission: bool = False
    can_stay: bool = True
    can_transfer_state: bool = False
    part: int = 0
    parts: int = 1
    microbatches: int = 0
    has_state: bool = True

    @classmethod
    def from_message(cls, member: int, message: Mapping[str, Any]) -> Report:
        """Parse the message "round_over" of a member."""
        return cls(
            member,
            int(message["operation"]),
            is_prepared=bool(message["is_prepared"]),
            is_admission=message["reason"] == "admit",
            can_stay=bool(message["can_stay"]),
            can_transfer_state=bool(message["can_transfer_state"]),
            part=int(message["part"]),
            parts=int(message["parts"]),
            microbatches=int(message["microbatches"]),
            has_state=bool(message["has_state"]),
        )


@dataclass(frozen=True)
class Continue:
    """The members continue in their processes.

    Attributes:
        operation: The lowest operation that a member was in.
        commit: Whether members that were in it commit it; otherwise they undo it. Members that
            were in the next operation undo that one.
        members: The members of the next round, by rank.
        joined: The members that are new.
        left: The members of the last round that have to leave.
    """

    operation: int
    commit: bool
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the number of ranks, and who joined and left."""
        changes = [
            f"{format_numbered('member', members)} {what}"
            for members, what in ((self.joined, "joined"), (self.left, "left"))
            if members
        ]
        size = format_quantity(len(self.members), "rank")
        return f"{size}, {' and '.join(changes)}" if changes else size


@dataclass(frozen=True)
class RestartTransfer:
    """New processes replace those of the round, and continue from the state that these write.

    Attributes:
        operation: As for `Continue`.
        commit: As for `Continue`, before the state is written.
        writers: For each part, the members that can write it, in order of preference.
    """

    operation: int
    commit: bool
    writers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Restart:
    """New processes replace those of the round, and continue from the newest saved state."""


RoundPlan = Continue | RestartTransfer | Restart


def plan_round(
    reports: Sequence[Report], newcomers: Sequence[int] = (), *, wanted: int, at_least: int = 1
) -> RoundPlan | None:
    """Return the plan of the next round.

    Args:
        reports: The reports of the surviving members, in the order of their ranks.
        newcomers: The members that wait to join, the oldest first.
        wanted: The number of ranks that the run should have.
        at_least: The number of ranks that the run must have.

    Returns:
        None if the members have to wait for more newcomers.
    """
    survivors = [report for report in reports if report.has_state]
    operations = {report.operation for report in survivors}
    if not survivors or max(operations) - min(operations) > 1:
        return Restart()
    operation = min(operations)
    behind = [report for report in survivors if report.operation == operation]
    commit = len(operations) == 2 or all(report.is_prepared for report in behind)
    if has_to_be_replaced(survivors):
        writers = tuple(_find_writers(survivors, part) for part in range(_count_parts(survivors)))
        if not all(writers):
            return Restart()
        return RestartTransfer(operation, commit, writers)
    if len(survivors) + len(newcomers) < at_least:
        return None
    is_admission = len(operations) == 1 and all(report.is_admission for report in survivors)
    staying = [report.member for report in survivors][:wanted]
    joined = list(newcomers)[: wanted - len(staying)] if is_admission else []
    left = [report.member for report in reports if report.member not in staying]
    return Continue(operation, commit, (*staying, *joined), tuple(joined), tuple(left))


def has_to_be_replaced(reports: Iterable[Report]) -> bool:
    """Return whether members other than newcomers cannot continue in their processes."""
    return any(report.has_state and not report.can_stay for report in reports)


def _count_parts(reports: Iterable[Report]) -> int:
    """Return the number of parts of the state."""
    return max((report.parts for report in reports), default=1)


def choose_world_size(wanted: int, reports: Sequence[Report]) -> int:
    """Return the number of ranks, at most `wanted` if possible, that can train together.

    These are complete replicas of pipeline stages or, where ranks take turns at micro-batches, a
    power of two that divides their number.
    """
    if microbatches := max((report.microbatches for report in reports), default=0):
        return math.gcd(microbatches, 1 << (wanted.bit_length() - 1))
    stages = _count_parts(reports)
    return max(stages, wanted // stages * stages)


def _find_writers(survivors: Sequence[Report], part: int) -> tuple[int, ...]:
    """Return the members that can write a part of the state."""
    return tuple(
        report.member for report in survivors if report.can_transfer_state and report.part == part
    )
