"""The hang monitor: finds ranks that are stopped, that hang, or that never join the others.

From outside, a rank in a long computation looks like a rank that hangs; the difference is that
other ranks wait for the latter. So a launch hangs when a rank has waited for other ranks in one
operation, or has been stopped by a signal, for longer than the timeout. If all ranks wait, and not
in one call, none of them can continue: such a deadlock is reported after a few seconds.

    operation of a rank    read from its activity page (`lockstep.comm.activity`), which costs
                           the rank nothing; for programs that publish nothing, from its stack
    stack of a rank        Python's fault handler writes it into an anonymous file on a signal.
                           That works while the rank waits deep in C code, and runs nothing in
                           the rank unless the launcher asks

A stopped process does not answer. SIGUSR1 to the launcher prints at once where all ranks are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lockstep.comm.activity import Activity, CallKind
from lockstep.formatting import format_duration, format_numbered
from lockstep.kernel.errors import RankError
from lockstep.launcher.failure_attribution import Outcome
from lockstep.launcher.stacks import (
    describe_location,
    is_receiving,
    is_waiting,
    may_wait,
    parse_frames,
)
from lockstep.messages import log
from lockstep.user_code import is_user_code, shorten_path

__all__ = [
    "Hang",
    "HangMonitor",
    "HangPolicy",
    "RankSnapshot",
    "describe_state",
    "find_hang",
    "format_report",
    "take_snapshot",
]

REMARK_INTERVAL = 5.0  # seconds between two looks for stopped ranks
PAGE_INTERVALS = 16  # reads of the activity pages within the timeout
MAX_PAGE_INTERVAL = 1.0  # seconds
STACK_INTERVALS = 8  # samples of the stacks of ranks that publish nothing, within the timeout
MAX_STACK_INTERVAL = 10.0  # seconds
# Seconds in which the ranks of a deadlock neither move nor use a processor. A long message that
# is on its way uses one; a machine that is busy leaves every process waiting for it now and then.
DEADLOCK_SECONDS = 3.0
IDLE = 0.02  # share of a core below which a process counts as asleep


@dataclass(frozen=True)
class HangPolicy:
    """The policy for a launch that hangs.

    Attributes:
        timeout: Seconds that a rank may wait in one operation, or be stopped; 0 for no limit.
            The default is below the 300 s after which collectives fail by default.
        ends_launch: Whether to end all ranks after the report, instead of waiting further.
        has_other_hosts: Whether the world has ranks on other hosts, which this launcher does not
            see.
    """

    timeout: float = 240.0
    ends_launch: bool = False
    has_other_hosts: bool = False


class Probes(Protocol):
    """The monitor's view into running ranks (`rank_probes.py`)."""

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped a rank."""

    def cpu_seconds(self, rank: int) -> float:
        """Return the processor time that a rank has used."""

    def read_activity(self, rank: int) -> Activity:
        """Return what a rank published last."""

    def dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of the main threads of ranks; empty for those that do not answer."""


@dataclass(frozen=True)
class RankSnapshot:
    """Where a running rank is; durations are in seconds.

    Attributes:
        rank: The rank.
        pid: Its process; 0 if it has not been started yet.
        operation: The operation that it waits in, or its last one; "" if unknown.
        age: Time since that operation began; None if unknown.
        is_waiting: Whether it waits for other ranks.
        stopped_for: Time since a signal stopped it; None if it is not stopped.
        location: Where it is in the user's code, such as "at train.py:31"; "" if unknown.
        noun: What `rank` is: "rank", or "member" in an elastic run.
        kind: The `CallKind` of the operation.
    """

    rank: int
    pid: int = 0
    operation: str = ""
    age: float | None = None
    is_waiting: bool = False
    stopped_for: float | None = None
    location: str = ""
    noun: str = "rank"
    kind: int = CallKind.OTHER

    @property
    def name(self) -> str:
        """Its name in messages, with its process id."""
        return f"{self.noun} {self.rank} (process {self.pid})"


