"""One case of a test: starts its ranks, watches them until they end, and collects their reports.

A rank that fails reports its failure at once and then waits. So the places where the other ranks
are can be recorded before the failed rank leaves the group, which would disturb them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lockstep.launcher.channel import write_memfd
from lockstep.launcher.environment import RankEnvironment
from lockstep.launcher.failure_attribution import (
    find_first_failure,
    is_consequence,
    make_report,
)
from lockstep.launcher.hang_monitor import HangPolicy
from lockstep.launcher.launch import function_task
from lockstep.launcher.listening_socket import LOOPBACK
from lockstep.launcher.output import RankOutput
from lockstep.launcher.rank_stores import choose_port
from lockstep.launcher.supervisor import RankSupervisor
from pytest_lockstep import leaks
from pytest_lockstep.failure import Failure, describe_failure, drop_outer_frames, summarize
from pytest_lockstep.rank_order import Order, Result
from pytest_lockstep.template import Template

__all__ = ["CaseResult", "run_case", "run_order"]

SETTLE = 0.25  # seconds to wait for other ranks that fail at the same time ...
SETTLE_CONSEQUENCE = 2.0  # ... or for the cause of a lost connection
TEARDOWN_GRACE = 2.0  # seconds that ranks have to tear down after a failure
EXIT_GRACE = 1.0  # seconds that ranks have to exit once their test has ended
TICK = 0.25  # seconds between two checks of the deadline
POLL = 0.005

Streams = list[int]


@dataclass
class CaseResult:
    """The result of a case.

    Attributes:
        failure: The failure; None if the case did not fail.
        outcome: "passed", "skipped", "xfailed" or "exit".
        reason: The reason if the outcome is not "passed".
        sections: Titles and texts of the output and logs of the ranks.
        results: The report of each rank that did not fail.
    """

    failure: Failure | None = None
    outcome: str = "passed"
    reason: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)


def run_case(
    template: Template,
    order: Order,
    timeout: float,
    *,
    is_captured: bool,
    debugs: Callable[[int], bool] | None,
) -> CaseResult:
    """Run a test in its ranks.

    Args:
        template: The process from which the ranks are forked.
        order: The order for rank 0.
        timeout: Deadline in seconds.
        is_captured: Whether the ranks' output is collected, instead of shown line by line.
        debugs: Returns whether a failed rank is debugged on the terminal; there is no deadline
            then. None without `--pdb`.
    """
    memory = leaks.list_shared_memory()
    channel = template.open_launch(order.nodeid)
    ranks = RankSupervisor(channel, range(order.width), hang_policy=HangPolicy(timeout))
    result = CaseResult()
    with contextlib.closing(ranks), _Output(order.width, is_captured) as output:
        _start(ranks, order, output)
        deadline = None if debugs is not None else time.monotonic() + timeout
        watch = _Watch(ranks, debugs)
        hang = watch.wait(deadline)
        result.results = {
            rank: pickle.loads(value) for rank, value in ranks.processes.values.items()
        }
        result.failure = describe_failure(ranks.processes.outcomes, watch.places, result.results)
        if hang:
            result.failure = Failure(f"the test did not end within {timeout:g} s: {hang}")
        pids = list(ranks.processes.pids.values())
        ranks.close()
        result.sections = output.read()
    for rank, report in sorted(result.results.items()):
        result.sections += [(f"{title} (rank {rank})", text) for title, text in report.sections]
    _conclude(result)
    left = _find_leaks(template, order, memory, pids)
    if left and result.failure is None:
        result.failure = Failure(f"the test left {', '.join(left)} behind")
    return result


def _start(ranks: RankSupervisor, order: Order, output: _Output) -> None:
    port = choose_port(LOOPBACK)
    store = ranks.processes.stores.create()
    environment = RankEnvironment(order.width, LOOPBACK, port, secrets.token_hex(4), store=store)
    for rank in range(order.width):
        work = write_memfd(pickle.dumps((run_order, (replace(order, rank=rank),))))
        task = function_task(environment.variables(rank))
        ranks.processes.start_rank(
            rank, task, work, output.shown.get(rank), output.streams.get(rank)
        )
        os.close(work)


class _Output:
    """The destination of the ranks' output: files that are read at the end, or the terminal."""

    def __init__(self, width: int, is_captured: bool) -> None:
        self.streams: dict[int, Streams] = {}
        self.shown: dict[int, RankOutput] = {}
        self._null = os.open(os.devnull, os.O_RDONLY)
        for rank in range(width):
            if is_captured:
                self.streams[rank] = [self._null, write_memfd(b""), write_memfd(b"")]
            else:
                consoles = sys.stdout.buffer, sys.stderr.buffer
                self.shown[rank] = RankOutput(rank, None, consoles)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._null)
        for _, *files in self.streams.values():
            for file in files:
                os.close(file)

    def read(self) -> list[tuple[str, str]]:
        """Return titles and texts of the ranks' output."""
        sections = []
        for rank, (_, *files) in self.streams.items():
            for name, file in zip(("stdout", "stderr"), files, strict=True):
                text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
                if text:
                    sections.append((f"Captured {name} (rank {rank})", text))
        return sections


