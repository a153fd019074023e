"""The ranks of one launch, started and watched from the launcher.

    running ──a rank fails──> settling ──> ending: SIGTERM ──grace──> SIGKILL ──> ended
       └────────────── every rank ended ───────────────────────────────────────────^

Settling is short: a rank that lost its connection often reports before the
kernel has told that the other side was killed. Nothing here runs by itself: the
ranks are watched while somebody waits for them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from lockstep.errors import RankError
from lockstep.launcher import memory, private_store, stack
from lockstep.launcher.channel import Channel, Message, pair, unpack
from lockstep.launcher.meeting import bind
from lockstep.launcher.output import Output
from lockstep.launcher.preload import Preloaded
from lockstep.launcher.verdict import Outcome, consequence, deserted, first_failure, rank_error

__all__ = ["GRACE", "TICK", "Job"]

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
SETTLE = 0.05  # seconds to wait for a better explanation of a failure ...
SETTLE_CONSEQUENCE = 2.0  # ... that looks like the consequence of another rank's end
SETTLE_KILLED = 0.2  # ... that may be in the kernel's log in a moment
POLL = 0.005  # seconds between two looks at a process group that should be gone
TICK = 0.25  # seconds between two looks at unfinished lines
ANSWER = 0.2  # seconds that a rank has to say where it is


class Job:
    """A launch's ranks, which count from `first_rank` on this host.

    `own_template` is ended with the job: a template that belongs to it alone.
    """

    def __init__(
        self, channel: Channel, ranks: range, own_template: Preloaded | None = None
    ) -> None:
        self.outcomes = {rank: Outcome(rank) for rank in ranks}
        self.values: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self.outputs: dict[int, Output] = {}
        self._channel: Channel | None = channel
        self._own_template = own_template
        self._reports: dict[int, Channel] = {}
        self._stacks: dict[int, int] = {}
        self._opened: list[int] = []
        self._printed: set[int] = set()
        self._memory_ends = memory.counted()
        self._selector = selectors.DefaultSelector()
        self.listen(channel.fileno(), self._take_news)

    # --- starting -------------------------------------------------------------------------

    def serve_store(self, address: str, port: int) -> int:
        """Serve the ranks' store at `address`; return its port, a free one for `port` 0."""
        assert self._channel is not None
        with bind(address, port) as listening:
            port = int(listening.getsockname()[1])
            self._channel.send({"kind": "store", "rank": -1, "port": port}, [listening.fileno()])
        return port

    def create_store(self) -> str:
        """Create the ranks' private store, for ranks of this host only.

        Returns:
            Its address, which holds until the job is closed; "" where there cannot be one.
        """
        created = private_store.create()
        if created is None:
            return ""
        descriptor, address = created
        self._opened.append(descriptor)
        return address

    def start(self, rank: int, task: Message, work: int, output: Output | None = None) -> None:
        """Start one rank, which finds its function in the parcel `work`.

        With an `output` its streams go there, otherwise they are this process's.
        Rank 0 reads this process's standard input, the others an empty one.
        """
        assert self._channel is not None
        ours, theirs = pair()
        with contextlib.ExitStack() as opened:
            null = os.open(os.devnull, os.O_RDWR)
            opened.callback(os.close, null)
            standard = [number if _open(number) else null for number in range(3)]
            streams = [standard[0] if rank == 0 else null, *standard[1:]]
            if output is not None:
                streams[1:] = [stream.writing for stream in output.streams]
            order = {**task, "kind": "rank", "rank": rank}
            self._channel.send(order, [*streams, theirs.fileno(), work])
        theirs.close()
        self._reports[rank] = ours
        self.listen(ours.fileno(), partial(self._take_report, rank))
        if output is not None:
            self._follow(rank, output)

    def _follow(self, rank: int, output: Output) -> None:
        output.started()
        self.outputs[rank] = output
        for stream in output.streams:
            self._printed.add(stream.reading)
            self.listen(stream.reading, partial(output.read, stream))

    # --- watching -------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [rank for rank, outcome in self.outcomes.items() if outcome.status is None]

    def watch(
        self, deadline: float | None = None, tick: Callable[[], None] = lambda: None
    ) -> RankError | None:
        """Wait until every rank ended well (None) or one failed (its error, all ended).

        `deadline` is a `time.monotonic()` time; TimeoutError when it passes, with
        the ranks still running. `tick` is called from time to time.
        """
        while self.running:
            if first_failure(self._all) or deserted(self._all):
                return self._fail()
            tick()
            self.pump(_sooner(deadline, TICK))
            if deadline is not None and time.monotonic() >= deadline and self.running:
                raise TimeoutError
        self.close()
        return rank_error(self._all)

    def pump(self, patience: float) -> None:
        """Wait for news of the ranks, at most `patience` seconds, and take it in."""
        events = self._selector.select(patience)
        # What ranks print comes last: a report says how to show what was printed after it.
        for key, _ in sorted(events, key=lambda event: event[0].fd in self._printed):
            # An earlier callback of this round may have closed what this one is about.
            if self._selector.get_map().get(key.fd) is key and not key.data():
                self._selector.unregister(key.fd)
        for output in self.outputs.values():
            output.tick()

    def stopped(self, rank: int) -> bool:
        """Whether a running rank is stopped by a signal (SIGSTOP, Ctrl-Z), on Linux."""
        return _state(self.pids.get(rank, 0)) == "T"

    def whereabouts(self, rank: int) -> str:
        """Say where a running rank is: "in all_reduce, train.py:31", "stopped", or nothing."""
        if self.stopped(rank):
            return "stopped"
        return stack.where(self.dump(rank))

    def dump(self, rank: int) -> str:
        """Return the stack of a rank's main thread; empty where it does not answer."""
        descriptor = self._stacks.get(rank)
        if descriptor is None or self._channel is None:
            return ""
        before, deadline = os.fstat(descriptor).st_size, time.monotonic() + ANSWER
        self.signal(rank, stack.SIGNAL, group=False)
        size = before
        while time.monotonic() < deadline and (size == before or not size):
            time.sleep(POLL)
            size = os.fstat(descriptor).st_size
        time.sleep(POLL)  # the rest of it
        return os.pread(descriptor, 1 << 16, before).decode(errors="replace")

    # --- ending ---------------------------------------------------------------------------

    def terminate(self, grace: float = GRACE) -> None:
        """End every rank: SIGTERM, after `grace` seconds SIGKILL, by process group.

        A rank that has reported an error is ending by itself, and still printing it.
        """
        active = [rank for rank in self.running if self.outcomes[rank].error is None]
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped one is to hear it too
            self._end(active, number)
        if not self._pump_until(time.monotonic() + grace):
            self._end(self.running, signal.SIGKILL)
            self._pump_until(time.monotonic() + GRACE)
        self.close()

    def close(self) -> None:
        """Let go of the ranks' processes; what is left of them is killed."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        self._wait_for_groups(time.monotonic() + GRACE)
        self._selector.close()
        for report in self._reports.values():
            report.close()
        for descriptor in (*self._stacks.values(), *self._opened):
            os.close(descriptor)
        for output in self.outputs.values():
            output.close()
        if self._own_template is not None:
            self._own_template.end()

    def signal(self, rank: int, number: int, *, group: bool = True) -> None:
        """Send a signal to a rank, or to its whole process group."""
        if self._channel is None:
            return
        order = {"kind": "signal", "rank": rank, "number": int(number), "group": group}
        with contextlib.suppress(OSError):
            self._channel.send(order)

    def _end(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            self.outcomes[rank].ended_by_us = True
            self.signal(rank, number)

    def _fail(self) -> RankError | None:
        """Wait for the failure that explains the others, end all ranks, return its error."""
        began = time.monotonic()
        self._pump_until(began + SETTLE)
        while self.running and time.monotonic() < began + SETTLE_CONSEQUENCE:
            failure = first_failure(self._all)
            if failure is None or not consequence(failure) or any(o.left for o in self._all):
                break
            self.pump(POLL)
        error = rank_error(self._all)
        self.terminate()
        return error

    def _pump_until(self, deadline: float) -> bool:
        while self.running:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.pump(left)
        return True

    def _wait_for_groups(self, deadline: float) -> None:
        """Wait until the ranks' process groups, data loader workers included, are gone."""
        left = set(self.pids.values())
        while left and time.monotonic() < deadline:
            left = {group for group in left if _exists(group)}
            if left:
                time.sleep(POLL)

    # --- news -----------------------------------------------------------------------------

    @property
    def _all(self) -> Sequence[Outcome]:
        return list(self.outcomes.values())

    def listen(self, descriptor: int, callback: Callable[[], bool]) -> None:
        """Have `pump` call `callback` whenever `descriptor` is readable, until it returns False."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _take_news(self) -> bool:
        assert self._channel is not None
        received = self._channel.receive()
        if received is None:
            self._lose_template()
            return False
        news = received[0]
        if news["rank"] < 0:
            return True
        if news["kind"] == "started":
            self.pids[news["rank"]] = news["pid"]
        else:
            self._take_end(news["rank"], news["status"])
        return True

    def _take_end(self, rank: int, status: int) -> None:
        while self._take_report(rank):  # what it said before it ended
            pass
        outcome = self.outcomes[rank]
        outcome.status, outcome.when = status, outcome.when or time.monotonic()
        if status == -signal.SIGKILL and not outcome.ended_by_us:
            outcome.hint = self._why_killed(rank)

    def _why_killed(self, rank: int) -> str:
        deadline = time.monotonic() + SETTLE_KILLED
        while not (why := memory.hint(self.pids.get(rank, 0), self._memory_ends)):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL * 10)
        return why

    def _lose_template(self) -> None:
        """Count every rank as killed: the kernel does it when the template is gone."""
        for rank in self.running:
            self.outcomes[rank].status = -signal.SIGKILL
            self.outcomes[rank].when = time.monotonic()
            self.outcomes[rank].hint = "; the process that had started it ended"

    def _take_report(self, rank: int) -> bool:
        """Take in one message of a rank; False at the end of what it says."""
        report = self._reports.get(rank)
        if report is None:
            return False
        received = report.receive()
        if received is None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(report.fileno())
            self._reports.pop(rank).close()
            return True  # unregistered here already
        message, descriptors = received
        outcome = self.outcomes[rank]
        match message["kind"]:
            case "stack":
                self._stacks[rank] = descriptors[0]
            case "waiting":
                outcome.awaits = tuple(message["ranks"])
            case "value":
                self.values[rank] = unpack(descriptors[0])
                outcome.returned, outcome.when = True, message["time"]
            case "error":
                outcome.error = message
                if consequence(outcome) and rank in self.outputs:
                    where = f" ({message['where']})" if message["where"] else ""
                    self.outputs[rank].hush(f"lost the connection to another rank{where}")
        return True


def _sooner(deadline: float | None, patience: float) -> float:
    if deadline is None:
        return patience
    return max(0.0, min(patience, deadline - time.monotonic()))


def _open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _state(pid: int) -> str:
    """Return the letter of a process's state on Linux: R, S, D, T (stopped), Z."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # gone, or somebody else's by now
        return False
    return True
