"""The rounds of an elastic run, as its launcher forms them.

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
                      handed_over  its part of the state is written
                      resumed      a new process has read the state that was handed over
    to a member       newcomers    {round, count}: let all ranks report at the next safe point; 0
                                   if no newcomer waits any more
                      lost         {round, member}: a member of this round is gone
                      round        {round, rank, world_size, pids, store, operation, commit, lost,
                                   joined, left, noticed}: the next round; `pids` are by rank, and
                                   `noticed` is when the launcher learned why it is formed
                      hand_over    {folder, operation, commit}: write the state there and exit
                      leave        exit with status 0

A member that exits with status 0 has come to the end of its script. Only a signal begins a new
round; another failure ends the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.elastic.round_origin import RoundOrigin, StateFolder
from lockstep.elastic.round_plan import (
    Continue,
    HandOver,
    Plan,
    Report,
    choose_world_size,
    plan_round,
)
from lockstep.elastic.scale_request import take_request
from lockstep.errors import RankError, UsageError
from lockstep.formatting import format_numbered, format_quantity
from lockstep.launcher.channel import Message
from lockstep.launcher.environment import ELASTIC, JOIN, MEMBER, RankEnvironment
from lockstep.launcher.failure_attribution import Outcome, describe_end, is_consequence
from lockstep.launcher.fork_server import check_open_files
from lockstep.launcher.run_folder import RESUME
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import say

__all__ = ["Rounds", "StartMember"]

CHECKPOINTS = "checkpoints"  # in the run's folder

LEAVE_TIMEOUT = 5.0  # seconds that a member has to exit when it was told to
HANDOVER_TIMEOUT = 120.0  # seconds that members have to write their state
# Seconds that members have to report before they are replaced: a backend whose connections cannot
# be closed keeps ranks waiting for one that has reported. The first is for those that are not
# needed, because others can hand over the state.
REPORT_SETTLE, REPORT_TIMEOUT = 0.5, 10.0
SETTLE = 2.0  # seconds in which the death of a member explains that others lost a connection
MAX_DEATHS = 5  # of newcomers in a row that were not ready, or of rounds that saved nothing

StartMember = Callable[[int, int, dict[str, str]], None]
"""Starts a process: its number as a member, its rank, and variables for its environment."""


@dataclass
class RunningHandOver:
    """The state that members write for the processes that will replace them.

    Attributes:
        plan: The plan.
        folder: Where it is written.
        deadline: When it counts as failed.
        writing: For each position, the member that writes it.
        written: The members that have written their part.
    """

    plan: HandOver
    folder: Path
    deadline: float
    writing: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)


class Rounds:
    """Forms the rounds of a run, and starts its members.

    Args:
        ranks: Supervises the members; their numbers are its ranks.
        start: Starts a member.
        environment: The variables of the first round.
        wanted: Number of ranks that the run should have.
        at_least: Number of ranks that it must have.
        folder: The run's folder.
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
    ) -> None:
        if not environment.store:
            raise UsageError("--min and --max: elastic runs need Linux")
        self.number = 0
        self.members: tuple[int, ...] = ()
        self._ranks, self._start, self._environment = ranks, start, environment
        self._wanted, self._at_least, self._folder = wanted, at_least, folder
        self._next_member = 0
        self._newcomers: dict[int, bool] = {}  # whether they are ready
        self._leaving: dict[int, float] = {}  # when they are killed
        self._reports: dict[int, Report] = {}
        self._lost: dict[int, int] = {}  # the signals
        self._done: set[int] = set()
        self._noticed: float | None = None  # unix time
        self._reported = 0.0  # when the last report came
        self._told = (-1, 0, False)  # which member, in which round, and whether anybody waits
        self._can_stay, self._stages = True, 1  # as last reported
        self._newcomer_deaths = 0
        self._states = StateFolder()
        ranks.remove_at_end(str(self._states.path))
        self._replacement: RoundOrigin | None = None  # of the next round, once all have exited
        self._handover: RunningHandOver | None = None
        self._handed_over: Path | None = None
        self._writers: list[int] = []  # of what was handed over
        self._unexplained = 0  # rounds that ended although nobody had died
        self._restarts, self._saved = 0, self._list_states()
        self._resumed: set[int] = set()
        self._error: RankError | None = None
        self._has_ended = False
        ranks.settle_killed = 0.0
        ranks.after_events, ranks.before_end = self.advance, self.dismiss_waiting
        ranks.on_report = self._on_report

    def begin(self) -> None:
        """Start the members of the first round."""
        self._start_members(self._wanted, {})

    def close(self) -> None:
        """Remove mirrors, and what was handed over."""
        self._states.remove()

    def _discard_handover(self) -> None:
        written = None if self._handover is None else self._handover.folder
        for folder in (self._handed_over, written):
            if folder is not None:
                self._states.discard(folder)
        self._handed_over = self._handover = None
        self._writers = []

    # --- what happens -------------------------------------------------------------------------

    def advance(self) -> RankError | None:
        """Notice what has happened, and form the next round as soon as it can be.

        Returns:
            Why the run cannot go on, if so.
        """
        if self._ranks.has_fork_server:
            self._advance()
        return self._error

    def dismiss_waiting(self) -> None:
        """Let the members exit that wait for a message: SIGTERM does not wake them."""
        self._has_ended = True
        for member in [*self._reports, *self._newcomers]:
            self._ranks.send(member, {"kind": "leave"})

    def _advance(self) -> None:
        for member in [*self._running_or_ended()]:
            self._notice_end(member, self._ranks.outcomes[member])
        self._reconsider_consequences()
        self._kill_late_leavers()
        self._read_request()
        if self._replacement is not None:
            self._replace(self._replacement)
        elif self._handover is not None:
            self._follow_handover(self._handover)
        elif self._is_stopping or self._done:
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
        """The members of this round that run, by rank."""
        return [
            member
            for member in self.members
            if member not in self._lost and self._ranks.outcomes[member].status is None
        ]

    def _running_or_ended(self) -> list[int]:
        """Return the members whose end has not been noticed."""
        ended = self._lost.keys() | self._done
        here = [member for member in self.members if member not in ended]
        return [*here, *self._newcomers, *self._leaving]

    def _on_report(self, member: int, message: Message) -> bool:
        kind = message["kind"]
        if kind == "waiting":  # for ranks of a world; the supervisor knows members
            members = [m for rank, m in enumerate(self.members) if rank in message["ranks"]]
            is_member = member in self.members
            self._ranks.outcomes[member].waiting_for = tuple(members) if is_member else ()
        elif kind == "ready" and member in self._newcomers:
            self._newcomers[member] = True
            self._newcomer_deaths = 0
        elif kind == "round_over" and member in self.members and message["round"] == self.number:
            self._reports[member] = Report.from_message(member, message)
            self._reported = time.monotonic()
        elif kind == "handed_over" and self._handover is not None:
            self._handover.written.add(member)
        elif kind == "resumed":
            self._resumed.add(member)
            is_busy = self._replacement is not None or self._handover is not None
            if self._resumed.issuperset(self.members) and not is_busy:
                self._discard_handover()
        if self._has_ended and kind in ("ready", "round_over"):
            self._ranks.send(member, {"kind": "leave"})
        return kind in ("waiting", "ready", "round_over", "handed_over", "resumed")

    def _notice_end(self, member: int, outcome: Outcome) -> None:
        """Notice that a member has ended, or is about to because it lost another one."""
        if outcome.status is None:
            if outcome.error is not None and member in self._newcomers:
                outcome.is_replaced = True
            elif outcome.error is not None and member in self.members:
                # A lost connection is a failure after all if no member turns out to be dead.
                outcome.is_replaced |= is_consequence(outcome) or self._is_writing(member)
            return
        if member in self._leaving:
            del self._leaving[member]
            self._ranks.release(member)
        elif member in self._newcomers:
            self._notice_end_of_newcomer(member, outcome)
        elif outcome.status == 0:
            self._done.add(member)
        elif _was_killed(outcome):
            self._lose(member, outcome, -outcome.status)
        elif self._is_writing(member) or (outcome.is_replaced and self._lost):
            self._lose(member, outcome, 0)

    def _notice_end_of_newcomer(self, member: int, outcome: Outcome) -> None:
        """Note the end of a newcomer, also by an exception: the others go on without it."""
        is_ready, how = self._newcomers.pop(member), describe_end(outcome)
        has_failed = outcome.status != 0 and not _was_killed(outcome) and member in self._ranks.pids
        self._newcomer_deaths += MAX_DEATHS if has_failed else not is_ready
        self._ranks.release(member)
        what = f"member {member} {how} before it joined the others"
        if has_failed:
            what = f"member {member} did not join the others, which go on without it: it {how}"
        elif self._newcomer_deaths >= MAX_DEATHS:
            what += f", as {MAX_DEATHS - 1} before it"
        is_last = self._newcomer_deaths >= MAX_DEATHS
        say(f"{what}; no more are started until you run: lockstep scale" if is_last else what)

    def _lose(self, member: int, outcome: Outcome, number: int) -> None:
        self._lost[member] = number
        self._reports.pop(member, None)
        if self._noticed is None:
            self._noticed = time.time()
        if number:
            say(f"member {member} {describe_end(outcome)}")
        self._ranks.release(member)
        for each in self._alive:
            self._ranks.send(each, {"kind": "lost", "round": self.number, "member": member})

    def _reconsider_consequences(self) -> None:
        """Count lost connections as failures if no member has died within a moment."""
        if any(self._lost.values()) or self._handover is not None:
            return
        for member in self.members:
            outcome = self._ranks.outcomes[member]
            if outcome.is_replaced and outcome.error is not None and member not in self._lost:
                is_late = time.monotonic() - outcome.error["time"] >= SETTLE
                outcome.is_replaced = not is_late and bool(self._ranks.running)

    def _kill_late_leavers(self) -> None:
        for member, deadline in self._leaving.items():
            if time.monotonic() >= deadline:
                self._ranks.end_ranks([member], signal.SIGKILL)

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
        self._wanted, self._newcomer_deaths = max(wanted, self._at_least), 0
        say(f"the run gets {format_quantity(self._wanted, 'rank')} at its next safe point")

    # --- the next round -----------------------------------------------------------------------

    def _form_round(self) -> None:
        alive = self._alive
        if not alive:
            self._follow_last_member()
        elif alive and all(member in self._reports for member in alive):
            is_admission = all(report.is_admission for report in self._reports.values())
            is_late = time.monotonic() - self._reported >= SETTLE
            if is_late and not (self._lost or is_admission):
                self._unexplained += 1
                if self._done or self._unexplained == MAX_DEATHS:
                    self._fail(_describe_unexplained(self._done))
                    return
            if self._lost or is_admission or is_late:  # a busy machine may connect too late
                self._plan([self._reports[member] for member in alive])
        elif any(set(self._ranks.outcomes[each].waiting_for) & self._lost.keys() for each in alive):
            self._restart()
        elif self._noticed is not None and all(map(self._has_not_begun, alive)):
            if time.time() - self._noticed >= REPORT_TIMEOUT:
                self._restart()
        elif self._lost and _has_to_be_replaced([*self._reports.values()]):
            self._replace_silent_members([*self._reports.values()])

    def _has_not_begun(self, member: int) -> bool:
        """Return whether a member has nothing to report: it may wait for a dead one in init."""
        is_silent = self._ranks.read_activity(member).number == 0
        return is_silent and member not in self._reports

    def _replace_silent_members(self, reports: Sequence[Report]) -> None:
        """Stop waiting for the others; those that reported have prepared what these committed."""
        plan = plan_round(reports, wanted=self._wanted)
        waited = time.monotonic() - self._reported
        if isinstance(plan, HandOver) and waited >= REPORT_SETTLE:
            self._execute(plan)
        elif waited >= REPORT_TIMEOUT:
            self._restart()

    def _follow_last_member(self) -> None:
        """Go on after every member of the round has ended, and some were killed."""
        if self._lost and self.members[0] not in self._done and not self._is_stopping:
            self._restart()

    def _plan(self, reports: Sequence[Report]) -> None:
        ready = [member for member, is_ready in self._newcomers.items() if is_ready]
        is_ending = self._is_stopping or bool(self._done)
        plan = plan_round(
            reports,
            [] if is_ending else ready,
            wanted=self._wanted,
            at_least=1 if is_ending else self._at_least,
        )
        self._can_stay = not _has_to_be_replaced(reports)
        self._stages = max(report.stages for report in reports)
        if plan is None and not self._start_newcomers():
            self._fail(
                f"{format_quantity(len(reports), 'rank')} left, fewer than --min "
                f"{self._at_least}, and those that were started to replace the others did not live "
                f"long enough to join",
            )
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
        message = {
            "kind": "round",
            **self._describe_end(),
            "world_size": len(plan.members),
            "pids": [self._ranks.pids.get(member, 0) for member in plan.members],
            "store": self._environment.store,
            "operation": plan.operation,
            "commit": plan.commit,
            "joined": list(plan.joined),
            "left": list(plan.left),
        }
        for member in plan.joined:
            del self._newcomers[member]
        self._dismiss(plan.left)
        self._begin_round(plan.members)
        for rank, member in enumerate(plan.members):
            self._ranks.send(member, {**message, "rank": rank})
        changes = [
            f"{format_numbered('member', plan.joined)} joined" if plan.joined else "",
            f"{format_numbered('member', plan.left)} left" if plan.left else "",
        ]
        why = " and ".join(change for change in changes if change)
        size = format_quantity(len(plan.members), "rank")
        say(f"round {self.number}: {size}" + (f", {why}" if why else ""))

    def _describe_end(self) -> dict[str, Any]:
        """Return the number of the next round, and why this one is over."""
        return {
            "round": self.number + 1,
            "lost": [{"member": each, "signal": number} for each, number in self._lost.items()],
            "noticed": time.time() if self._noticed is None else self._noticed,
        }

    def _begin_round(self, members: tuple[int, ...]) -> None:
        self.number += 1
        self.members = members
        self._reports.clear()
        self._lost.clear()
        self._noticed = None

    def _fail(self, reason: str) -> None:
        self._error = RankError(f"round {self.number}: {reason}")

    # --- newcomers ----------------------------------------------------------------------------

    def _fill_up(self) -> None:
        """Start and announce newcomers, or announce that members have to leave."""
        if self._replacement or self._handover or self._lost or self._reports:
            return
        if self._can_stay:
            self._start_newcomers()
            surplus = len(self.members) + len(self._newcomers) - self._wanted
            if surplus > 0:
                self._dismiss([*self._newcomers][-surplus:])
            count = sum(self._newcomers.values()) or len(self.members) - self._wanted
        else:
            count = abs(choose_world_size(self._wanted, self._stages) - len(self.members))
        self._notify(max(0, count))

    def _notify(self, count: int) -> None:
        """Tell rank 0 how many newcomers wait, or members have to leave, once in each round."""
        first = self.members[0]
        was_told = self._told[0] == first and self._told[2]
        if (count and self._told != (first, self.number, True)) or (not count and was_told):
            self._told = (first, self.number, bool(count))
            self._ranks.send(first, {"kind": "newcomers", "round": self.number, "count": count})

    def _start_newcomers(self) -> bool:
        """Start the newcomers that are missing; return whether any will join."""
        count = len(self._alive) + len(self._newcomers)
        while count < self._wanted and self._newcomer_deaths < MAX_DEATHS:
            count += 1
            variables = replace(self._environment, nprocs=count, store="").variables(count - 1)
            self._newcomers[self._next_member] = False
            self._start_member(count - 1, {**variables, JOIN: "1"})
        return bool(self._newcomers)

    def _start_member(self, rank: int, variables: dict[str, str]) -> None:
        member, self._next_member = self._next_member, self._next_member + 1
        count = {"TORCHELASTIC_RESTART_COUNT": str(self.number)}
        own = {ELASTIC: "1", MEMBER: str(member), **self._states.variables()}
        self._start(member, rank, {**variables, **count, **own})

    def _dismiss(self, members: Iterable[int]) -> None:
        """Let members exit that wait for a message; the others have nothing to save."""
        for member in [*members]:
            if self._newcomers.pop(member, member in self._reports):
                self._ranks.send(member, {"kind": "leave"})
            else:
                self._ranks.end_ranks([member], signal.SIGKILL)
            self._leaving[member] = time.monotonic() + LEAVE_TIMEOUT

    # --- new processes ------------------------------------------------------------------------

    def _begin_handover(self, plan: HandOver) -> None:
        self._discard_handover()
        folder = self._states.begin_hand_over()
        self._handover = RunningHandOver(plan, folder, time.monotonic() + HANDOVER_TIMEOUT)
        for position, writers in enumerate(plan.writers):
            self._ask_to_write(self._handover, position, writers[0])

    def _ask_to_write(self, handover: RunningHandOver, position: int, member: int) -> None:
        handover.writing[position] = member
        message = {
            "kind": "hand_over",
            "folder": str(handover.folder),
            "operation": handover.plan.operation,
            "commit": handover.plan.commit,
        }
        self._ranks.send(member, message)

    def _is_writing(self, member: int) -> bool:
        return self._handover is not None and member in self._handover.writing.values()

    def _follow_handover(self, handover: RunningHandOver) -> None:
        """Wait until each part is written; another member writes what a killed one could not."""
        world_size = handover.plan.world_size
        for position, member in list(handover.writing.items()):
            if member not in self._alive and member not in handover.written:
                others = [each for each in handover.plan.writers[position] if each in self._alive]
                if others:
                    self._ask_to_write(handover, position, others[0])
                else:
                    self._discard_handover()
                    self._restart(world_size)
                    return
        if handover.written.issuperset(handover.writing.values()):
            self._handover, self._handed_over = None, handover.folder
            self._writers = sorted(handover.writing.values())
            self._restart(world_size)
        elif time.monotonic() >= handover.deadline:
            self._discard_handover()
            self._restart(world_size)

    def _restart(self, world_size: int | None = None) -> None:
        """End all processes, to start others (or as many as are wanted) from the newest state."""
        states = self._list_states()
        is_further = bool(states) and states != self._saved
        self._restarts, self._saved = 1 if is_further else self._restarts + 1, states
        if self._restarts > MAX_DEATHS:
            self._fail(f"{MAX_DEATHS} rounds in a row were replaced before they had saved a state")
            return
        world_size = world_size or choose_world_size(self._wanted, self._stages)
        origin = RoundOrigin(
            **self._describe_end(),
            joined=[*range(self._next_member, self._next_member + world_size)],
            left=self._alive,
            writers=self._writers,
            state=self._handed_over,
        )
        self._dismiss([*self._alive, *self._newcomers])
        for member in self.members:
            if member not in self._leaving and member not in self._lost:
                self._ranks.release(member)
        self.members = ()
        self._lost.clear()
        self._done.clear()
        self._replacement = origin
        self._replace(origin)

    def _replace(self, origin: RoundOrigin) -> None:
        """Start the new processes as soon as those that they replace have exited."""
        if self._leaving or self._is_stopping:
            return
        self._replacement = None
        store = self._ranks.create_store()
        self._ranks.close_store(self._environment.store)
        self._environment = replace(self._environment, store=store)
        self._begin_round(())
        self._resumed.clear()
        variables = {RESUME: "1"} if self._folder is not None else {}
        variables |= origin.variables()
        say(f"round {self.number}: {format_quantity(len(origin.joined), 'rank')}, in new processes")
        self._start_members(len(origin.joined), variables)

    def _start_members(self, count: int, variables: dict[str, str]) -> None:
        environment = replace(self._environment, nprocs=count)
        self.members = tuple(range(self._next_member, self._next_member + count))
        for rank in range(count):
            self._start_member(rank, {**environment.variables(rank), **variables})

    def _list_states(self) -> set[str]:
        """Return the names of the states from which new processes could continue."""
        folders = [] if self._folder is None else [self._folder / CHECKPOINTS]
        folders += [*self._states.mirror.glob("*")]
        folders += [] if self._handed_over is None else [self._handed_over]
        return {each.name for folder in folders for each in folder.glob("step-*")}


def _has_to_be_replaced(reports: Sequence[Report]) -> bool:
    """Return whether members cannot go on in their processes, other than new ones."""
    return any(report.has_state and not report.can_stay for report in reports)


def _was_killed(outcome: Outcome) -> bool:
    """Return whether a signal killed a member that the launcher had not asked to stop."""
    if outcome.status is None or outcome.status >= 0:
        return False
    return not (outcome.was_terminated and outcome.status == -signal.SIGTERM)


def _describe_unexplained(done: set[int]) -> str:
    if done:
        who = format_numbered("member", sorted(done))
        return f"{who} returned while others still waited for it"
    return "every rank lost the connection to others, but none of them has ended"
