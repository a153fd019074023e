"""A rank's side of an elastic run: operations that are repeated if a peer is lost.

An operation is one thing that all ranks do together: a step, an evaluation, an exchange of bytes.
All ranks number them alike. Each has three parts:

    prepare    what ranks compute together; it has no lasting effect
    barrier    a rank passes it only when every rank has prepared
    commit     local, and lasting: the optimizer, counters

    rank 0   prepare n ──────┐         ┌─ commit n ── prepare n+1 ── lost: reports n+1
    rank 1   prepare n ────┐ │ barrier │ lost: reports n, prepared ── told to commit n ── n+1
    rank 2   prepare n ──────┘         └─ commit n ── SIGKILL

    rank 0   prepare n ────┐ lost: reports n, prepared ─────── told to repeat n: undo, prepare n
    rank 1   prepare n ──── lost: reports n, not prepared ──── told to repeat n: undo, prepare n
    rank 2   prepare n ── SIGKILL

If any rank has committed n, every rank can commit it. The launcher gets the reports of all
surviving ranks and tells the others to commit n; if no rank has committed n, all repeat it
(`round_plan.py`). A period with fixed members is a round. At its end a rank leaves the group at
once, so that ranks that still wait for it notice, and joins the group of the next round:

    rank       leaves the group ── round_over ──┐             ┌── round ── joins the new group
    launcher                                    └─ all, dead ─┘

A newcomer is alone until the first call of its trainer. Then it reports that it is ready, joins
a round that begins at a safe point of all others, and gets the state from one of them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
)

from lockstep.comm.backend import refuse_calls
from lockstep.comm.collectives import gather_unless_equal
from lockstep.elastic.launcher_inbox import LauncherInbox
from lockstep.elastic.restart_source import find_restart_source
from lockstep.kernel.errors import RendezvousError, WorkError
from lockstep.launcher.environment import ELASTIC, JOIN, MEMBER, is_elastic_on_hosts
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.launcher.private_store import attach_store
from lockstep.launcher.rank_process import (
    exit_process,
    has_launcher,
    receive_from_launcher,
    report_to_launcher,
)
from lockstep.launcher.rendezvous import open_common_store
from lockstep.launcher.world import get_timeout, leave_round, rejoin

__all__ = [
    "Membership",
    "Participant",
    "Round",
    "TransferOrder",
    "exchange",
    "membership",
    "run_transaction",
]

REFUSAL = (
    "an elastic run cannot repeat a script's own collective calls after a rank is lost: leave "
    "communication to the steps, make these calls before the training is set up or after "
    "finish(), or run without --min and --max"
)

ATTEMPTS = 3
"""Number of attempts to connect to the other ranks while none of them has died."""

Value = TypeVar("Value")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Round:
    """A round, as decided by the launcher.

    Attributes:
        number: Its number, from 0.
        rank: This process's rank in it.
        world_size: The number of ranks.
        store: The address of the run's private store.
        operation: The operation at which it begins, or which some members have to commit first.
        commit: Whether members that prepared that operation commit it; otherwise they repeat it.
        lost: The members that died, and the signals: [{"member": 2, "signal": 9}].
        joined: The members that are new.
        left: The members that had to leave.
        noticed: When the launcher noticed the end of the previous round, in Unix time.
        pids: The process ids by rank, 0 for those on other hosts; empty if the launcher does not
            send them.
        hosts: The index of the host of each rank; empty if all are on one host.
        newcomers: The ranks of the members that are new.
    """

    number: int
    rank: int
    world_size: int
    store: str
    operation: int
    commit: bool
    lost: tuple[dict[str, Any], ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    noticed: float = 0.0
    pids: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Round:
        """Parse the launcher's message."""
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in message.items()
            if name in names
        }
        return cls(number=message["round"], **values)


