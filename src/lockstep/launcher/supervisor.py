"""The supervisor: waits for the ranks of one launch on this host, and ends them.

    running ──a rank fails──> settling ──> ending: SIGTERM ──grace──> SIGKILL ──> ended
       ├──stop requested────> stopping: SIGTERM to ranks only ──grace──> SIGKILL ───^
       └────────────── every rank exited ──────────────────────────────────────────^

While ranks stop on request, their data loader workers must live: a rank may need another
batch before it can save a checkpoint.

Settling waits for the cause of a failure: a rank that lost its connection often reports
before the kernel announces that the other end was killed. Nothing here runs in the background:
the ranks are supervised while a caller waits for them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from lockstep.formatting import format_numbered
from lockstep.kernel.errors import RankError
from lockstep.launcher.channel import Channel
from lockstep.launcher.failure_attribution import (
    Outcome,
    find_early_exit,
    find_first_failure,
    find_same_failures,
    is_consequence,
    make_rank_error,
)
from lockstep.launcher.hang_monitor import HangMonitor, HangPolicy
from lockstep.launcher.rank_probes import group_exists
from lockstep.launcher.rank_processes import TICK, RankProcesses
from lockstep.launcher.signals import reports_on_request, take_stack_request
from lockstep.messages import log

__all__ = ["GRACE", "STOP_GRACE", "RankSupervisor"]

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
# Seconds that ranks have to stop on request. Kubernetes and Slurm kill everything after 30 s;
# before that, the launcher must have named the ranks that are late.
STOP_GRACE = 28.0
EXIT_TIMEOUT = 5.0  # seconds to wait for processes after SIGKILL
# Seconds to wait for a better explanation of any failure, of a failure that looks like the
# consequence of another rank's end, and of a failure that every rank may report.
SETTLE = 0.05
SETTLE_CONSEQUENCE = 2.0
SETTLE_SAME = 0.5
POLL = 0.005  # seconds between two checks of process groups that are ending


class RankSupervisor:
    """The ranks of one launch on this host, which it waits for and ends.

    Args:
        channel: The fork server's socket for this launch (`ForkServer.open_launch`).
        ranks: The ranks to start here.
        hang_policy: The policy for ranks that hang; None for the default one.
        noun: As for `RankProcesses`.

    Attributes:
        processes: The processes of the ranks.
        was_asked_to_stop: Whether SIGTERM has asked the ranks to stop.
        after_events: Called while ranks are waited for, before failures are looked for; returns
            the error that ends the launch, or None.
        before_end: Called before all ranks are ended.
        hang_monitor: The monitor of ranks that hang.
    """

    def __init__(
        self,
        channel: Channel,
        ranks: range,
        hang_policy: HangPolicy | None = None,
        noun: str = "rank",
    ) -> None:
        self.processes = RankProcesses(channel, ranks, noun)
        self.was_asked_to_stop = False
        self.after_events: Callable[[], RankError | None] = lambda: None
        self.before_end: Callable[[], None] = lambda: None
        self.hang_monitor = HangMonitor(
            self._list_local, self.processes.pids, self.processes.probes, hang_policy
        )

    @property
    def has_stopped(self) -> bool:
        """Whether the launch stopped on request, after `wait` has returned no error."""
        has_any = any(outcome.has_stopped for outcome in self._all)
        if not self.was_asked_to_stop:
            return has_any
        return all(
            outcome.status == 0 or outcome.has_stopped or (has_any and is_consequence(outcome))
            for outcome in self._all
        )

    def wait(
        self,
        grace: float = STOP_GRACE,
        is_stop_requested: Callable[[], bool] = lambda: False,
        *,
        deadline: float | None = None,
    ) -> RankError | None:
        """Wait until every rank has succeeded, or one has failed and all were ended.

        Prints which ranks hang while it waits, and where all ranks are when this process
        receives SIGUSR1. If a stop is requested, or a rank stops on its own because the signal
        reached it directly, the ranks have a grace period to exit.

        Args:
            grace: Seconds that the ranks have to stop on request.
            is_stop_requested: Function that returns whether to ask them to stop; called several
                times per second.
            deadline: A `time.monotonic()` time; None waits without limit.

        Returns:
            None, or the error of the rank that failed first, or of a rank that hangs if the
            policy ends the launch then.

        Raises:
            TimeoutError: The deadline passed; the ranks are still running.
        """
        with reports_on_request():
            while self.processes.running:
                if find_first_failure(self._all) or find_early_exit(self._all):
                    return self._end_after_failure()
                if is_stop_requested() or any(outcome.has_stopped for outcome in self._all):
                    return self._wait_for_stop(grace, is_stop_requested)
                self.answer_request()
                if hang := self.hang_monitor.check():
                    self.terminate()
                    return hang
                self.processes.process_events(_shorten(TICK, deadline))
                if error := self.after_events():
                    self.terminate()
                    return error
                has_expired = deadline is not None and time.monotonic() >= deadline
                if has_expired and self.processes.running and not is_stop_requested():
                    raise TimeoutError
        self.close()
        return make_rank_error(self._all)

    # --- ending ---------------------------------------------------------------------------

    def terminate(self, grace: float | None = None) -> None:
        """End every rank: send SIGTERM, and after a grace period SIGKILL, to its process group.

        A rank that has reported an error gets no SIGTERM: it is exiting, and may still print.

        Args:
            grace: The grace period in seconds; None for `GRACE`.
        """
        if self.processes.is_closed:
            return
        self.before_end()
        active = [
            rank for rank in self.processes.running if self.processes.outcomes[rank].error is None
        ]
        # SIGCONT, so that a stopped rank receives SIGTERM, too.
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.processes.end_ranks(active, number)
        if not self._process_events_until(time.monotonic() + (GRACE if grace is None else grace)):
            self.processes.end_ranks(self.processes.running, signal.SIGKILL)
            self._process_events_until(time.monotonic() + EXIT_TIMEOUT)
        self.close()

    def stop_early(self) -> None:
        """End the launch because a stop was requested before any rank was started."""
        self.was_asked_to_stop = True
        self.close()

    def _wait_for_stop(
        self, grace: float, is_stop_requested: Callable[[], bool]
    ) -> RankError | None:
        """Wait until the ranks have stopped, then end those that have not."""
        deadline = time.monotonic() + grace
        while self.processes.running:
            if is_stop_requested() and not self.was_asked_to_stop:
                self._ask_to_stop(grace)
            if not self.was_asked_to_stop and find_first_failure(self._all):
                return self._end_after_failure()
            if time.monotonic() >= deadline:
                break
            self.answer_request()
            self.processes.process_events(_shorten(TICK, deadline))
            if error := self.after_events():
                self.terminate()
                return error
        if self.processes.running:
            self._end_late_ranks(grace)
        self.close()
        failure = find_first_failure(self._all)
        if self.was_asked_to_stop and failure is not None and is_consequence(failure):
            return None  # the consequence of a rank's end by SIGTERM
        return make_rank_error(self._all)

    def _ask_to_stop(self, grace: float) -> None:
        self.was_asked_to_stop = True
        log(f"SIGTERM: waiting up to {grace:g} s for the ranks to save a checkpoint and stop")
        for rank in self.processes.running:
            self.processes.outcomes[rank].was_terminated = True
            self.processes.send_signal(rank, signal.SIGTERM, group=False)
            # A stopped rank and its workers continue.
            self.processes.send_signal(rank, signal.SIGCONT)

    def _end_late_ranks(self, grace: float) -> None:
        late = self.processes.running
        verb = "was" if len(late) == 1 else "were"
        how = "killed" if self.was_asked_to_stop else "ended"
        who = format_numbered(self.processes.noun, late)
        log(f"{who} did not stop within {grace:g} s and {verb} {how}")
        self.terminate(grace=0.0 if self.was_asked_to_stop else None)

    def close(self) -> None:
        """Release everything; ranks that still run are killed."""
        if self.processes.is_closed:
            return
        groups = set(self.processes.pids.values())
        self.processes.end_launch()
        self._wait_for_groups(groups, time.monotonic() + EXIT_TIMEOUT)
        self.processes.close_files()

    def answer_request(self) -> None:
        """Print where the ranks are, if SIGUSR1 asked for it."""
        if take_stack_request():
            self.hang_monitor.print_places()

    def _end_after_failure(self) -> RankError | None:
        """Wait for the failure that explains the others, end all ranks and return its error."""
        began = time.monotonic()
        self._process_events_until(began + SETTLE)
        while self.processes.running and time.monotonic() < began + SETTLE_CONSEQUENCE:
            failure = find_first_failure(self._all)
            if failure is None or not is_consequence(failure):
                break
            if any(outcome.has_returned for outcome in self._all):
                break
            self.processes.process_events(POLL)
        while self._may_be_same() and time.monotonic() < began + SETTLE_SAME:
            self.processes.process_events(POLL)
        error = make_rank_error(self._all)
        self.terminate()
        return error

    def _may_be_same(self) -> bool:
        """Return whether ranks that still run may be about to report the same error."""
        failure = find_first_failure(self._all)
        same = [] if failure is None else find_same_failures(self._all, failure)
        return bool(same) and any(
            self.processes.outcomes[rank].error is None for rank in self.processes.running
        )

    def _process_events_until(self, deadline: float) -> bool:
        """Process events until all started ranks have exited; return False at the deadline."""
        while self.processes.started.intersection(self.processes.running):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.processes.process_events(left)
        return True

    def _wait_for_groups(self, groups: set[int], deadline: float) -> None:
        """Wait until the ranks' process groups, including data loader workers, are gone."""
        left = groups
        while left and time.monotonic() < deadline:
            left = {group for group in left if group_exists(group)}
            if left:
                time.sleep(POLL)

    def _list_local(self) -> dict[int, Outcome]:
        """Return the outcomes of the ranks of this host."""
        outcomes = self.processes.outcomes.items()
        return {rank: outcome for rank, outcome in outcomes if self.processes.host_of(rank) == 0}

    @property
    def _all(self) -> Sequence[Outcome]:
        return [outcome for outcome in self.processes.outcomes.values() if not outcome.is_replaced]


def _shorten(timeout: float, deadline: float | None) -> float:
    """Return `timeout`, or the time left until the deadline if that is shorter."""
    left = timeout if deadline is None else deadline - time.monotonic()
    return max(0.0, min(timeout, left))
