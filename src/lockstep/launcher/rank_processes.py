"""The processes of one launch on this host: started, signalled, and what they report.

    RankProcesses ── rank, signal, end ──> fork server ── fork ──> a rank
          └── stack, waiting, value, error <── socket and pipes <──┘

`RankSupervisor` decides what follows from it.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from lockstep.launcher.channel import Channel, Message, open_pair, read_memfd
from lockstep.launcher.failure_attribution import (
    Outcome,
    count_oom_kills,
    describe_end,
    describe_failed_start,
    explain_sigkill,
    is_consequence,
)
from lockstep.launcher.failure_codes import OF_BACKEND
from lockstep.launcher.output import RankOutput, close_outputs
from lockstep.launcher.rank_probes import RankProbes
from lockstep.launcher.rank_stores import RankStores
from lockstep.launcher.stacks import STACK_SIGNAL
from lockstep.launcher.tracebacks import is_full
from lockstep.messages import log

__all__ = ["TICK", "OtherHosts", "RankProcesses", "StandardStreams"]

TICK = 0.25  # seconds between two checks for unfinished lines of output, and of other hosts


class OtherHosts(Protocol):
    """The ranks of other hosts, which the launcher of this one has started there."""

    @property
    def present(self) -> Sequence[int]:
        """The indices of the other hosts that can start ranks."""

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host; 0 for this one."""

    def has_begun(self, rank: int) -> bool:
        """Return whether a rank of another host has published an operation."""

    def find_pid(self, rank: int) -> int:
        """Return the process id of a rank on its host; 0 if it is unknown."""

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank of another host, if it still runs."""

    def send_signal(self, rank: int, number: int, *, group: bool) -> None:
        """Send a signal to a rank of another host, or to its whole process group."""

    def release(self, rank: int) -> None:
        """Close what belongs to a rank that has exited, if another host has started it."""


# It has many attributes: all that exists once for each rank.
class RankProcesses:
    """The processes of one launch on this host.

    Args:
        channel: The fork server's socket for this launch (`ForkServer.open_launch`).
        ranks: The ranks to start here.
        noun: The word before the number of a rank in messages: "member" in an elastic run, where
            the rank of a process can differ from round to round.

    Attributes:
        outcomes: How each rank ended.
        values: The pickled values that ranks have returned.
        pids: The process ids of ranks that have started.
        outputs: The output of ranks whose output is not this process's.
        probes: Where the ranks are.
        stores: The stores of the ranks.
        readers: What is called for descriptors that become readable.
        on_report: Called with every message of a rank; returns whether it has handled the message.
        on_tick: Called after events were processed, at least every `TICK` seconds while the
            ranks are waited for.
        show_progress: Called with the lines of a rank's live region, which have rich's markup.
        others: The ranks of other hosts; None if this one has started them all.
        started: The ranks that were started.
        has_fork_server: Whether the fork server runs; if it ends, all ranks are killed.
    """

    def __init__(self, channel: Channel, ranks: range, noun: str) -> None:
        self.noun = noun
        self.outcomes = {rank: Outcome(rank, noun=noun) for rank in ranks}
        self.values: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self.outputs: dict[int, RankOutput] = {}
        self.probes = RankProbes(
            self.pids, lambda rank: self.send_signal(rank, STACK_SIGNAL, group=False)
        )
        self.stores = RankStores(channel)
        self.on_report: Callable[[int, Message], bool] = lambda rank, message: False
        self.on_tick: Callable[[], None] = lambda: None
        self.show_progress: Callable[[Sequence[str]], None] = lambda lines: None
        self.others: OtherHosts | None = None
        self.has_fork_server = True
        self.started: set[int] = set()
        self._channel: Channel | None = channel
        self._reports: dict[int, Channel] = {}
        self._streams = StandardStreams()
        self._oom_kills = count_oom_kills()
        self.readers = Readers()
        self.readers.add(channel.fileno(), self._on_fork_server_message)

    @property
    def is_closed(self) -> bool:
        """Whether the launch has ended."""
        return self._channel is None

    @property
    def running(self) -> list[int]:
        """The ranks that have not exited yet."""
        return [rank for rank, outcome in self.outcomes.items() if outcome.status is None]

    @property
    def present(self) -> list[int]:
        """The indices of the hosts that can start ranks, including this one."""
        return [0] if self.others is None else [0, *self.others.present]

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return 0 if self.others is None else self.others.host_of(rank)

    def has_begun(self, rank: int) -> bool:
        """Return whether a rank has published an operation."""
        if (others := self._elsewhere(rank)) is not None:
            return others.has_begun(rank)
        return self.probes.read_activity(rank).number > 0

    def find_pid(self, rank: int, asking: int) -> int:
        """Return a rank's process id; 0 if `asking` is on another host, or if it is unknown."""
        if self.host_of(rank) != self.host_of(asking):
            return 0
        others = self._elsewhere(rank)
        return self.pids.get(rank, 0) if others is None else others.find_pid(rank)

    def remove_at_end(self, folder: str) -> None:
        """Have a folder and its contents removed at the end, even if this process is killed."""
        assert self._channel is not None
        self._channel.send({"kind": "folder", "path": folder})

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
            message = {**task, "kind": "rank", "rank": rank}
            self._channel.send(message, [*(streams or inherited), theirs.fileno(), work])
        self.started.add(rank)
        theirs.close()
        self._reports[rank] = ours
        self.readers.add(ours.fileno(), partial(self._on_reports, rank))
        if output is not None:
            output.close_writing_ends()
            self.outputs[rank] = output
            for stream in output.streams:
                self.readers.add(stream.reading, partial(output.read, stream), is_output=True)

    def expect(self, rank: int) -> None:
        """Count a rank that another host starts among those that are waited for."""
        self.outcomes[rank] = Outcome(rank, noun=self.noun)
        self.started.add(rank)

    def process_events(self, timeout: float) -> None:
        """Wait for messages and output of the ranks, at most `timeout` s, and process them."""
        self.readers.process(min(timeout, TICK))
        for output in self.outputs.values():
            output.show_overdue()
        self.on_tick()

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a rank (`rank_process.receive_from_launcher`), if it still runs.

        Args:
            rank: The rank.
            message: The message.
            descriptors: Descriptors for a rank of this host.
        """
        if (others := self._elsewhere(rank)) is not None:
            others.send(rank, message)
            return
        with contextlib.suppress(OSError):
            if rank in self._reports:
                self._reports[rank].send(message, descriptors)

    def release(self, rank: int) -> None:
        """Close what belongs to a rank that has exited; the others continue without it."""
        self.outcomes[rank].is_replaced = True
        self.pids.pop(rank, None)
        if report := self._reports.pop(rank, None):
            self.readers.remove(report.fileno())
            report.close()
        if output := self.outputs.pop(rank, None):
            for stream in output.streams:
                self.readers.remove(stream.reading)
            output.close()
        self.probes.remove(rank)
        if self.others is not None:
            self.others.release(rank)

    def send_signal(self, rank: int, number: int, *, group: bool = True) -> None:
        """Send a signal to a rank, or to its whole process group."""
        if (others := self._elsewhere(rank)) is not None:
            others.send_signal(rank, number, group=group)
            return
        if self._channel is None:
            return
        message = {"kind": "signal", "rank": rank, "number": int(number), "group": group}
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def end_ranks(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks' process groups; the end of these ranks is no failure then."""
        for rank in ranks:
            self.outcomes[rank].was_terminated = True
            self.send_signal(rank, number)

    def end_launch(self) -> None:
        """Make the fork server kill what is left of the ranks."""
        assert self._channel is not None
        with contextlib.suppress(OSError):  # the fork server has exited
            self._channel.send({"kind": "end"})
        self._channel.close()
        self._channel = None

    def close_files(self) -> None:
        """Close everything that belongs to the ranks, which have ended."""
        self.readers.close()
        for report in self._reports.values():
            report.close()
        self.probes.close()
        self.stores.close()
        close_outputs(self.outputs, self.noun)

    def _elsewhere(self, rank: int) -> OtherHosts | None:
        """Return the other hosts if a rank is on one of them."""
        others = self.others
        return None if others is None or others.host_of(rank) == 0 else others

    # --- messages -----------------------------------------------------------------------------

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
            if message["kind"] == "ended":
                self._on_store_end(message["status"])
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

    def _on_store_end(self, status: int) -> None:
        """Note that the process of the store has ended; ranks that have joined do without it."""
        self.stores.is_lost = True
        log(f"the process of the ranks' store {describe_end(Outcome(-1, status))}")

    def _on_exit(self, rank: int, status: int) -> None:
        if report := self._reports.get(rank):
            report.stop_waiting()
        while self._on_report(rank):  # messages from before its exit
            pass
        outcome = self.outcomes[rank]
        outcome.status = status
        outcome.when = outcome.when or time.monotonic()
        if status == -signal.SIGKILL and not outcome.was_terminated:
            outcome.hint = explain_sigkill(self._oom_kills)

    def _on_fork_server_lost(self) -> None:
        """Count every rank as killed: the kernel kills them when the fork server is gone."""
        self.has_fork_server = False
        if not self.pids:
            self._on_failed_start(min(self.outcomes), "")
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
            self.readers.remove(report.fileno())
            self._reports.pop(rank).close()
            return True  # it is unregistered already
        self.take_report(rank, *received)
        return True

    def take_report(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Process a message that a rank has sent."""
        if message["kind"] == "progress":
            self.show_progress(message["lines"])
            return
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
                outcome.returned = True
                outcome.when = message["time"]
            case "error":
                outcome.error = message
                if rank in self.outputs and not is_full():
                    self._hide_traceback(rank, outcome, message)

    def _hide_traceback(self, rank: int, outcome: Outcome, report: Message) -> None:
        """Hide the traceback of an error that its message, or another rank's end, explains."""
        is_own = report["plain"] and report["code"] not in OF_BACKEND
        if is_consequence(outcome) and not is_own:
            where = f" ({report['where']})" if report["where"] else ""
            self.outputs[rank].hide_stderr(f"lost the connection to another rank{where}")
        elif report["plain"]:
            self.outputs[rank].hide_stderr()


class Readers:
    """The descriptors that a process waits for, and what it calls when one is readable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._outputs: set[int] = set()

    def add(
        self, descriptor: int, callback: Callable[[], bool], *, is_output: bool = False
    ) -> None:
        """Call `callback` whenever `descriptor` is readable, until it returns False.

        Args:
            descriptor: The descriptor.
            callback: Reads from it.
            is_output: Whether it comes after the others: a report decides how to show what was
                printed after it.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, callback)
        if is_output:
            self._outputs.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor, before it is closed."""
        self._outputs.discard(descriptor)
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def process(self, timeout: float) -> None:
        """Wait until a descriptor is readable, at most `timeout` s, and call what belongs to it."""
        events = self._selector.select(timeout)
        for key, _ in sorted(events, key=lambda event: event[0].fd in self._outputs):
            # A callback for an earlier event may have closed this one's descriptor.
            if self._selector.get_map().get(key.fd) is key and not key.data():
                self.remove(key.fd)

    def close(self) -> None:
        """Forget all descriptors."""
        self._selector.close()


class StandardStreams:
    """The standard streams of this process, which ranks inherit.

    Rank 0 inherits the standard input; the standard input of the others is empty. If a new process
    of rank 0 begins the script again, it reads an input file from where the first process began.
    Input from a terminal or a pipe cannot be read again.
    """

    def __init__(self) -> None:
        self._begin: int | None = None  # offset in the input file; None before rank 0's start

    @contextlib.contextmanager
    def inherit(self, has_input: bool) -> Iterator[list[int]]:
        """Yield the descriptors of stdin, stdout and stderr for one process.

        Args:
            has_input: Whether the process inherits the standard input.
        """
        with contextlib.ExitStack() as opened:
            null = os.open(os.devnull, os.O_RDWR)
            opened.callback(os.close, null)
            streams = [number if _is_open(number) else null for number in range(3)]
            if not has_input:
                streams[0] = null
            elif stat.S_ISREG(os.fstat(streams[0]).st_mode):
                # To where the first process began; no earlier process reads it now.
                if self._begin is None:
                    self._begin = os.lseek(streams[0], 0, os.SEEK_CUR)
                os.lseek(streams[0], self._begin, os.SEEK_SET)
            yield streams


def _is_open(descriptor: int) -> bool:
    """Return whether a stream is open; if Python found it closed, another file has its number."""
    if (sys.__stdin__, sys.__stdout__, sys.__stderr__)[descriptor] is None:
        return False
    with contextlib.suppress(OSError):
        return bool(os.fstat(descriptor))
    return False