@dataclass(frozen=True)
class TransferOrder:
    """The order to write the state for a process that replaces this one.

    Attributes:
        operation: As for `Round`.
        commit: As for `Round`; if True, the state is written at the next safe point.
        folder: The folder to write to.
    """

    operation: int
    commit: bool
    folder: Path


Decision = Round | TransferOrder


class Participant(Protocol):
    """An object that takes part in the rounds: a trainer."""

    @property
    def can_stay(self) -> bool:
        """Whether this process can continue in the next round."""

    @property
    def can_transfer_state(self) -> bool:
        """Whether this rank can write its state now, for a process that replaces it."""

    @property
    def part(self) -> tuple[int, int]:
        """The part of the state that this rank holds, and the number of parts."""

    @property
    def microbatches(self) -> int:
        """The number of micro-batches, for ranks that take turns at them; 0 for others."""

    def enter_round(self, new: Round) -> None:
        """Take the layout of a round, whose group this process has joined.

        Where members have joined, the first rank gives them its state: a collective call.
        """

    def transfer_state(self, folder: Path) -> None:
        """Write this rank's part of the state, as it was at the latest safe point."""

    def leave(self) -> None:
        """Give up what is being written, before this process ends."""

    def continue_round(self, new: Round, undone: float | None) -> None:
        """Continue in a round that repeats `undone` seconds of work; None: it repeats nothing."""


class _RoundFailed(Exception):
    """Another member died while a round was formed."""