@dataclass(frozen=True)
class Hang:
    """Ranks that hang.

    Attributes:
        stopped: Ranks that a signal has stopped.
        busy: Ranks that do not wait, although others wait for them.
        waiting: Ranks that wait.
        returned: Ranks that have returned or exited.
        is_deadlock: Whether all ranks wait for each other, so that none can continue.
    """

    stopped: tuple[RankSnapshot, ...]
    busy: tuple[RankSnapshot, ...]
    waiting: tuple[RankSnapshot, ...]
    returned: tuple[int, ...] = ()
    is_deadlock: bool = False

    @property
    def culprit(self) -> int:
        """The rank that causes the hang, or one of them."""
        if not (self.stopped or self.busy) and self.returned:
            return self.returned[0]
        return (*self.stopped, *self.busy, *self.waiting)[0].rank

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for two views of the same hang."""
        ranks = [tuple(snapshot.rank for snapshot in part) for part in (self.stopped, self.busy)]
        return *ranks, tuple((snapshot.rank, snapshot.operation) for snapshot in self.waiting)

    def __str__(self) -> str:
        """Return, in one sentence, which ranks hang, and which wait for how long."""
        waiting = map(_add_line, self.waiting) if self.is_deadlock else self.waiting
        waits = _describe_waits(tuple(waiting))
        if self.stopped:
            return _describe_stops(self.stopped) + (f", while {waits}" if waits else "")
        if self.busy:
            call_sites = ", ".join(_describe_call_site(snapshot) for snapshot in self.busy)
            return f"{call_sites}, while {waits}"
        if self.is_deadlock or self._has_different_calls:
            return f"the ranks wait for each other: {waits}"
        if self.returned:
            noun = self.waiting[0].noun
            return f"{format_numbered(noun, self.returned)} returned, while {waits}"
        return f"{waits}, and no rank of this launcher does anything else"

    @property
    def advice(self) -> str:
        """Advice on what to do next."""
        if self.stopped:
            pids = " ".join(str(snapshot.pid) for snapshot in self.stopped)
            return f"continue with kill -CONT {pids}"
        if self.busy:
            ranks = _format_names(self.busy)
            return f"unless that is a long computation, see the stack of {ranks} below"
        is_message = all(snapshot.kind >= CallKind.RECEIVE for snapshot in self.waiting)
        if self.is_deadlock and is_message:
            return "send first on one of the ranks, or use dist.batch_isend_irecv"
        if self.is_deadlock or self._has_different_calls or self.returned:
            return "make the same calls in the same order on every rank"
        return "receive what another rank sends; with several hosts, see the other launchers"

    @property
    def _has_different_calls(self) -> bool:
        return len({snapshot.operation for snapshot in self.waiting}) > 1


def find_hang(
    snapshots: Sequence[RankSnapshot], timeout: float, returned: Sequence[int] = ()
) -> Hang | None:
    """Return the ranks that hang; None if none has waited or been stopped for `timeout` seconds.

    Args:
        snapshots: The running ranks.
        timeout: In seconds.
        returned: The ranks that have returned.
    """
    stopped = tuple(snapshot for snapshot in snapshots if snapshot.stopped_for is not None)
    waiting = tuple(
        snapshot for snapshot in snapshots if snapshot.is_waiting and snapshot not in stopped
    )
    late = [
        snapshot for snapshot in waiting if snapshot.age is not None and snapshot.age >= timeout
    ]
    if not late and all((snapshot.stopped_for or 0) < timeout for snapshot in stopped):
        return None
    busy = tuple(
        snapshot for snapshot in snapshots if snapshot not in stopped and snapshot not in waiting
    )
    if not stopped and not busy:
        # All ranks wait. A rank that began only recently, in an operation that no late rank waits
        # in, was busy with other work before.
        missed = {snapshot.operation for snapshot in late}
        busy = tuple(
            snapshot
            for snapshot in waiting
            if (snapshot.age or 0) < timeout / 2 and snapshot.operation not in missed
        )
        waiting = tuple(snapshot for snapshot in waiting if snapshot not in busy)
    return Hang(stopped, busy, waiting, tuple(returned))


def _describe_stops(stopped: Sequence[RankSnapshot]) -> str:
    parts = [
        f"{snapshot.name} has been stopped by a signal for {_seconds(snapshot.stopped_for)}"
        for snapshot in stopped
    ]
    return ", ".join(parts)


def _describe_call_site(snapshot: RankSnapshot) -> str:
    text = f"{snapshot.name} is {snapshot.location or 'busy'}"
    if snapshot.is_waiting:
        return f"{text}, waiting in {snapshot.operation}"
    if not snapshot.operation:
        return text
    return f"{text} (its last operation: {snapshot.operation}, {_seconds(snapshot.age)} ago)"


def _describe_waits(waiting: Sequence[RankSnapshot]) -> str:
    """Return "ranks 0 and 2 have waited 312 s in ..., rank 3 has waited ..."."""
    groups: dict[str, list[RankSnapshot]] = {}
    for snapshot in waiting:
        groups.setdefault(snapshot.operation or "an operation", []).append(snapshot)
    parts = []
    for operation, group in groups.items():
        has = "has" if len(group) == 1 else "have"
        longest = max(snapshot.age or 0 for snapshot in group)
        parts.append(f"{_format_names(group)} {has} waited {_seconds(longest)} in {operation}")
    return ", and ".join(parts)


def _add_line(snapshot: RankSnapshot) -> RankSnapshot:
    """Return a snapshot whose operation ends with the user's line, as far as it is known."""
    line = snapshot.location.rpartition(" ")[2]
    is_named = not line or line in snapshot.operation
    return snapshot if is_named else replace(snapshot, operation=f"{snapshot.operation}, {line}")


