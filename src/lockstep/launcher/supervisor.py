"""The supervisor: starts the ranks of one launch on this host, watches and ends them.

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

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from lockstep.formatting import format_numbered
from lockstep.kernel.errors import RankError
from lockstep.launcher.channel import Channel, Message, open_pair, read_memfd
from lockstep.launcher.failure_attribution import (
    Outcome,
    count_oom_kills,
    describe_failed_start,
    explain_sigkill,
    find_early_exit,
    find_first_failure,
    find_same_failures,
    is_consequence,
    make_rank_error,
)
from lockstep.launcher.fork_server import ForkServer
from lockstep.launcher.hang_monitor import HangMonitor, HangPolicy
from lockstep.launcher.listening_socket import find_obstacle, get_connectable_address, listen
from lockstep.launcher.local_rendezvous import create_store
from lockstep.launcher.output import RankOutput, close_outputs
from lockstep.launcher.rank_probes import RankProbes, group_exists
from lockstep.launcher.report_request import reports_on_request, take_request
from lockstep.launcher.stacks import STACK_SIGNAL
from lockstep.launcher.standard_streams import StandardStreams
from lockstep.launcher.tracebacks import BACKEND_ERRORS, is_full
from lockstep.messages import say

__all__ = ["GRACE", "STOP_GRACE", "TICK", "RankSupervisor"]

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
TICK = 0.25  # seconds between two checks for unfinished lines of output


class RankSupervisor:
    """The ranks of one launch on this host.

    Args:
        channel: The fork server's socket for this launch (`ForkServer.open_launch`).
        ranks: The ranks to start here.
        own_fork_server: A fork server for this launch only, closed together with it.
        hang_policy: The policy for ranks that hang; None for the default one.
        noun: The word before the number of a rank in messages: "member" in an elastic run, where
            the rank of a process can differ from round to round.

    Attributes:
        after_events: Called while ranks are waited for, before failures are looked for; returns
            the error that ends the launch, or None.
        before_end: Called before all ranks are ended.
        before_close: Called before folders that belong to the launch are removed.
        on_report: Called with every message of a rank; returns whether it has handled the message.
        has_fork_server: Whether the fork server runs; if it ends, all ranks are killed.
    """

    def __init__(
        self,
        channel: Channel,
        ranks: range,
        own_fork_server: ForkServer | None = None,
        hang_policy: HangPolicy | None = None,
        noun: str = "rank",
    ) -> None:
        self.noun = noun
        self.outcomes = {rank: Outcome(rank, noun=noun) for rank in ranks}
        self.values: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self.outputs: dict[int, RankOutput] = {}
        self.was_asked_to_stop = False
        self.after_events: Callable[[], RankError | None] = lambda: None
        self.before_end: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self.on_report: Callable[[int, Message], bool] = lambda rank, message: False
        self.has_fork_server = True
        self._started: set[int] = set()
        self._channel: Channel | None = channel
        self._own_fork_server = own_fork_server
        self._reports: dict[int, Channel] = {}
        self._stores: dict[str, int] = {}
        self._streams = StandardStreams()
        self._output_descriptors: set[int] = set()
        self._oom_kills = count_oom_kills()
        self.probes = RankProbes(self.pids, self._ask_for_stack)
        self.hang_monitor = HangMonitor(self, self.probes, hang_policy)
        self._selector = selectors.DefaultSelector()
        self.add_reader(channel.fileno(), self._on_fork_server_message)

    # --- starting -------------------------------------------------------------------------

    def serve_store(
        self,
        address: str,
        port: int,
        *,
        is_single_host: bool = True,
        secret: bytes | None = None,
    ) -> int:
        """Serve the ranks' store at `address`:`port` (0: a free port); return the port.

        With a secret it admits only processes that have the secret (`store_server.py`).
        Otherwise it is a TCPStore, and admits everyone.

        Without a loopback interface nothing is served. Only scripts that call
        `torch.distributed.init_process_group` themselves need this store.
        """
        with listen(address, port, is_single_host=is_single_host) as listening:
            self.start_store(listening, secret, is_single_host=is_single_host)
            return int(listening.getsockname()[1])

    def start_store(
        self, listening: socket.socket, secret: bytes | None = None, *, is_single_host: bool = True
    ) -> None:
        """Serve the ranks' store as `serve_store` does, on a socket that already listens."""
        assert self._channel is not None
        # The ranks of one host have a private store: most of them never connect to this one.
        message: Message = {"kind": "store", "rank": -1, "is_on_demand": is_single_host}
        if secret is not None:
            self._channel.send({**message, "secret": secret.hex()}, [listening.fileno()])
            return
        if reason := find_obstacle(listening, is_accepted=is_single_host):
            say(f"{reason}; torch.distributed.init_process_group cannot connect the ranks")
            return
        address = get_connectable_address(listening), int(listening.getsockname()[1])
        message |= {"host": address[0], "port": address[1]}
        self._channel.send(message, [listening.fileno()])

    @property
    def present(self) -> list[int]:
        """The indices of the hosts that can start ranks: of this one alone."""
        return [0]

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return 0

    def has_begun(self, rank: int) -> bool:
        """Return whether a rank has published an operation."""
        return self.probes.read_activity(rank).number > 0

    def find_pid(self, rank: int, asking: int) -> int:
        """Return a rank's process id; 0 if `asking` is on another host, or if it is unknown."""
        return self.pids.get(rank, 0)

    def create_store(self) -> str:
        """Create the private store of ranks that are all on this host.

        Returns:
            Its address, valid until `close_store` or until this launch is closed; "" if the
            system has no such stores.
        """
        created = create_store()
        if created is None:
            return ""
        descriptor, address = created
        self._stores[address] = descriptor
        return address

    def remove_at_end(self, folder: str) -> None:
        """Have a folder and its contents removed at the end, even if this process is killed."""
        assert self._channel is not None
        self._channel.send({"kind": "folder", "path": folder})

    def close_store(self, address: str) -> None:
        """Close a private store to ranks that have not attached to it."""
        if address in self._stores:
            os.close(self._stores.pop(address))

    def start_rank(
        self,
        rank: int,
        task: Message,
        work: int,
        output: RankOutput | None = None,
        streams: Sequence[int] | None = None,
        *,
        has_input: bool = False,
    ) -> None:
        """Start one rank.

        Args:
            rank: The rank.
            task: The message that describes its work (`rank_process.ForkedProcess`).
            work: Descriptor of the file with the pickled function, if it runs one.
            output: Where its output goes; None for this process's stdout and stderr.
            streams: Descriptors of its stdin, stdout and stderr; None for the streams that
                `output` and `has_input` select.
            has_input: Whether it inherits this process's standard input; it is empty otherwise.
        """
        assert self._channel is not None
        self.outcomes.setdefault(rank, Outcome(rank, noun=self.noun))
        ours, theirs = open_pair()
        with self._streams.inherit(has_input) as inherited:
            if output is not None:
                inherited[1:] = [stream.writing for stream in output.streams]
            message = {**task, "kind": "rank", "rank": rank, "is_piped": output is not None}
            self._channel.send(message, [*(streams or inherited), theirs.fileno(), work])
        self._started.add(rank)
        theirs.close()
        self._reports[rank] = ours
        self.add_reader(ours.fileno(), partial(self._on_reports, rank))
        if output is not None:
            self._attach_output(rank, output)

    def _attach_output(self, rank: int, output: RankOutput) -> None:
        output.close_writing_ends()
        self.outputs[rank] = output
        for stream in output.streams:
            self._output_descriptors.add(stream.reading)
            self.add_reader(stream.reading, partial(output.read, stream))

    # --- watching -------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The ranks that have not exited yet."""
        return [rank for rank, outcome in self.outcomes.items() if outcome.status is None]

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
        deadline: float | None = None,
        *,
        grace: float = STOP_GRACE,
        is_stop_requested: Callable[[], bool] = lambda: False,
    ) -> RankError | None:
        """Wait until every rank has succeeded, or one has failed and all were ended.

        Prints which ranks hang while it waits, and where all ranks are when this process
        receives SIGUSR1. If a stop is requested, or a rank stops on its own because the signal
        reached it directly, the ranks have a grace period to exit.

        Args:
            deadline: A `time.monotonic()` time; None waits without limit.
            grace: Seconds that the ranks have to stop on request.
            is_stop_requested: Function that returns whether to ask them to stop; called several
                times per second.

        Returns:
            None, or the error of the rank that failed first, or of a rank that hangs if the
            policy ends the launch then.

        Raises:
            TimeoutError: The deadline passed; the ranks are still running.
        """
        with reports_on_request():
            while self.running:
                if find_first_failure(self._all) or find_early_exit(self._all):
                    return self._end_after_failure()
                if is_stop_requested() or any(outcome.has_stopped for outcome in self._all):
                    return self._wait_for_stop(grace, is_stop_requested)
                self._answer_request()
                if hang := self.hang_monitor.check():
                    self.terminate()
                    return hang
                self.process_events(_shorten(TICK, deadline))
                if error := self.after_events():
                    self.terminate()
                    return error
                has_expired = deadline is not None and time.monotonic() >= deadline
                if has_expired and self.running and not is_stop_requested():
                    raise TimeoutError
        self.close()
        return make_rank_error(self._all)

    def process_events(self, timeout: float) -> None:
        """Wait for messages and output of the ranks, at most `timeout` s, and process them."""
        events = self._selector.select(timeout)
        # Output comes last: a report decides how to show what was printed after it.
        for key, _ in sorted(events, key=lambda event: event[0].fd in self._output_descriptors):
            # A callback for an earlier event may have closed this one's descriptor.
            if self._selector.get_map().get(key.fd) is key and not key.data():
                self._selector.unregister(key.fd)
        for output in self.outputs.values():
            output.show_overdue()

    # --- ending ---------------------------------------------------------------------------

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a rank (`rank_process.receive_from_launcher`), if it still runs."""
        with contextlib.suppress(OSError):
            if rank in self._reports:
                self._reports[rank].send(message, descriptors)

    def terminate(self, grace: float | None = None) -> None:
        """End every rank: send SIGTERM, and after a grace period SIGKILL, to its process group.

        A rank that has reported an error gets no SIGTERM: it is exiting, and may still print.

        Args:
            grace: The grace period in seconds; None for `GRACE`.
        """
        if self._channel is None:
            return
        self.before_end()
        active = [rank for rank in self.running if self.outcomes[rank].error is None]
        # SIGCONT, so that a stopped rank receives SIGTERM, too.
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.end_ranks(active, number)
        if not self._process_events_until(time.monotonic() + (GRACE if grace is None else grace)):
            self.end_ranks(self.running, signal.SIGKILL)
            self._process_events_until(time.monotonic() + EXIT_TIMEOUT)
        self.close()

    def _wait_for_stop(
        self, grace: float, is_stop_requested: Callable[[], bool]
    ) -> RankError | None:
        """Wait until the ranks have stopped, then end those that have not."""
        deadline = time.monotonic() + grace
        while self.running:
            if is_stop_requested() and not self.was_asked_to_stop:
                self._ask_to_stop(grace)
            if not self.was_asked_to_stop and find_first_failure(self._all):
                return self._end_after_failure()
            if time.monotonic() >= deadline:
                break
            self._answer_request()
            self.process_events(_shorten(TICK, deadline))
            if error := self.after_events():
                self.terminate()
                return error
        if self.running:
            self._end_late_ranks(grace)
        self.close()
        failure = find_first_failure(self._all)
        if self.was_asked_to_stop and failure is not None and is_consequence(failure):
            return None  # the consequence of a rank's end by SIGTERM
        return make_rank_error(self._all)

    def _ask_to_stop(self, grace: float) -> None:
        self.was_asked_to_stop = True
        say(f"SIGTERM: waiting up to {grace:g} s for the ranks to save a checkpoint and stop")
        for rank in self.running:
            self.outcomes[rank].was_terminated = True
            self.send_signal(rank, signal.SIGTERM, group=False)
            self.send_signal(rank, signal.SIGCONT)  # a stopped rank and its workers continue

    def _end_late_ranks(self, grace: float) -> None:
        late = self.running
        verb = "was" if len(late) == 1 else "were"
        how = "killed" if self.was_asked_to_stop else "ended"
        say(f"{format_numbered(self.noun, late)} did not stop within {grace:g} s and {verb} {how}")
        self.terminate(grace=0.0 if self.was_asked_to_stop else None)

    def close(self) -> None:
        """Release everything; ranks that still run are killed."""
        if self._channel is None:
            return
        self.before_close()
        with contextlib.suppress(OSError):  # the fork server has exited
            self._channel.send({"kind": "end"})
        self._channel.close()
        self._channel = None
        self._wait_for_groups(time.monotonic() + EXIT_TIMEOUT)
        self._selector.close()
        for report in self._reports.values():
            report.close()
        self.probes.close()
        for address in [*self._stores]:
            self.close_store(address)
        close_outputs(self.outputs, self.noun)
        if self._own_fork_server is not None:
            self._own_fork_server.close()

    def release(self, rank: int) -> None:
        """Close what belongs to a rank that has exited; the others continue without it."""
        self.outcomes[rank].is_replaced = True
        self.pids.pop(rank, None)
        if report := self._reports.pop(rank, None):
            self._remove_reader(report.fileno())
            report.close()
        if output := self.outputs.pop(rank, None):
            for stream in output.streams:
                self._output_descriptors.discard(stream.reading)
                self._remove_reader(stream.reading)
            output.close()
        self.probes.remove(rank)

    def send_signal(self, rank: int, number: int, *, group: bool = True) -> None:
        """Send a signal to a rank, or to its whole process group."""
        if self._channel is None:
            return
        message = {"kind": "signal", "rank": rank, "number": int(number), "group": group}
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def _ask_for_stack(self, rank: int) -> None:
        self.send_signal(rank, STACK_SIGNAL, group=False)

    def _answer_request(self) -> None:
        """Print where the ranks are, if SIGUSR1 asked for it."""
        if take_request():
            self.hang_monitor.print_places()

    def end_ranks(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks' process groups; the end of these ranks is no failure then."""
        for rank in ranks:
            self.outcomes[rank].was_terminated = True
            self.send_signal(rank, number)

    def _end_after_failure(self) -> RankError | None:
        """Wait for the failure that explains the others, end all ranks and return its error."""
        began = time.monotonic()
        self._process_events_until(began + SETTLE)
        while self.running and time.monotonic() < began + SETTLE_CONSEQUENCE:
            failure = find_first_failure(self._all)
            if failure is None or not is_consequence(failure):
                break
            if any(outcome.has_returned for outcome in self._all):
                break
            self.process_events(POLL)
        while self._may_be_same() and time.monotonic() < began + SETTLE_SAME:
            self.process_events(POLL)
        error = make_rank_error(self._all)
        self.terminate()
        return error

    def _may_be_same(self) -> bool:
        """Return whether ranks that still run may be about to report the same error."""
        failure = find_first_failure(self._all)
        same = [] if failure is None else find_same_failures(self._all, failure)
        return bool(same) and any(self.outcomes[rank].error is None for rank in self.running)

    def _process_events_until(self, deadline: float) -> bool:
        """Process events until all started ranks have exited; return False at the deadline."""
        while self._started.intersection(self.running):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.process_events(left)
        return True

    def _wait_for_groups(self, deadline: float) -> None:
        """Wait until the ranks' process groups, including data loader workers, are gone."""
        left = set(self.pids.values())
        while left and time.monotonic() < deadline:
            left = {group for group in left if group_exists(group)}
            if left:
                time.sleep(POLL)

    # --- messages -----------------------------------------------------------------------------

    @property
    def _all(self) -> Sequence[Outcome]:
        return [outcome for outcome in self.outcomes.values() if not outcome.is_replaced]

    def add_reader(self, descriptor: int, callback: Callable[[], bool]) -> None:
        """Call `callback` whenever `descriptor` is readable, until it returns False."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _remove_reader(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _on_fork_server_message(self) -> bool:
        assert self._channel is not None
        received = self._channel.receive()
        if received is None:
            self._on_fork_server_lost()
            return False
        message = received[0]
        if message["kind"] == "failed":
            self._on_failed_start(message["rank"], message["reason"])
        elif message["rank"] < 0:
            return True
        elif message["kind"] == "started":
            self.pids[message["rank"]] = message["pid"]
        else:
            self._on_exit(message["rank"], message["status"])
        return True

    def _on_failed_start(self, rank: int, reason: str) -> None:
        """Note that the fork server could not fork a rank, or the process of the store (-1)."""
        outcome = self.outcomes[max(rank, min(self.outcomes))]
        outcome.error = outcome.error or describe_failed_start(rank, reason, self.noun)
        if rank >= 0:
            outcome.status = 1

    def _on_exit(self, rank: int, status: int) -> None:
        if report := self._reports.get(rank):
            report.stop_waiting()
        while self._on_report(rank):  # messages from before its exit
            pass
        outcome = self.outcomes[rank]
        outcome.status, outcome.when = status, outcome.when or time.monotonic()
        if status == -signal.SIGKILL and not outcome.was_terminated:
            outcome.hint = explain_sigkill(self._oom_kills)

    def _on_fork_server_lost(self) -> None:
        """Count every rank as killed: the kernel kills them when the fork server is gone."""
        self.has_fork_server = False
        for rank in self.running:
            self.outcomes[rank].status = -signal.SIGKILL
            self.outcomes[rank].when = time.monotonic()
            self.outcomes[rank].hint = "; the fork server that had started it exited"

    def _on_reports(self, rank: int) -> bool:
        """Process all available messages: the last one may decide how output is shown."""
        while self._on_report(rank):
            report = self._reports.get(rank)
            if report is None:
                return True
            waiting = select.poll()
            waiting.register(report, select.POLLIN)
            if not waiting.poll(0):
                return True
        return False

    def _on_report(self, rank: int) -> bool:
        """Process one message of a rank; return False if there are no more."""
        report = self._reports.get(rank)
        if report is None:
            return False
        received = report.receive()
        if received is None:
            self._remove_reader(report.fileno())
            self._reports.pop(rank).close()
            return True  # it is unregistered already
        self.take_report(rank, *received)
        return True

    def take_report(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Process a message that a rank has sent."""
        if self.on_report(rank, message):
            return
        outcome = self.outcomes[rank]
        match message["kind"]:
            case "stack":
                self.probes.add(rank, *descriptors)
            case "waiting":
                outcome.waiting_for = tuple(message["ranks"])
            case "value":
                self.values[rank] = read_memfd(descriptors[0])
                outcome.returned, outcome.when = True, message["time"]
            case "error":
                outcome.error = message
                if rank in self.outputs and not is_full():
                    self._hide_traceback(rank, outcome, message)

    def _hide_traceback(self, rank: int, outcome: Outcome, report: Message) -> None:
        """Hide the traceback of an error that its message, or another rank's end, explains."""
        is_own = report["plain"] and report["type"] not in BACKEND_ERRORS
        if is_consequence(outcome) and not is_own:
            where = f" ({report['where']})" if report["where"] else ""
            self.outputs[rank].hide_stderr(f"lost the connection to another rank{where}")
        elif report["plain"]:
            self.outputs[rank].hide_stderr()


def _shorten(timeout: float, deadline: float | None) -> float:
    """Return `timeout`, or the time left until the deadline if that is shorter."""
    left = timeout if deadline is None else deadline - time.monotonic()
    return max(0.0, min(timeout, left))