# It has many attributes: a decision of the launcher changes most of them at once.
class Membership:
    """This process as a member of an elastic run.

    Args:
        number: The member's number, which is unique in the run.
        first_round: The number of the round that the process begins in.
        is_newcomer: Whether the process joins a run that has already started.
        spans_hosts: Whether the run is on several hosts.

    Attributes:
        spans_hosts: Whether the run is on several hosts.
        operation: The number of the current operation, or of the next one.
        round: The number of the current round.
        newcomers: The number of newcomers that wait; known to rank 0 only.
        has_state: Whether this process has the state of the training.
        transfer_folder: The folder to which the state is written at the next safe point, before
            the process ends; None if the process continues.
        has_left: Whether this process is ending while others continue the run.
    """

    def __init__(
        self,
        number: int,
        first_round: int = 0,
        is_newcomer: bool = False,
        spans_hosts: bool = False,
    ) -> None:
        self.number = number
        self.has_state = not is_newcomer
        self.spans_hosts = spans_hosts
        self.round = first_round
        self.operation = 0
        self.newcomers = 0
        self.transfer_folder: Path | None = None
        self.has_left = False
        # All rounds of a process use one store: each open store is a descriptor.
        self._store: Store | None = None
        self._participants: list[Participant] = []
        self._is_inside = False
        self._is_repeatable = True
        self._has_ended = False
        self._current: Round | None = None
        self._interrupted = 0.0  # when this process noticed the loss of a rank, in Unix time
        self._inbox = LauncherInbox() if self.spans_hosts else None
        if self._inbox is not None:
            self._inbox.enter(first_round)

    @property
    def is_waiting(self) -> bool:
        """Whether this process has not joined the run yet."""
        return not self.has_state and self._current is None

    @property
    def _can_stay(self) -> bool:
        return len(self._participants) == 1 and self._participants[0].can_stay

    def enroll(self, participant: Participant) -> None:
        """Let a trainer take part in the rounds; only a single trainer can continue in place."""
        self._participants.append(participant)

    # --- operations -------------------------------------------------------------------------

    def permit_calls(self) -> None:
        """Permit the script to communicate by itself, because the training has ended."""
        self._has_ended = True
        refuse_calls("")

    def run(
        self,
        prepare: Callable[[], Value],
        commit: Callable[[Value], Result],
        undo: Callable[[], None] | None = None,
        keep: Callable[[], bool] | None = None,
    ) -> Result:
        """Run an operation, and repeat it if a peer is lost before it can be committed.

        An operation inside the `prepare` or `commit` of another one is part of that one.

        Args:
            prepare: Computes. Collective, without lasting effects except those that `undo` undoes.
            commit: Makes the effects permanent. Local.
            undo: Undoes the effects of `prepare`, which may not have finished.
            keep: Keeps what `prepare` has computed, with which the next `prepare` continues, and
                returns whether it could; called before the round ends. None: nothing is kept.
        """
        if self._is_inside:
            return commit(prepare())
        with self.inside():
            while True:
                begun = time.monotonic()
                decision = None
                is_prepared = is_kept = False
                try:
                    value = prepare()
                    is_prepared = True
                    self.pass_barrier()
                except Exception as error:
                    is_kept = keep is not None and keep()
                    decision = self.recover(error, is_prepared)
                if decision is None or self.is_to_commit(decision):
                    result = commit(value)
                    self.operation += 1
                    self.go_on(decision)
                    return result
                if undo is not None:
                    undo()
                self.go_on(decision, 0.0 if is_kept else time.monotonic() - begun)

    def inside(self, is_repeatable: bool = True) -> ExitStack:
        """Return the context of an operation; operations inside it are part of it.

        Args:
            is_repeatable: Whether this process can repeat it.
        """
        if self.transfer_folder is not None:
            self.leave()  # no safe point so far: the newest saved state is used instead
        stack = ExitStack()
        before = self._is_inside, self._is_repeatable
        if not self._is_inside:
            refuse_calls("")
        self._is_inside = True
        self._is_repeatable = is_repeatable

        def leave() -> None:
            self._is_inside, self._is_repeatable = before
            if self._can_stay and not (self._is_inside or self._has_ended):
                # When a round begins, other ranks may be at other calls of the script.
                refuse_calls(REFUSAL)

        stack.callback(leave)
        return stack

    def pass_barrier(self) -> None:
        """Wait until every rank has prepared the operation."""
        if dist.get_world_size() > 1:
            dist.barrier()

    def recover(self, error: Exception, is_prepared: bool) -> Decision:
        """Return the launcher's decision after an error; raise `error` if no rank was lost.

        Args:
            error: The exception of the operation.
            is_prepared: Whether this rank had prepared the operation.
        """
        if not is_lost_peer(error):
            raise error
        return self._begin_round("lost", is_prepared)

    def is_to_commit(self, decision: Decision) -> bool:
        """Return whether this rank commits the operation in which the last round ended."""
        return decision.commit and decision.operation == self.operation

    def go_on(self, decision: Decision | None, undone: float | None = None) -> None:
        """Continue after an operation in which a round has ended, or hand over the state.

        Args:
            decision: The launcher's decision; None if no round has ended.
            undone: Seconds since the attempt began that was undone; None if it was committed.
        """
        if isinstance(decision, Round):
            # The time after the loss is the pause between the rounds, not repeated work.
            pause = time.time() - min(self._interrupted, decision.noticed)
            for participant in self._participants:
                repeated = None if undone is None else max(0.0, undone - pause)
                participant.continue_round(decision, repeated)
        elif decision is not None and undone is None:
            self.transfer_folder = decision.folder
        elif decision is not None:
            if (writer := self._find_writer()) is not None:
                writer.transfer_state(decision.folder)
            self.leave()

    def leave(self) -> NoReturn:
        """End this process, which has nothing left to do."""
        self.has_left = True
        for participant in self._participants:
            participant.leave()
        exit_process(0)

    def _find_writer(self) -> Participant | None:
        """Return the trainer that can hand over the state, of several that of one."""
        return next(
            (participant for participant in self._participants if participant.can_transfer_state),
            None,
        )

    # --- rounds -----------------------------------------------------------------------------

    def poll(self) -> int:
        """Return how many newcomers wait, on rank 0; reads what the launcher has sent."""
        while (received := self._receive(0)) is not None:
            if received[0]["kind"] == "newcomers":
                self.newcomers = int(received[0]["count"])
        return self.newcomers

    def admit(self) -> None:
        """Let newcomers join, and members leave; every rank calls it at the same safe point."""
        with self.inside():
            self.go_on(self._begin_round("admit", False), 0.0)

    def join(self) -> None:
        """Join the run, as a newcomer, and get the state of the training."""
        with self.inside():
            report_to_launcher({"kind": "ready"})
            leave_round()
            self._form(self._wait_for_decision(None))
            self.has_state = True

    def _begin_round(self, reason: str, is_prepared: bool) -> Decision:
        """Leave the round that has ended, and return the launcher's decision on the next one."""
        self._interrupted = time.time()
        leave_round()
        return self._form(self._report(reason, is_prepared), reason, is_prepared)

    def _form(
        self, decision: Decision, reason: str = "lost", is_prepared: bool = False
    ) -> Decision:
        failures = 0
        while isinstance(decision, Round):
            new = decision
            self.round = new.number
            if new.joined or new.left:
                self.newcomers = 0
            if not self.has_state:
                self.operation = new.operation
            try:
                self._join_group(new)
                self._current = new
                for participant in self._participants:
                    participant.enter_round(new)
                return new
            except _RoundFailed:
                pass
            except RendezvousError:
                failures += 1
                if failures == ATTEMPTS:
                    raise
            except (DistNetworkError, DistStoreError) as error:
                raise WorkError(
                    f"member {self.number}: the store of the run does not answer, so no further "
                    f"round can begin: continue the run with lockstep run --resume, on every host"
                ) from error
            except Exception as error:
                if not is_lost_peer(error):
                    raise
            leave_round()
            decision = self._report(reason, is_prepared)
        return decision

    def _report(self, reason: str, is_prepared: bool) -> Decision:
        part = 0
        parts = 1
        microbatches = 0
        if self._participants:
            last = self._participants[-1]
            part, parts = last.part
            microbatches = last.microbatches
        report_to_launcher(
            {
                "kind": "round_over",
                "round": self.round,
                "operation": self.operation,
                "is_prepared": is_prepared,
                "reason": reason,
                "can_stay": self.has_state and self._is_repeatable and self._can_stay,
                "can_transfer_state": self._find_writer() is not None,
                "part": part,
                "parts": parts,
                "microbatches": microbatches,
                "has_state": self.has_state,
            }
        )
        return self._wait_for_decision(get_timeout())

    def _wait_for_decision(self, timeout: float | None) -> Decision:
        """Wait for the launcher's decision; does not return if the process has to leave.

        Args:
            timeout: In seconds. None: no limit, for newcomers, which wait for a safe point.
        """
        begun = time.monotonic()
        while True:
            left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
            received = self._receive(left)
            if received is None:
                raise WorkError(
                    f"member {self.number}: round {self.round} is over, and there was no next one "
                    f"within {time.monotonic() - begun:.0f} s: the launcher waits for a rank that "
                    "neither exits nor reaches its next collective operation; see where the ranks "
                    "are with `kill -USR1` of the launcher, or pass a longer timeout to "
                    "lockstep.init()"
                )
            message = received[0]
            match message["kind"]:
                case "round":
                    return Round.from_message(message)
                case "newcomers":
                    self.newcomers = int(message["count"])
                case "leave":
                    self.leave()
                case "transfer_state":
                    folder = Path(message["folder"])
                    return TransferOrder(message["operation"], message["commit"], folder)

    def _receive(self, timeout: float | None) -> tuple[dict[str, Any], list[int]] | None:
        """Return the launcher's next message; None if none comes in time."""
        return (self._inbox.receive if self._inbox else receive_from_launcher)(timeout)

    def _open_store(self, new: Round) -> Store:
        if not new.store:
            return open_common_store(get_timeout())
        if self._store is None:
            self._store = attach_store(new.store)
        if self._store is None:
            raise RendezvousError(f"rank {new.rank}: the store of round {new.number} is gone")
        return self._store

    def _join_group(self, new: Round) -> None:
        """Join the group of a round once all of its members have arrived.

        Raises:
            _RoundFailed: A member died before that.
        """
        with ExitStack() as stack:
            watched = select.poll()
            for rank, pid in enumerate(new.pids):
                if rank == new.rank or not pid:
                    continue
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise _RoundFailed from None
                stack.callback(os.close, descriptor)
                watched.register(descriptor, select.POLLIN)
            opened = self._open_store(new)
            store = PrefixStore(f"round-{new.number}", opened)
            store.set(f"here/{new.rank}", "")
            missing = [f"here/{rank}" for rank in range(new.world_size)]
            deadline = time.monotonic() + get_timeout()
            while missing := [key for key in missing if not store.check([key])]:
                if watched.poll(1) or (self._inbox and self._inbox.lost_round >= new.number):
                    raise _RoundFailed
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"rank {new.rank}: rank {missing[0].partition('/')[2]} did not join round "
                        f"{new.number} within {get_timeout():g} s"
                    )
            # torch prefixes the keys of a backend with the second part.
            keys = PrefixStore(f"round-{new.number}/0//cpu/", opened)
            try:
                with _giving_up_on_death(watched, keys):
                    rejoin(store, new.rank, new.world_size, new.hosts)
            except RendezvousError:
                if self._inbox and self._inbox.lost_round >= new.number:
                    raise _RoundFailed from None
                raise
            if self._inbox is not None:
                self._inbox.enter(new.number)