def _format_names(snapshots: Sequence[RankSnapshot]) -> str:
    return format_numbered(snapshots[0].noun, [snapshot.rank for snapshot in snapshots])


def _seconds(duration: float | None) -> str:
    return "?" if duration is None else format_duration(round(max(0.0, duration)))


def format_report(
    snapshots: Sequence[RankSnapshot], stacks: Mapping[int, str], returned: Sequence[int] = ()
) -> str:
    """Return a table of all ranks: their last operations and stacks, the user's lines marked."""
    lines = []
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank):
        if snapshot.pid == 0:
            lines.append(f"{snapshot.noun} {snapshot.rank}: has not been started yet")
            continue
        lines.append(f"{snapshot.name}: {describe_state(snapshot)}")
        frames = parse_frames(stacks.get(snapshot.rank, ""))
        for file, line, function in frames:
            mark = ">" if is_user_code(file) else " "
            lines.append(f"  {mark} {shorten_path(file)}:{line} in {function}")
        if not frames and snapshot.stopped_for is None:
            lines.append(
                "    does not answer (it is not executing Python code, or blocks all signals)"
            )
    noun = snapshots[0].noun if snapshots else "rank"
    lines += [f"{noun} {rank}: has returned" for rank in returned]
    if any(line.startswith("  >") for line in lines):
        lines.append("(most recent call first; > marks your code)")
    return "\n".join(lines)


def describe_state(snapshot: RankSnapshot) -> str:
    """Return the operation that a rank waits in, or its last one, as in the report."""
    age = _seconds(snapshot.age)
    if snapshot.stopped_for is not None:
        stopped = f"stopped by a signal for {_seconds(snapshot.stopped_for)}"
        last = f"; last operation: {snapshot.operation}" if snapshot.operation else ""
        return f"{stopped}; continue it with kill -CONT {snapshot.pid}{last}"
    if snapshot.is_waiting:
        return f"has waited {age} in {snapshot.operation}"
    if snapshot.operation:
        return f"does not wait; last operation, {age} ago: {snapshot.operation}"
    return "does not wait, and has published no operation"