class _Watch:
    """Waits for the ranks of a case, and records where they are when one of them fails."""

    def __init__(self, ranks: RankSupervisor, debugs: Callable[[int], bool] | None) -> None:
        self.places: dict[int, str] = {}
        self._ranks = ranks
        self._debugs = debugs
        self._released: set[int] = set()
        self._until: float | None = None  # when to kill the ranks that still run

    def wait(self, deadline: float | None) -> str:
        """Wait until every rank has ended; kill ranks that do not end in time.

        Returns:
            An explanation of which ranks wait for which, if the deadline has passed; otherwise "".
        """
        while self._ranks.processes.running:
            now = time.monotonic()
            if deadline is not None and now >= deadline and self._until is None:
                explanation = drop_outer_frames(self._ranks.hang_monitor.explain())
                self._ranks.terminate(grace=0.0)
                return explanation
            if self._until is not None and now >= self._until:
                self._ranks.terminate(grace=0.0)
                break
            self._note_exits()
            if find_first_failure(self._ranks.processes.outcomes.values()) is not None:
                self._handle_failures()
            elif self._until is None and self._have_all_ended():
                self._until = now + EXIT_GRACE
            limits = [limit for limit in (deadline, self._until) if limit is not None]
            left = max(0.0, min([now + TICK, *limits]) - time.monotonic())
            self._ranks.hang_monitor.sample()
            self._ranks.processes.process_events(left)
        self._note_exits()
        return ""

    def _have_all_ended(self) -> bool:
        return all(
            outcome.returned or outcome.status is not None
            for outcome in self._ranks.processes.outcomes.values()
        )

    def _note_exits(self) -> None:
        """Classify exits: one in the middle of a test is a failure, one by `kill` is not."""
        for rank, outcome in self._ranks.processes.outcomes.items():
            if outcome.status == -signal.SIGKILL and outcome.returned:
                outcome.returned = False
                outcome.was_terminated = True
            is_early = outcome.status == 0 and not outcome.returned and not outcome.was_terminated
            if is_early and outcome.error is None:
                said = (
                    f"rank {rank} exited with status 0 in the middle of the test (os._exit, or "
                    "another program in its place)"
                )
                outcome.error = make_report("SystemExit", said) | {"time": outcome.when}

    def _handle_failures(self) -> None:
        """After the first failure, record where the others are; let failed ranks tear down."""
        if self._until is None:
            self._settle()
            if not all(self._has_reported(rank) for rank in self._ranks.processes.running):
                places = self._ranks.hang_monitor.describe_ranks()
                self._ranks.processes.process_events(
                    0
                )  # ranks that failed meanwhile have a report to show
                self.places = {
                    rank: place for rank, place in places.items() if not self._has_reported(rank)
                }
            self._until = time.monotonic() + TEARDOWN_GRACE
            self._debug()
        for rank, outcome in self._ranks.processes.outcomes.items():
            if outcome.error is not None and rank not in self._released:
                self._released.add(rank)
                self._ranks.processes.send(rank, {"kind": "release"})

    def _settle(self) -> None:
        """Wait for ranks that fail at the same time, and for the cause of a lost connection."""
        began = time.monotonic()
        while len(self._ranks.processes.running) > 0:
            if all(self._has_reported(rank) for rank in self._ranks.processes.running):
                break
            failure = find_first_failure(self._ranks.processes.outcomes.values())
            returned = any(outcome.returned for outcome in self._ranks.processes.outcomes.values())
            waits = failure is not None and is_consequence(failure) and not returned
            if time.monotonic() >= began + (SETTLE_CONSEQUENCE if waits else SETTLE):
                break
            self._ranks.processes.process_events(POLL)
            self._note_exits()

    def _has_reported(self, rank: int) -> bool:
        outcome = self._ranks.processes.outcomes[rank]
        return outcome.returned or outcome.error is not None

    def _debug(self) -> None:
        """Lend the terminal to a failed rank that is debugged, until it ends."""
        failure = find_first_failure(self._ranks.processes.outcomes.values())
        if self._debugs is None or failure is None:
            return
        chosen = [
            rank
            for rank in sorted(self._ranks.processes.running, key=lambda rank: rank != failure.rank)
            if self._ranks.processes.outcomes[rank].error is not None and self._debugs(rank)
        ]
        if chosen:
            self._released.add(chosen[0])
            self._ranks.processes.send(chosen[0], {"kind": "debug"}, [0, 1, 2])
            while chosen[0] in self._ranks.processes.running:
                self._ranks.processes.process_events(TICK)


def _conclude(result: CaseResult) -> None:
    """Derive the outcome of the test from the outcomes in its ranks."""
    if result.failure is not None:
        return
    outcomes = {report.outcome for report in result.results.values()} - {"killed"}
    if "exit" in outcomes:
        outcomes = {"exit"}
    if len(outcomes) > 1:
        states = ", ".join(
            f"rank {rank} {summarize(report)}" for rank, report in sorted(result.results.items())
        )
        result.failure = Failure(f"the ranks ended differently: {states}; skip on every rank")
        return
    for report in result.results.values():
        if report.outcome in outcomes:
            result.outcome = report.outcome
            result.reason = report.reason


def _find_leaks(template: Template, order: Order, memory: set[str], pids: list[int]) -> list[str]:
    """Return the processes and files that the test left on this host, and remove them."""
    left = []
    if "shared memory" not in order.allowed_leaks:
        left = leaks.find_shared_memory(memory)
        for path in left:
            with contextlib.suppress(OSError):
                os.unlink(path)
    if "processes" not in order.allowed_leaks:
        for pid, name in leaks.find_processes(template.pid, pids):
            left.append(f"the process {pid} ({name})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return left


def run_order(order: Order) -> Result:
    """Run a test in this process, which is a rank.

    pytest's own process pickles this function by name, so it does not have to import torch.
    """
    from pytest_lockstep.rank import run_test

    return run_test(order)
