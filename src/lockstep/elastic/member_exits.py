"""How members of an elastic run end: killed, lost with a host, finished, or told to leave.

A lost connection is the consequence of another member's end, if one turns out to have died within
a moment; otherwise it is a failure.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.newcomers import Newcomers
from lockstep.launcher.failure_attribution import Outcome, describe_end, is_consequence
from lockstep.launcher.rank_processes import RankProcesses
from lockstep.messages import log

__all__ = ["SETTLE", "MemberExits"]

LEAVE_TIMEOUT = 5.0  # seconds that a member has to exit after the message "leave"
SETTLE = 2.0  # seconds in which the death of a member explains that others lost a connection


class MemberExits:
    """Notices the ends of members, and ends those that have to leave.

    Args:
        processes: The processes of the members.
        current: The current round.
        newcomers: The newcomers.

    Attributes:
        leaving: The members that have to leave, and when they are killed.
    """

    def __init__(
        self, processes: RankProcesses, current: CurrentRound, newcomers: Newcomers
    ) -> None:
        self.leaving: dict[int, float] = {}
        self._processes = processes
        self._round = current
        self._newcomers = newcomers

    @property
    def alive(self) -> list[int]:
        """The running members of the round, by rank."""
        return [
            member
            for member in self._round.members
            if member not in self._round.lost and self._processes.outcomes[member].status is None
        ]

    @property
    def _is_explained(self) -> bool:
        """Whether the end of a member, or of the store, explains failures of others."""
        return bool(self._round.lost) or self._processes.stores.is_lost

    def notice(self) -> None:
        """Record what has ended, and kill what should have."""
        for member in [*self._round.unended, *self._newcomers, *self.leaving]:
            self.notice_end(member, self._processes.outcomes[member])
        self.reconsider_consequences()
        self._kill_late_leavers()
        self._kill_stuck_members()

    def notice_end(self, member: int, outcome: Outcome) -> None:
        """Record that a member has ended, or is about to because it lost another one."""
        if outcome.error is not None and member in self._round.members:
            # If no member turns out to be dead, a lost connection counts as a failure later.
            outcome.is_replaced |= is_consequence(outcome) or member in self._round.writers
            # Ranks did not connect, or a call timed out, in a round that has lost a member.
            has_no_contact = outcome.error["code"] in ("rendezvous", "communication")
            outcome.is_replaced |= has_no_contact and self._is_explained
        if outcome.status is None:
            outcome.is_replaced |= outcome.error is not None and member in self._newcomers
            return
        if member in self.leaving:
            del self.leaving[member]
            self._processes.release(member)
        elif member in self._newcomers:
            is_ours = member not in self._processes.pids or outcome.status == 0
            is_failure = not (is_ours or outcome.was_killed)
            self._processes.release(member)
            self._newcomers.note_end(member, outcome, is_failure=is_failure)
        elif outcome.status == 0:
            self._round.done.add(member)
        elif outcome.was_killed:
            self._lose(member, outcome, -outcome.status)
        elif member in self._round.writers or (outcome.is_replaced and self._is_explained):
            self._lose(member, outcome, 0)

    def _lose(self, member: int, outcome: Outcome, number: int) -> None:
        self._round.lose(member, number)
        if number and not outcome.lost_with:
            log(f"member {member} {describe_end(outcome)}")
        self._processes.release(member)
        self.tell_lost(member, self.alive)

    def tell_lost(self, member: int, others: Iterable[int]) -> None:
        """Tell members that one has left the round: over a network, a rank may not notice it."""
        for other in others:
            self._processes.send(
                other, {"kind": "lost", "round": self._round.number, "member": member}
            )

    def reconsider_consequences(self) -> None:
        """Count lost connections as failures if no member has died within a moment."""
        if any(self._round.lost.values()) or self._processes.stores.is_lost or self._round.writers:
            return
        for member in self._round.members:
            outcome = self._processes.outcomes[member]
            if outcome.is_replaced and outcome.error is not None and member not in self._round.lost:
                is_late = time.monotonic() - outcome.error["time"] >= SETTLE
                outcome.is_replaced = not is_late and bool(self._processes.running)

    def _kill_late_leavers(self) -> None:
        for member, deadline in self.leaving.items():
            if time.monotonic() >= deadline:
                self._processes.end_ranks([member], signal.SIGKILL)

    def _kill_stuck_members(self) -> None:
        read_activity = self._processes.probes.read_activity
        for member, lost in self._round.find_stuck(self.alive, read_activity):
            log(f"member {member} still waits for member {lost}: it is replaced")
            self._processes.send_signal(member, signal.SIGKILL)

    def dismiss(self, members: Iterable[int]) -> None:
        """Let members exit that wait for a message; the others have nothing to save."""
        for member in [*members]:
            is_newcomer = member in self._newcomers
            if self._newcomers.remove(member) if is_newcomer else member in self._round.reports:
                self._processes.send(member, {"kind": "leave"})
            else:
                self._processes.end_ranks([member], signal.SIGKILL)
            self.leaving[member] = time.monotonic() + LEAVE_TIMEOUT
