"""The rounds of an elastic run, formed by its launcher.

A *member* is a process; its number is never used again. In a *round* the members are fixed, and
have ranks. A round ends when a member is killed, or when rank 0 admits newcomers:

    running ──"round_over" of every member that is left──────────> round_plan
       ^                                                               │
       ├── Continue: "round" to the members of the next round <────────┤
       ├── RestartTransfer: "transfer_state" to some, new processes <──┤
       └── Restart: new processes, from the checkpoint <──────────────┘

After `Continue`, newcomers are started for the members that are missing. A newcomer reports
"ready" when it has run its script up to the first call that needs the others; then rank 0 gets
"newcomers", and at the next safe point all report "round_over" to admit them.

    to the launcher   round_over      the fields of `round_plan.Report`, with "round" and "reason"
                      ready           a newcomer can join
                      transferred     its part of the state is written
                      resumed         a new process has read the state that was handed over
                      backend         on several hosts: the backend of rank 0, for newcomers
    to a member       newcomers       {round, count}: let all ranks report at the next safe point;
                                      0 if no newcomer waits any more
                      lost            {round, member}: a member of this round is gone
                      round           {round, rank, world_size, pids, store, operation, commit,
                                      lost, joined, left, noticed}: the next round; `pids` are by
                                      rank, and `noticed` is when the launcher learned why it is
                                      formed
                      transfer_state  {folder, operation, commit}: write the state there and exit
                      leave           exit with status 0

A member that exits with status 0 has finished its script. Only a death by a signal begins a new
round; any other failure ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.host_plan import order_by_host
from lockstep.elastic.member_exits import SETTLE, MemberExits
from lockstep.elastic.member_starter import MemberStarter, StartMember
from lockstep.elastic.newcomers import Newcomers
from lockstep.elastic.restarts import MAX_FRUITLESS, Restarts, StateFolder, StateTransfer
from lockstep.elastic.round_plan import (
    Continue,
    Report,
    RestartTransfer,
    RoundPlan,
    choose_world_size,
    has_to_be_replaced,
    plan_round,
)
from lockstep.elastic.scale_request import take_request
from lockstep.formatting import format_numbered, format_quantity
from lockstep.kernel.errors import RankError, UsageError
from lockstep.launcher.environment import RankEnvironment
from lockstep.launcher.fork_server import check_open_files
from lockstep.launcher.run_folder import RESUME
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import log

__all__ = ["ElasticCoordinator"]

# Seconds that members have to report before they are replaced: with a backend whose connections
# cannot be closed, ranks go on waiting for a rank that has reported. The first is for members that
# are not needed, because others can hand over the state.
REPORT_SETTLE = 0.5
REPORT_TIMEOUT = 10.0
MAX_UNEXPLAINED = 5  # rounds in a row that ended although no member had died
KINDS = ("waiting", "ready", "round_over", "transferred", "resumed", "backend")


# It has many methods: it answers every event of a run, and most answers depend on the others.
class ElasticCoordinator:
    """Forms the rounds of a run, and starts its members.

    Args:
        ranks: The supervisor of the members, whose numbers are its ranks.
        start: Starts a member.
        environment: The variables of the first round.
        wanted: The number of ranks that the run should have.
        at_least: The number of ranks that the run must have.
        folder: The run's folder.
        nnodes: The number of hosts, some of which may be lost.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        start: StartMember,
        environment: RankEnvironment,
        *,
        wanted: int,
        at_least: int,
        folder: Path | None,
        nnodes: int = 1,
    ) -> None:
        if not environment.store and nnodes == 1:
            raise UsageError("--min and --max: elastic runs need Linux")
        self._round = CurrentRound()
        self._ranks = ranks
        self._processes = ranks.processes
        self._wanted = wanted
        self._at_least = at_least
        self._folder = folder
        states = StateFolder(folder)
        ranks.processes.remove_at_end(str(states.path))
        self._restarts = Restarts(states)
        self._starter = MemberStarter(ranks.processes, start, environment, nnodes, {})
        self._newcomers = Newcomers(self._start_newcomer)
        self._exits = MemberExits(ranks.processes, self._round, self._newcomers)
        self._told = (-1, 0, False)  # member, round, and whether newcomers waited
        self._reports: Sequence[Report] = ()  # of the last round
        self._transfer: StateTransfer | None = None
        self._error: RankError | None = None
        self._has_ended = False
        ranks.after_events = self.advance
        ranks.before_end = self.dismiss_waiting
        ranks.processes.on_report = self._on_report

    @property
    def number(self) -> int:
        """The number of the round, from 0."""
        return self._round.number

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the round, by rank."""
        return self._round.members

    def begin(self) -> None:
        """Start the members of the first round."""
        self._start_members(self._reachable, {})

    def close(self) -> None:
        """Remove the states that were handed over."""
        self._restarts.states.remove()

    # --- what happens -------------------------------------------------------------------------

    def advance(self) -> RankError | None:
        """Process what has happened, and form the next round as soon as possible.

        Returns:
            The reason why the run cannot continue; None if it can.
        """
        if not self._processes.has_fork_server:
            return self._error
        self._exits.notice()
        self._read_request()
        if self._restarts.next is not None:
            self._replace_members()
        elif self._transfer is not None:
            self._follow_transfer(self._transfer)
        elif self._is_stopping or self._round.done:
            self._exits.dismiss(self._newcomers)
            self._form_round()
        else:
            self._form_round()
            self._fill_up()
        return self._error

    def dismiss_waiting(self) -> None:
        """Let the members exit that wait for a message, since SIGTERM does not wake them."""
        self._has_ended = True
        for member in [*self._round.reports, *self._newcomers]:
            self._processes.send(member, {"kind": "leave"})

    @property
    def _is_stopping(self) -> bool:
        outcomes = [self._processes.outcomes[member] for member in self.members]
        return self._ranks.was_asked_to_stop or any(outcome.has_stopped for outcome in outcomes)

    @property
    def _reachable(self) -> int:
        return self._starter.count_reachable(self._wanted)

    def _on_report(self, member: int, message: dict[str, Any]) -> bool:
        match message["kind"]:
            case "waiting":  # for ranks of a world; the supervisor knows members
                members = [m for rank, m in enumerate(self.members) if rank in message["ranks"]]
                is_member = member in self.members
                self._processes.outcomes[member].waiting_for = tuple(members) if is_member else ()
            case "ready" if member in self._newcomers:
                self._newcomers.note_ready(member)
            case "round_over" if member in self.members and message["round"] == self.number:
                self._note_report(Report.from_message(member, message))
            case "backend":
                self._starter.common = {"LOCKSTEP_BACKEND": message["name"]}
            case "transferred" if self._transfer is not None:
                self._transfer.note_written(member)
            case "resumed":
                is_busy = self._restarts.next is not None or self._transfer is not None
                self._restarts.note_resumed(member, self.members, is_busy=is_busy)
        if self._has_ended and message["kind"] in ("ready", "round_over"):
            self._processes.send(member, {"kind": "leave"})
        return message["kind"] in KINDS

    def _note_report(self, report: Report) -> None:
        if self._starter.has_hosts:
            report = replace(report, can_transfer_state=False)  # other hosts could not read it
            others = [other for other in self._exits.alive if other not in self._round.reports]
            self._exits.tell_lost(report.member, others)
        self._round.note_report(report)

    def _read_request(self) -> None:
        """Read the number of ranks that `lockstep scale` has asked for."""
        wanted = None if self._folder is None else take_request(self._folder)
        if wanted is None:
            return
        try:
            check_open_files(max(0, wanted - len(self._exits.alive)))
        except UsageError as error:
            log(f"lockstep scale: {error}")
            return
        self._wanted = max(wanted, self._at_least)
        self._newcomers.permit()
        log(f"the run gets {format_quantity(self._wanted, 'rank')} at its next safe point")

    # --- the next round -----------------------------------------------------------------------

    def _form_round(self) -> None:
        alive = self._exits.alive
        if not alive:
            has_failed = self._round.lost and self.members[0] not in self._round.done
            if has_failed and not self._is_stopping:
                self._restart()
        elif all(member in self._round.reports for member in alive):
            is_admission = self._round.is_admission
            is_late = self._round.seconds_since_report >= SETTLE
            if is_late and not (self._round.lost or is_admission):
                self._round.unexplained += 1
                if self._round.done or self._round.unexplained == MAX_UNEXPLAINED:
                    self._fail(_describe_unexplained(self._round.done))
                    return
            if self._round.lost or is_admission or is_late:  # a busy machine may connect too late
                self._plan([self._round.reports[member] for member in alive])
        elif any(
            set(self._processes.outcomes[member].waiting_for) & self._round.lost.keys()
            for member in alive
        ):
            self._restart()
        elif not any(
            self._processes.has_begun(member) or member in self._round.reports for member in alive
        ):  # nobody has an operation to report yet: they may be waiting in `init`
            noticed = self._round.noticed
            is_late = noticed is not None and time.time() - noticed >= REPORT_TIMEOUT
            if is_late or self._processes.stores.is_lost:
                self._restart()
        elif self._round.lost and has_to_be_replaced([*self._round.reports.values()]):
            self._replace_silent_members([*self._round.reports.values()])

    def _replace_silent_members(self, reports: Sequence[Report]) -> None:
        """Stop waiting for members that do not report, if the others have waited long enough."""
        plan = plan_round(reports, wanted=self._wanted)
        self._reports = reports
        waited = self._round.seconds_since_report
        if isinstance(plan, RestartTransfer) and waited >= REPORT_SETTLE:
            self._execute(plan)
        elif waited >= REPORT_TIMEOUT:
            self._restart()

    def _plan(self, reports: Sequence[Report]) -> None:
        is_ending = self._is_stopping or bool(self._round.done) or self._processes.stores.is_lost
        plan = plan_round(
            reports,
            [] if is_ending else self._newcomers.ready,
            wanted=self._wanted,
            at_least=1 if is_ending else self._at_least,
        )
        self._reports = reports
        if plan is None and not self._newcomers.start_missing(len(reports), self._reachable):
            self._fail_for_few(len(reports))
        elif plan is not None:
            self._execute(plan)

    def _execute(self, plan: RoundPlan) -> None:
        if isinstance(plan, Continue) and not self._processes.stores.is_lost:
            self._continue(plan)
        elif isinstance(plan, RestartTransfer):
            folder = self._restarts.states.begin_transfer()
            self._transfer = StateTransfer(plan, folder, self._processes.send)
            self._round.writers = {*self._transfer.writers}
        else:
            self._restart()

    def _continue(self, plan: Continue) -> None:
        """Tell the members their ranks in the next round."""
        members = order_by_host(
            [member for member in plan.members if member not in plan.joined],
            plan.joined,
            self._processes.host_of,
        )
        message = {
            "kind": "round",
            **self._round.describe_end(),
            "world_size": len(members),
            "hosts": [self._processes.host_of(member) for member in members],
            "newcomers": [members.index(member) for member in plan.joined],
            "store": self._starter.store,
            "operation": plan.operation,
            "commit": plan.commit,
            "joined": list(plan.joined),
            "left": list(plan.left),
        }
        for member in plan.joined:
            self._newcomers.remove(member)
        self._exits.dismiss(plan.left)
        self._round.begin_next(members)
        for rank, member in enumerate(members):
            self._processes.outcomes[member].rank_in_world = rank
            self._processes.outcomes[member].is_outside = False
            pids = [self._processes.find_pid(other, member) for other in members]
            self._processes.send(member, {**message, "rank": rank, "pids": pids})
        log(f"round {self.number}: {plan.describe()}")

    def _fail_for_few(self, ranks: int) -> None:
        why = "the processes that were started to replace the others ended before they joined"
        if self._reachable <= ranks:
            why = "the hosts that are left have all of their ranks"
        left = format_quantity(ranks, "rank")
        self._fail(f"{left} left, fewer than --min {self._at_least}, and {why}")

    def _fail(self, reason: str) -> None:
        self._error = RankError(f"round {self.number}: {reason}")

    # --- newcomers ----------------------------------------------------------------------------

    def _fill_up(self) -> None:
        """Start and announce newcomers, or announce that members have to leave."""
        if self._restarts.next or self._transfer or self._round.lost or self._round.reports:
            return
        if self._processes.stores.is_lost:  # nobody can join, and those that have need no store
            return
        if not has_to_be_replaced(self._reports):
            self._newcomers.start_missing(len(self.members), self._reachable)
            surplus = len(self.members) + len(self._newcomers) - self._wanted
            if surplus > 0:
                self._exits.dismiss([*self._newcomers][-surplus:])
            count = len(self._newcomers.ready) or len(self.members) - self._wanted
        else:
            count = abs(choose_world_size(self._reachable, self._reports) - len(self.members))
        self._notify(max(0, count))

    def _notify(self, count: int) -> None:
        """Send rank 0 the number of newcomers that wait, or of members to leave, once per round."""
        first = self.members[0]
        was_told = self._told[0] == first and self._told[2]
        if (count and self._told != (first, self.number, True)) or (not count and was_told):
            self._told = (first, self.number, bool(count))
            self._processes.send(first, {"kind": "newcomers", "round": self.number, "count": count})

    def _start_newcomer(self, rank: int) -> int:
        others = [*self._exits.alive, *self._newcomers]
        return self._starter.start_newcomer(rank, self._wanted, self.number, others)

    # --- new processes ------------------------------------------------------------------------

    def _follow_transfer(self, transfer: StateTransfer) -> None:
        """Start new processes as soon as the state is written, or can no longer be written."""
        is_complete = transfer.follow(self._exits.alive)
        self._round.writers = {*transfer.writers}
        if is_complete is None:
            return
        self._transfer = None
        self._round.writers.clear()
        if is_complete:
            self._restarts.states.complete_transfer(transfer.writers)
        else:
            self._restarts.states.discard()
        self._restart()

    def _restart(self) -> None:
        """End all processes, to start new ones from the newest state."""
        if self._reachable < self._at_least:
            self._fail_for_few(self._reachable)
            return
        world_size = choose_world_size(self._reachable, self._reports)
        if not self._restarts.plan(self._round, self._starter.list_next(world_size)):
            self._fail(
                f"{MAX_FRUITLESS} rounds in a row were replaced before they had saved a state"
            )
            return
        self._exits.dismiss([*self._exits.alive, *self._newcomers])
        for member in self.members:
            if member not in self._exits.leaving and member not in self._round.lost:
                self._processes.release(member)
        self._round.clear()
        self._replace_members()

    def _replace_members(self) -> None:
        """Start the new processes as soon as the old ones have exited."""
        source = self._restarts.next
        if source is None or self._exits.leaving or self._is_stopping:
            return
        self._restarts.begin()
        self._starter.renew_store()
        self._round.begin_next(())
        variables = {RESUME: "1"} if self._folder is not None else {}
        size = len(source.joined)
        log(f"round {self.number}: {format_quantity(size, 'rank')}, in new processes")
        self._start_members(size, {**variables, **source.variables()})

    def _start_members(self, count: int, variables: dict[str, str]) -> None:
        self._round.members = tuple(self._starter.list_next(count))
        self._starter.start_together(count, self.number, variables)


def _describe_unexplained(done: set[int]) -> str:
    if done:
        who = format_numbered("member", sorted(done))
        return f"{who} returned while others still waited for it"
    return "every rank lost the connection to others, but none of them has ended"
