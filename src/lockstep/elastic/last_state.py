"""The state that the members of a host save when they have lost the launcher of host 0.

Nobody decides a next round any more, but each of them still has the state of the training:

    agent ── "lost" ──> all members ── round_over ──> round_plan ── RestartTransfer
                                                                       │
    runs/NAME/checkpoints/step-41 <── copied <── transferred <── one of them writes

It is a checkpoint like any other, if the trainer has checkpoints and their folder is here. If host
0 is alive after all and goes on, it has the same state after the same step.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lockstep.elastic.restart_source import StateFolder
from lockstep.elastic.round_plan import Report, RestartTransfer, plan_round
from lockstep.elastic.state_transfer import StateTransfer
from lockstep.launcher.channel import Message
from lockstep.launcher.supervisor import TICK, RankSupervisor

__all__ = ["LastState"]

REPORT_TIMEOUT = 5.0  # seconds that members have to leave the round
EVERY_ROUND = 1 << 62  # a number that is not below that of any round


class LastState:
    """The state of the members of a host.

    Args:
        ranks: Their supervisor.
    """

    def __init__(self, ranks: RankSupervisor) -> None:
        self._ranks = ranks
        self._reports: dict[int, Report] = {}
        self._transfer: StateTransfer | None = None

    def note_report(self, member: int, message: Message) -> None:
        """Note what a member reports about its state."""
        if message["kind"] == "round_over":
            self._reports[member] = Report.from_message(member, message)
        elif message["kind"] == "transferred" and self._transfer is not None:
            self._transfer.note_written(member, message["checkpoints"])

    def note_round(self, member: int) -> None:
        """Note that a member begins a new round."""
        self._reports.pop(member, None)

    def save(self) -> None:
        """Save the state as a checkpoint, if a member has it and there is a folder for it."""
        lost = {"kind": "lost", "round": EVERY_ROUND, "member": -1}
        for member in self._ranks.running:
            self._ranks.send(member, lost)
        deadline = time.monotonic() + REPORT_TIMEOUT
        while {*self._ranks.running} - self._reports.keys() and time.monotonic() < deadline:
            self._ranks.process_events(TICK)
        running = self._ranks.running
        reports = [self._reports[member] for member in running if member in self._reports]
        plan = plan_round([replace(report, can_stay=False) for report in reports], wanted=1)
        if isinstance(plan, RestartTransfer):
            self._transfer_state(plan)

    def _transfer_state(self, plan: RestartTransfer) -> None:
        states = StateFolder(None)
        self._ranks.remove_at_end(str(states.path))
        try:
            transfer = StateTransfer(plan, states.begin_transfer(), self._ranks.send)
            self._transfer = transfer
            while (is_complete := transfer.follow(self._ranks.running)) is None:
                self._ranks.process_events(TICK)
            folder = transfer.checkpoints
            if is_complete and folder is not None and _is_here(folder):
                states.complete_transfer(transfer.writers, folder)
                states.keep_unread()
        finally:
            states.remove()


def _is_here(checkpoints: Path) -> bool:
    """Return whether this host has the run's folder, which may be on host 0 alone."""
    return checkpoints.parent.is_dir()