@contextmanager
def _giving_up_on_death(watched: select.poll, keys: Store) -> Iterator[None]:
    """Abort the creation of a group in the body if a member dies, which its waits do not notice.

    Args:
        watched: Polls the pidfds of the members.
        keys: The store in which ranks announce that they could not create the group.

    Raises:
        _RoundFailed: A member died.
    """
    has_died = threading.Event()
    wake = os.eventfd(0)
    watched.register(wake, select.POLLIN)

    def watch() -> None:
        if all(descriptor == wake for descriptor, _ in watched.poll()):
            return
        has_died.set()
        keys.set("lockstep/refused/0", "a member of the round has died")
        keys.set("lockstep/address/0", "")

    thread = threading.Thread(target=watch, name="lockstep-round", daemon=True)
    thread.start()
    try:
        yield
    except RendezvousError:
        if has_died.is_set():
            raise _RoundFailed from None
        raise
    finally:
        os.eventfd_write(wake, 1)
        thread.join()
        os.close(wake)


_membership: Membership | None = None
_owner = 0


def membership() -> Membership | None:
    """Return this process's membership; None outside of elastic runs."""
    global _membership, _owner
    if not has_launcher() or not os.environ.get(ELASTIC):
        return None
    if _membership is None or _owner != os.getpid():
        number = int(os.environ.get(MEMBER) or os.environ.get("RANK") or 0)
        origin = find_restart_source()
        first_round = 0 if origin is None else origin.round
        spans_hosts = is_elastic_on_hosts(os.environ)
        _membership = Membership(number, first_round, bool(os.environ.get(JOIN)), spans_hosts)
        _owner = os.getpid()
    return _membership


def run_transaction(
    prepare: Callable[[], Value],
    commit: Callable[[Value], Result],
    undo: Callable[[], None] | None = None,
) -> Result:
    """Run an operation as `Membership.run` does; outside of elastic runs, run it once."""
    member = membership()
    return commit(prepare()) if member is None else member.run(prepare, commit, undo)


def exchange(
    describe: Callable[[], bytes], about: str, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Compare a message of every rank, as one operation.

    Args:
        describe: Returns this rank's message; called again if the operation is repeated.
        about: As for `all_gather_bytes`.
        group: The ranks.

    Returns:
        The messages in rank order; only one if all are equal.
    """

    def gather() -> list[bytes]:
        message = describe()
        return gather_unless_equal(message, about, group) or [message]

    return run_transaction(gather, lambda said: said)