class HangMonitor:
    """A monitor that reports each stopped, missing or hanging rank of a launch once.

    Args:
        list_outcomes: Returns the outcome of each rank of this host; its status is None while the
            rank runs.
        pids: The process ids of the ranks.
        probes: The view into them.
        policy: What to do about hangs; None for the default.
    """

    def __init__(
        self,
        list_outcomes: Callable[[], Mapping[int, Outcome]],
        pids: Mapping[int, int],
        probes: Probes,
        policy: HangPolicy | None = None,
    ) -> None:
        self._list_outcomes = list_outcomes
        self._pids = pids
        self._probes = probes
        self._policy = policy or HangPolicy()
        now = time.monotonic()
        self._next_remark = now + REMARK_INTERVAL
        self._next_view = now
        self._next_samples = now
        self._remarked: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self._samples: dict[int, _Sample] = {}
        self._hang: Hang | None = None
        self._waits = _Waits({}, 0.0, {})

    def check(self) -> RankError | None:
        """Check the ranks if a check is due, and print reports; may be called at any time.

        Returns:
            The error of the rank that hangs, if the policy is to end the launch.
        """
        now = time.monotonic()
        if now >= self._next_remark:
            self._next_remark = now + REMARK_INTERVAL
            self._remark()
        timeout = self._policy.timeout
        if timeout <= 0 or now < self._next_view:
            return None
        self._next_view = now + min(timeout / PAGE_INTERVALS, MAX_PAGE_INTERVAL)
        self.sample()
        before = self._hang
        hang = self._find_hang(self._view(), timeout)
        error = None
        if hang is not None and (before is None or hang.identity != before.identity):
            snapshots, stacks = self._locate_all()
            # A rank that publishes nothing may have continued since its last sample.
            hang = self._find_hang(snapshots, timeout)
            if hang is not None:
                error = self._report(hang, snapshots, stacks)
        if hang is None and before is not None:
            log("the ranks continue: none of them hangs any more")
        self._hang = hang
        return error

    def sample(self) -> None:
        """Sample the stacks of ranks that publish nothing, if a sample is due."""
        now = time.monotonic()
        if now >= self._next_samples:
            interval = min(self._policy.timeout / STACK_INTERVALS, MAX_STACK_INTERVAL)
            self._next_samples = now + interval
            self._view()  # notes the stopped ranks, which would not answer
            self._sample_silent_ranks()

    def _remark(self) -> None:
        """Name stopped ranks, once and early."""
        for rank in self._running():
            if rank not in self._remarked and self._probes.is_stopped(rank):
                self._remarked.add(rank)
                pid = self._pids[rank]
                name = self._list_outcomes()[rank].name
                log(f"{name} (process {pid}) is stopped; continue it with kill -CONT {pid}")

    def _running(self) -> list[int]:
        return [rank for rank, outcome in self._list_outcomes().items() if outcome.status is None]

    def _returned(self) -> list[int]:
        return [
            outcome.rank
            for outcome in self._list_outcomes().values()
            if outcome.has_returned and not outcome.is_replaced
        ]

    # --- hangs --------------------------------------------------------------------------------

    def _view(self) -> list[RankSnapshot]:
        """Return where the running ranks are, without asking them."""
        now = time.monotonic()
        snapshots = []
        for rank in self._running():
            if self._probes.is_stopped(rank):
                self._stopped_since.setdefault(rank, now)
            else:
                self._stopped_since.pop(rank, None)
            activity = self._probes.read_activity(rank)
            sample = self._samples.get(rank)
            snapshot = take_snapshot(rank, self._pids.get(rank, 0), activity, now)
            snapshot = replace(snapshot, noun=self._list_outcomes()[rank].noun)
            if sample is not None and not snapshot.is_waiting and sample.is_waiting(activity):
                snapshot = replace(
                    snapshot,
                    is_waiting=True,
                    operation=sample.location.partition(" ")[2],
                    age=now - sample.since,
                    kind=sample.kind,
                )
            if (since := self._stopped_since.get(rank)) is not None:
                snapshot = replace(snapshot, stopped_for=now - since)
            snapshots.append(snapshot)
        return snapshots

    def _find_hang(self, snapshots: Sequence[RankSnapshot], timeout: float) -> Hang | None:
        outcomes = self._list_outcomes()
        inside = [snapshot for snapshot in snapshots if not outcomes[snapshot.rank].is_outside]
        if self._is_deadlock(inside):
            return Hang((), (), tuple(inside), is_deadlock=True)
        return find_hang(inside, timeout, self._returned())

    def _is_deadlock(self, snapshots: Sequence[RankSnapshot]) -> bool:
        """Return whether all ranks of the world wait for each other, and have for some seconds.

        A rank that is in the same call as all others does not wait for them to make another one.
        """
        waits = {
            snapshot.rank: snapshot.operation
            for snapshot in snapshots
            if snapshot.is_waiting and snapshot.stopped_for is None
        }
        kinds = {snapshot.kind for snapshot in snapshots}
        is_receive = kinds == {CallKind.RECEIVE}
        has_different_calls = CallKind.OTHER not in kinds and len(set(waits.values())) > 1
        is_world = len(waits) == len(snapshots) > 1 and not self._policy.has_other_hosts
        if not is_world or not (is_receive or has_different_calls):
            return False
        now = time.monotonic()
        cpu_seconds = {rank: self._probes.cpu_seconds(rank) for rank in waits}
        first = self._waits
        passed = now - first.since
        is_same = first.operations == waits and all(
            cpu_seconds[rank] - used <= IDLE * passed for rank, used in first.cpu_seconds.items()
        )
        if not is_same:
            self._waits = _Waits(waits, now, cpu_seconds)
            return False
        return min(passed, *(snapshot.age or 0.0 for snapshot in snapshots)) >= DEADLOCK_SECONDS

    def _sample_silent_ranks(self) -> None:
        """Sample the stacks of ranks that have published nothing since the previous sample."""
        silent = []
        running = self._running() if len(self._list_outcomes()) > 1 else ()
        for rank in running:
            activity = self._probes.read_activity(rank)
            before = self._samples.get(rank)
            if before is None or before.changes != activity.changes:
                self._samples[rank] = _Sample(activity.changes)
            elif not activity.is_waiting and rank not in self._stopped_since:
                silent.append(rank)
        now = time.monotonic()
        for rank, dump in self._probes.dump_stacks(silent).items():
            cpu_seconds = self._probes.cpu_seconds(rank)
            self._samples[rank] = self._samples[rank].next(dump, cpu_seconds, now)

    def _report(
        self, hang: Hang, snapshots: Sequence[RankSnapshot], stacks: Mapping[int, str]
    ) -> RankError | None:
        table = format_report(snapshots, stacks, hang.returned)
        log(f"{hang}; {hang.advice}\n{table}")
        if not self._policy.ends_launch:
            return None
        error = RankError(str(hang))
        error.rank = hang.culprit
        return error

    def describe_ranks(self) -> dict[int, str]:
        """Return where each running rank is, and the operation it waits in or its last one."""
        snapshots, _ = self._locate_all()
        return {
            snapshot.rank: f"{snapshot.location}: {describe_state(snapshot)}".removeprefix(": ")
            if snapshot.operation or not snapshot.location
            else snapshot.location
            for snapshot in snapshots
        }

    def explain(self) -> str:
        """Return which ranks wait for which at this moment, and the stack of every rank."""
        self._view()
        self._sample_silent_ranks()
        snapshots, stacks = self._locate_all()
        hang = self._find_hang(snapshots, 0.0)
        table = format_report(snapshots, stacks, self._returned())
        return table if hang is None else f"{hang}; {hang.advice}\n{table}"

    def print_places(self) -> None:
        """Print where every rank is."""
        snapshots, stacks = self._locate_all()
        log(f"where the ranks are:\n{format_report(snapshots, stacks, self._returned())}")

    def _locate_all(self) -> tuple[list[RankSnapshot], dict[int, str]]:
        snapshots = self._view()
        stacks = self._probes.dump_stacks(
            [snapshot.rank for snapshot in snapshots if snapshot.stopped_for is None]
        )
        if self._move_samples(stacks):
            snapshots = self._view()
        located = [
            replace(snapshot, location=describe_location(stacks.get(snapshot.rank, "")))
            for snapshot in snapshots
        ]
        return located, stacks

    def _move_samples(self, stacks: Mapping[int, str]) -> bool:
        """Replace the samples of ranks that wait elsewhere by now; return whether there are any.

        The others stay as they are: their processor time says nothing after so short a time.
        """
        now = time.monotonic()
        moved = {
            rank: self._samples[rank].next(dump, self._probes.cpu_seconds(rank), now)
            for rank, dump in stacks.items()
            if dump
            and rank in self._samples
            and self._samples[rank].location not in ("", describe_location(dump))
        }
        self._samples.update(moved)
        return bool(moved)


