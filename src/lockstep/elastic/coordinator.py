"""The rounds of an elastic run, formed by its launcher.

A *member* is a process; its number is never used again. In a *round* the members are fixed, and
have ranks. A round ends when a member is killed, or when rank 0 admits newcomers:

    running ──"round_over" of every member that is left──> round_plan
       ^                                                       │
       ├── Continue: "round" to the members of the next round <┤
       ├── HandOver: "hand_over" to some, new processes <──────┤
       └── Restart: new processes, from mirror or checkpoint <─┘

After `Continue`, newcomers are started for the members that are missing. A newcomer reports
"ready" when it has run its script up to the first call that needs the others; then rank 0 gets
"newcomers", and at the next safe point all report "round_over" to admit them.

    to the launcher   round_over   the fields of `round_plan.Report`, with "round" and "reason"
                      ready        a newcomer can join
                      handed_over  its part of the state is written; the trainer's checkpoints are
                                   in the folder "checkpoints" ("" for a trainer without)
                      resumed      a new process has read the state that was handed over
                      backend      on several hosts: the backend that rank 0 uses, for newcomers
    to a member       newcomers    {round, count}: let all ranks report at the next safe point; 0
                                   if no newcomer waits any more
                      lost         {round, member}: a member of this round is gone
                      round        {round, rank, world_size, pids, store, operation, commit, lost,
                                   joined, left, noticed}: the next round; `pids` are by rank, and
                                   `noticed` is when the launcher learned why it is formed
                      hand_over    {folder, operation, commit}: write the state there and exit
                      leave        exit with status 0

A member that exits with status 0 has finished its script. Only a death by a signal begins a new
round; any other failure ends the run.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.host_plan import (
    RankPlace,
    choose_host,
    find_places,
    order_by_host,
    share_ranks,
)
from lockstep.elastic.newcomers import Newcomers
from lockstep.elastic.restart_source import RestartSource, StateFolder
from lockstep.elastic.round_plan import (
    Continue,
    HandOver,
    Plan,
    Report,
    choose_world_size,
    has_to_be_replaced,
    plan_round,
)
from lockstep.elastic.scale_request import take_request
from lockstep.elastic.state_transfer import StateTransfer
from lockstep.formatting import format_numbered, format_quantity
from lockstep.kernel.errors import RankError, UsageError
from lockstep.launcher.channel import Message
from lockstep.launcher.environment import ELASTIC, JOIN, MEMBER, RankEnvironment
from lockstep.launcher.failure_attribution import Outcome, describe_end, is_consequence
from lockstep.launcher.fork_server import check_open_files
from lockstep.launcher.run_folder import RESUME
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import say

__all__ = ["ElasticCoordinator", "StartMember"]

LEAVE_TIMEOUT = 5.0  # seconds that a member has to exit after the message "leave"
# Seconds that members have to report before they are replaced: with a backend whose connections
# cannot be closed, ranks go on waiting for a rank that has reported. The first is for members that
# are not needed, because others can hand over the state.
REPORT_SETTLE, REPORT_TIMEOUT = 0.5, 10.0
SETTLE = 2.0  # seconds in which the death of a member explains that others lost a connection
MAX_ROUNDS = 5  # in a row that saved nothing, or ended although no member had died

StartMember = Callable[[int, RankPlace, dict[str, str]], None]
"""Starts a process: its number as a member, its place, and variables for its environment."""


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
        self._ranks, self._start, self._environment = ranks, start, environment
        self._wanted, self._at_least, self._folder = wanted, at_least, folder
        self._nnodes = nnodes
        self._next_member = 0
        self._newcomers = Newcomers(self._start_newcomer)
        self._leaving: dict[int, float] = {}  # when they are killed
        self._stuck: set[int] = set()  # killed because they still waited for a lost member
        self._interrupted: float | None = None  # unix time; until new processes train again
        self._told = (-1, 0, False)  # member, round, and whether newcomers waited
        self._can_stay, self._stages = True, 1  # as last reported
        self._states = StateFolder(folder)
        ranks.remove_at_end(str(self._states.path))
        self._replacement: RestartSource | None = None  # of the next round, once all have exited
        self._handover: StateTransfer | None = None
        self._unexplained = 0  # rounds in a row that ended although no member had died
        self._resumed: set[int] = set()
        self._backend: dict[str, str] = {}  # the variable that selects it, on several hosts
        self._error: RankError | None = None
        self._has_ended = False
        ranks.after_events, ranks.before_end = self.advance, self.dismiss_waiting
        ranks.before_close = self._states.keep_unread
        ranks.on_report = self._on_report

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
        """Remove mirrors and handed-over states."""
        self._states.remove()

    # --- what happens -------------------------------------------------------------------------

    def advance(self) -> RankError | None:
        """Process what has happened, and form the next round as soon as possible.

        Returns:
            The reason why the run cannot continue; None if it can.
        """
        if self._ranks.has_fork_server:
            self._advance()
        return self._error

    def dismiss_waiting(self) -> None:
        """Let the members exit that wait for a message, since SIGTERM does not wake them."""
        self._has_ended = True
        for member in [*self._round.reports, *self._newcomers]:
            self._ranks.send(member, {"kind": "leave"})

    def _advance(self) -> None:
        for member in [*self._round.unended, *self._newcomers, *self._leaving]:
            self._notice_end(member, self._ranks.outcomes[member])
        self._reconsider_consequences()
        self._kill_late_leavers()
        self._kill_stuck_members()
        self._read_request()
        if self._replacement is not None:
            self._replace(self._replacement)
        elif self._handover is not None:
            self._follow_handover(self._handover)
        elif self._is_stopping or self._round.done:
            self._dismiss(self._newcomers)
            self._form_round()
        else:
            self._form_round()
            self._fill_up()

    @property
    def _is_stopping(self) -> bool:
        outcomes = [self._ranks.outcomes[member] for member in self.members]
        return self._ranks.was_asked_to_stop or any(each.has_stopped for each in outcomes)

    @property
    def _alive(self) -> list[int]:
        """The running members of this round, by rank."""
        return [
            member
            for member in self.members
            if member not in self._round.lost and self._ranks.outcomes[member].status is None
        ]

    def _on_report(self, member: int, message: Message) -> bool:
        kind = message["kind"]
        if kind == "waiting":  # for ranks of a world; the supervisor knows members
            members = [m for rank, m in enumerate(self.members) if rank in message["ranks"]]
            is_member = member in self.members
            self._ranks.outcomes[member].waiting_for = tuple(members) if is_member else ()
        elif kind == "ready" and member in self._newcomers:
            self._newcomers.note_ready(member)
        elif kind == "round_over" and member in self.members and message["round"] == self.number:
            report = Report.from_message(member, message)
            if self._has_hosts:
                report = replace(report, can_hand_over=False)  # other hosts could not read it
                self._tell_lost(
                    member, [each for each in self._alive if each not in self._round.reports]
                )
            self._round.note_report(report)
        elif kind == "backend":
            self._backend = {"LOCKSTEP_BACKEND": message["name"]}
        elif kind == "handed_over" and self._handover is not None:
            self._handover.note_written(member, message["checkpoints"])
        elif kind == "resumed":
            self._resumed.add(member)
            self._interrupted = None
            is_busy = self._replacement is not None or self._handover is not None
            if self._resumed.issuperset(self.members) and not is_busy:
                self._states.discard()
        if self._has_ended and kind in ("ready", "round_over"):
            self._ranks.send(member, {"kind": "leave"})
        return kind in ("waiting", "ready", "round_over", "handed_over", "resumed", "backend")

    # --- hosts --------------------------------------------------------------------------------

    @property
    def _shares(self) -> list[int]:
        """The number of ranks that each host is to have."""
        return share_ranks(self._wanted, self._nnodes)

    @property
    def _reachable(self) -> int:
        """The number of ranks that the run can have on the hosts that take part now."""
        if not self._has_hosts:
            return self._wanted
        shares = self._shares
        return sum(shares[host] for host in self._ranks.present)

    @property
    def _has_hosts(self) -> bool:
        return self._nnodes > 1

    def _place_members(self, count: int) -> list[RankPlace]:
        """Return the places of `count` new members that begin a round together."""
        present = self._ranks.present
        shares = zip(present, share_ranks(count, len(present)), strict=True)
        return find_places([host for host, share in shares for _ in range(share)])

    def _place_newcomer(self, rank: int) -> RankPlace:
        """Return the place of a member that joins: the rank and the world that it expects."""
        others = Counter(map(self._ranks.host_of, [*self._alive, *self._newcomers]))
        host = choose_host(self._shares, self._ranks.present, others)
        hosts = [each for each in range(self._nnodes) for _ in range(others[each])]
        host = 0 if host is None else host
        return replace(find_places([*hosts, host])[-1], rank=rank, world_size=rank + 1)

    # --- ends ---------------------------------------------------------------------------------

    def _notice_end(self, member: int, outcome: Outcome) -> None:
        """Record that a member has ended, or is about to because it lost another one."""
        if outcome.error is not None and member in self.members:
            # If no member turns out to be dead, a lost connection counts as a failure later.
            outcome.is_replaced |= is_consequence(outcome) or self._is_writing(member)
        if outcome.status is None:
            outcome.is_replaced |= outcome.error is not None and member in self._newcomers
            return
        if member in self._leaving:
            del self._leaving[member]
            self._ranks.release(member)
        elif member in self._newcomers:
            is_ours = member not in self._ranks.pids or outcome.status == 0
            is_failure = not (is_ours or outcome.was_killed)
            self._ranks.release(member)
            self._newcomers.note_end(member, outcome, is_failure=is_failure)
        elif outcome.status == 0:
            self._round.done.add(member)
        elif outcome.was_killed:
            self._lose(member, outcome, -outcome.status)
        elif self._is_writing(member) or (outcome.is_replaced and self._round.lost):
            self._lose(member, outcome, 0)

    def _lose(self, member: int, outcome: Outcome, number: int) -> None:
        self._round.lose(member, number)
        if number and not outcome.lost_with:
            say(f"member {member} {describe_end(outcome)}")
        self._ranks.release(member)
        self._tell_lost(member, self._alive)

    def _tell_lost(self, member: int, others: Iterable[int]) -> None:
        """Tell members that one has left the round: over a network, a rank may not notice it."""
        for each in others:
            self._ranks.send(each, {"kind": "lost", "round": self.number, "member": member})

    def _reconsider_consequences(self) -> None:
        """Count lost connections as failures if no member has died within a moment."""
        if any(self._round.lost.values()) or self._handover is not None:
            return
        for member in self.members:
            outcome = self._ranks.outcomes[member]
            if outcome.is_replaced and outcome.error is not None and member not in self._round.lost:
                is_late = time.monotonic() - outcome.error["time"] >= SETTLE
                outcome.is_replaced = not is_late and bool(self._ranks.running)

    def _kill_late_leavers(self) -> None:
        for member, deadline in self._leaving.items():
            if time.monotonic() >= deadline:
                self._ranks.end_ranks([member], signal.SIGKILL)

    def _kill_stuck_members(self) -> None:
        for member, lost in self._round.find_stuck(self._alive, self._ranks.probes.read_activity):
            if member not in self._stuck:
                self._stuck.add(member)
                say(f"member {member} still waits for member {lost}: it is replaced")
                self._ranks.send_signal(member, signal.SIGKILL)

    def _read_request(self) -> None:
        """Read the number of ranks that `lockstep scale` has asked for."""
        wanted = None if self._folder is None else take_request(self._folder)
        if wanted is None:
            return
        try:
            check_open_files(max(0, wanted - len(self._alive)))
        except UsageError as error:
            say(f"lockstep scale: {error}")
            return
        self._wanted = max(wanted, self._at_least)
        self._newcomers.permit()
        say(f"the run gets {format_quantity(self._wanted, 'rank')} at its next safe point")

    # --- the next round -----------------------------------------------------------------------

    def _form_round(self) -> None:
        alive = self._alive
        if not alive:
            self._follow_last_member()
        elif alive and all(member in self._round.reports for member in alive):
            is_admission = self._round.is_admission
            is_late = self._round.seconds_since_report >= SETTLE
            if is_late and not (self._round.lost or is_admission):
                self._unexplained += 1
                if self._round.done or self._unexplained == MAX_ROUNDS:
                    self._fail(_describe_unexplained(self._round.done))
                    return
            if self._round.lost or is_admission or is_late:  # a busy machine may connect too late
                self._plan([self._round.reports[member] for member in alive])
        elif any(
            set(self._ranks.outcomes[each].waiting_for) & self._round.lost.keys() for each in alive
        ):
            self._restart()
        elif self._round.noticed is not None and all(map(self._has_not_begun, alive)):
            if time.time() - self._round.noticed >= REPORT_TIMEOUT:
                self._restart()
        elif self._round.lost and has_to_be_replaced([*self._round.reports.values()]):
            self._replace_silent_members([*self._round.reports.values()])

    def _has_not_begun(self, member: int) -> bool:
        """Return whether a member has no operation to report yet: it may be waiting in `init`."""
        return not self._ranks.has_begun(member) and member not in self._round.reports

    def _replace_silent_members(self, reports: Sequence[Report]) -> None:
        """Stop waiting for members that do not report, if the others have waited long enough."""
        plan = plan_round(reports, wanted=self._wanted)
        waited = self._round.seconds_since_report
        if isinstance(plan, HandOver) and waited >= REPORT_SETTLE:
            self._execute(plan)
        elif waited >= REPORT_TIMEOUT:
            self._restart()

    def _follow_last_member(self) -> None:
        """Restart if every member of the round has ended and some were killed."""
        if self._round.lost and self.members[0] not in self._round.done and not self._is_stopping:
            self._restart()

    def _plan(self, reports: Sequence[Report]) -> None:
        is_ending = self._is_stopping or bool(self._round.done)
        plan = plan_round(
            reports,
            [] if is_ending else self._newcomers.ready,
            wanted=self._wanted,
            at_least=1 if is_ending else self._at_least,
        )
        self._can_stay = not has_to_be_replaced(reports)
        self._stages = max(report.stages for report in reports)
        if plan is None and not self._start_newcomers(len(reports)):
            left = f"{format_quantity(len(reports), 'rank')} left, fewer than --min "
            why = "the processes that were started to replace the others ended before they joined"
            if self._reachable <= len(reports):
                why = "the hosts that are left have all of their ranks"
            self._fail(f"{left}{self._at_least}, and {why}")
        elif plan is not None:
            self._execute(plan)

    def _execute(self, plan: Plan) -> None:
        if isinstance(plan, Continue):
            self._continue(plan)
        elif isinstance(plan, HandOver):
            self._begin_handover(plan)
        else:
            self._restart(plan.world_size)

    def _continue(self, plan: Continue) -> None:
        """Tell the members their ranks in the next round."""
        members = order_by_host(
            [each for each in plan.members if each not in plan.joined],
            plan.joined,
            self._ranks.host_of,
        )
        message = {
            "kind": "round",
            **self._round.describe_end(),
            "world_size": len(members),
            "hosts": [self._ranks.host_of(member) for member in members],
            "newcomers": [members.index(member) for member in plan.joined],
            "store": self._environment.store,
            "operation": plan.operation,
            "commit": plan.commit,
            "joined": list(plan.joined),
            "left": list(plan.left),
        }
        for member in plan.joined:
            self._newcomers.remove(member)
        self._dismiss(plan.left)
        self._round = self._round.follow(members)
        for rank, member in enumerate(members):
            self._ranks.outcomes[member].rank_in_world = rank
            self._ranks.outcomes[member].is_outside = False
            pids = [self._ranks.find_pid(each, member) for each in members]
            self._ranks.send(member, {**message, "rank": rank, "pids": pids})
        say(f"round {self.number}: {plan.describe()}")

    def _fail(self, reason: str) -> None:
        self._error = RankError(f"round {self.number}: {reason}")

    # --- newcomers ----------------------------------------------------------------------------

    def _fill_up(self) -> None:
        """Start and announce newcomers, or announce that members have to leave."""
        if self._replacement or self._handover or self._round.lost or self._round.reports:
            return
        if self._can_stay:
            self._start_newcomers(len(self.members))
            surplus = len(self.members) + len(self._newcomers) - self._wanted
            if surplus > 0:
                self._dismiss([*self._newcomers][-surplus:])
            count = len(self._newcomers.ready) or len(self.members) - self._wanted
        else:
            count = abs(choose_world_size(self._reachable, self._stages) - len(self.members))
        self._notify(max(0, count))

    def _notify(self, count: int) -> None:
        """Send rank 0 the number of newcomers that wait, or of members to leave, once per round."""
        first = self.members[0]
        was_told = self._told[0] == first and self._told[2]
        if (count and self._told != (first, self.number, True)) or (not count and was_told):
            self._told = (first, self.number, bool(count))
            self._ranks.send(first, {"kind": "newcomers", "round": self.number, "count": count})

    def _start_newcomers(self, members: int) -> bool:
        """Start the newcomers that are missing beside `members`; return whether any will join."""
        return self._newcomers.start_missing(members, self._reachable)

    def _start_newcomer(self, rank: int) -> int:
        environment = replace(self._environment, store="")
        member = self._start_member(self._place_newcomer(rank), environment, {JOIN: "1"})
        self._ranks.outcomes[member].is_outside = True
        return member

    def _start_member(
        self, place: RankPlace, environment: RankEnvironment, variables: dict[str, str]
    ) -> int:
        member, self._next_member = self._next_member, self._next_member + 1
        count = {"TORCHELASTIC_RESTART_COUNT": str(self.number)}
        common = self._backend if self._has_hosts else self._states.variables()
        own = {ELASTIC: "1", MEMBER: str(member), **common}
        of_place = {**environment.variables(0), **place.variables()}
        self._start(member, place, {**of_place, **count, **own, **variables})
        return member

    def _dismiss(self, members: Iterable[int]) -> None:
        """Let members exit that wait for a message; the others have nothing to save."""
        for member in [*members]:
            is_newcomer = member in self._newcomers
            if self._newcomers.remove(member) if is_newcomer else member in self._round.reports:
                self._ranks.send(member, {"kind": "leave"})
            else:
                self._ranks.end_ranks([member], signal.SIGKILL)
            self._leaving[member] = time.monotonic() + LEAVE_TIMEOUT

    # --- new processes ------------------------------------------------------------------------

    def _begin_handover(self, plan: HandOver) -> None:
        self._handover = StateTransfer(plan, self._states.begin_hand_over(), self._ranks.send)

    def _is_writing(self, member: int) -> bool:
        return self._handover is not None and member in self._handover.writers

    def _follow_handover(self, handover: StateTransfer) -> None:
        """Start new processes as soon as the state is written, or can no longer be written."""
        is_complete = handover.follow(self._alive)
        if is_complete is None:
            return
        self._handover = None
        if is_complete:
            self._states.complete_hand_over(handover.writers, handover.checkpoints)
        else:
            self._states.discard()
        self._restart(handover.world_size)

    def _restart(self, world_size: int | None = None) -> None:
        """End all processes, to start new ones (by default `wanted`) from the newest state."""
        if self._states.count_fruitless() > MAX_ROUNDS:
            self._fail(f"{MAX_ROUNDS} rounds in a row were replaced before they had saved a state")
            return
        world_size = world_size or choose_world_size(self._reachable, self._stages)
        end = self._round.describe_end()
        self._interrupted = self._interrupted or end["noticed"]
        origin = RestartSource(
            **end,
            interrupted=self._interrupted,
            joined=[*range(self._next_member, self._next_member + world_size)],
            # Including members that exited by themselves after they had handed over their state.
            left=[member for member in self.members if member not in self._round.lost],
            writers=self._states.writers,
            state=self._states.handed_over,
        )
        self._dismiss([*self._alive, *self._newcomers])
        for member in self.members:
            if member not in self._leaving and member not in self._round.lost:
                self._ranks.release(member)
        self._round.clear()
        self._replacement = origin
        self._replace(origin)

    def _replace(self, origin: RestartSource) -> None:
        """Start the new processes as soon as the old ones have exited."""
        if self._leaving or self._is_stopping:
            return
        self._replacement = None
        if self._environment.store:
            store = self._ranks.stores.create()
            self._ranks.stores.close_private(self._environment.store)
            self._environment = replace(self._environment, store=store)
        self._round = self._round.follow(())
        self._resumed.clear()
        variables = {RESUME: "1"} if self._folder is not None else {}
        variables |= origin.variables()
        say(f"round {self.number}: {format_quantity(len(origin.joined), 'rank')}, in new processes")
        self._start_members(len(origin.joined), variables)

    def _start_members(self, count: int, variables: dict[str, str]) -> None:
        self._round.members = tuple(range(self._next_member, self._next_member + count))
        for place in self._place_members(count):
            member = self._start_member(place, self._environment, variables)
            self._ranks.outcomes[member].rank_in_world = place.rank


def _describe_unexplained(done: set[int]) -> str:
    if done:
        who = format_numbered("member", sorted(done))
        return f"{who} returned while others still waited for it"
    return "every rank lost the connection to others, but none of them has ended"