@dataclass(frozen=True)
class _Waits:
    """The waits of all ranks, when they were first seen.

    Attributes:
        operations: The operation in which each rank waits.
        since: When they were seen.
        cpu_seconds: The processor time that each rank had used.
    """

    operations: Mapping[int, str]
    since: float
    cpu_seconds: Mapping[int, float]


@dataclass(frozen=True)
class _Sample:
    """The location at which a rank that publishes nothing waits, and since when.

    Attributes:
        changes: `Activity.changes` at the sample; a later value means that the rank continued.
        location: The location; "" if the rank did not wait.
        since: When it was first seen there.
        cpu_seconds: The processor time that it had used at `seen`; None before the first stack.
        seen: When its last stack was taken.
        kind: The kind of the call in which it waits, as far as its stack says it.
    """

    changes: tuple[int, int]
    location: str = ""
    since: float = 0.0
    cpu_seconds: float | None = None
    seen: float = 0.0
    kind: int = CallKind.OTHER

    def is_waiting(self, activity: Activity) -> bool:
        return bool(self.location) and self.changes == activity.changes

    def next(self, dump: str, cpu_seconds: float, now: float) -> _Sample:
        """Return the sample that follows this one."""
        waits = is_waiting(dump)
        if not waits and self.cpu_seconds is not None and may_wait(dump):
            waits = cpu_seconds - self.cpu_seconds <= IDLE * (now - self.seen)
        location = describe_location(dump) if waits else ""
        since = self.since if location and location == self.location else now
        kind = CallKind.RECEIVE if is_receiving(dump) else CallKind.OTHER
        return _Sample(self.changes, location, since, cpu_seconds, now, kind)


def take_snapshot(rank: int, pid: int, activity: Activity, now: float) -> RankSnapshot:
    """Return where a rank is according to its activity page."""
    since = activity.operation_since
    return RankSnapshot(
        rank,
        pid,
        operation=activity.operation,
        age=now - since if since > 0 else None,
        is_waiting=activity.is_waiting,
        kind=activity.kind if activity.is_main_thread_waiting else CallKind.OTHER,
    )
