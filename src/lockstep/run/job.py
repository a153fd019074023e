"""The ranks of one launch, started and watched from the launcher.

    running ──a rank fails──> settling ──> ending: SIGTERM ──grace──> SIGKILL ──> ended
       └────────────── every rank ended ───────────────────────────────────────────^

Settling is short: a rank that lost its connection often reports before the
kernel has told that the other side was killed. Nothing here runs by itself: the
ranks are watched while somebody joins.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Sequence

from lockstep.errors import RankError
from lockstep.run.channel import Channel, Message, pair, unpack
from lockstep.run.preload import Preloaded
from lockstep.run.verdict import Outcome, consequence, first_failure, rank_error

__all__ = ["Job"]

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
SETTLE = 0.05  # seconds to wait for a better explanation of a failure ...
SETTLE_CONSEQUENCE = 2.0  # ... that looks like the consequence of another rank's end
POLL = 0.005  # seconds between two looks at a process group that should be gone


class Job:
    """A launch's ranks. `template` is ended with the job where it belongs to it alone."""

    def __init__(self, channel: Channel, nprocs: int, own_template: Preloaded | None) -> None:
        self.outcomes = [Outcome(rank) for rank in range(nprocs)]
        self.values: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self._channel: Channel | None = channel
        self._own_template = own_template
        self._reports: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)

    def start_store(self, listening: int, port: int) -> None:
        """Serve the ranks' store on the socket `listening`, which is bound to `port`."""
        assert self._channel is not None
        self._channel.send({"kind": "store", "rank": -1, "port": port}, [listening])

    def start_rank(self, rank: int, task: Message, streams: Sequence[int], work: int) -> None:
        """Start one rank; `streams` become its stdin, stdout and stderr."""
        assert self._channel is not None
        ours, theirs = pair()
        order = {**task, "kind": "rank", "rank": rank}
        self._channel.send(order, [*streams, theirs.fileno(), work])
        theirs.close()
        self._reports[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, rank)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [outcome.rank for outcome in self.outcomes if outcome.status is None]

    def watch(self, deadline: float | None) -> RankError | None:
        """Wait until every rank ended well (None) or one failed (its error, all ended).

        `deadline` is a `time.monotonic()` time; TimeoutError when it passes, with
        the ranks still running.
        """
        while self.running:
            if first_failure(self.outcomes) is not None:
                return self._fail()
            self._pump(self._left(deadline))
        self.close()
        return rank_error(self.outcomes)

    def terminate(self, grace: float = GRACE) -> None:
        """End every rank: SIGTERM, after `grace` seconds SIGKILL, by process group."""
        self._signal_all(signal.SIGTERM)
        if not self._pump_until(time.monotonic() + grace):
            self._signal_all(signal.SIGKILL)
            self._pump_until(time.monotonic() + grace)
        self.close()

    def close(self) -> None:
        """Let go of the ranks' processes; what is left of them is killed."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        for report in self._reports.values():
            report.close()
        self._selector.close()
        self._wait_for_groups(time.monotonic() + GRACE)
        if self._own_template is not None:
            self._own_template.end()

    def _left(self, deadline: float | None) -> float | None:
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _fail(self) -> RankError | None:
        """Wait for the failure that explains the others, end all ranks, return its error."""
        now = time.monotonic()
        self._pump_until(now + SETTLE)
        failure = first_failure(self.outcomes)
        while failure and consequence(failure) and time.monotonic() < now + SETTLE_CONSEQUENCE:
            if not self.running or any(outcome.left for outcome in self.outcomes):
                break
            self._pump(POLL)
            failure = first_failure(self.outcomes)
        error = rank_error(self.outcomes)
        self.terminate()
        return error

    def _pump_until(self, deadline: float) -> bool:
        while self.running:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._pump(left)
        return True

    def _pump(self, patience: float | None) -> None:
        """Wait for news of the ranks, at most `patience` seconds, and take it in."""
        for key, _ in self._selector.select(patience):
            if key.data is None:
                self._take_news()
            else:
                self._take_report(key.data)

    def _take_news(self) -> None:
        assert self._channel is not None
        received = self._channel.receive()
        if received is None:
            self._lose_template()
            return
        news = received[0]
        if news["rank"] < 0:
            return
        if news["kind"] == "started":
            self.pids[news["rank"]] = news["pid"]
            return
        while self._take_report(news["rank"]):  # what it said before it ended
            pass
        outcome = self.outcomes[news["rank"]]
        outcome.status = news["status"]
        outcome.when = outcome.when or time.monotonic()

    def _lose_template(self) -> None:
        """Count every rank as killed: the kernel does it when the template is gone."""
        for rank in self.running:
            outcome = self.outcomes[rank]
            outcome.status, outcome.when = -signal.SIGKILL, time.monotonic()
        if self._channel is not None:
            self._selector.unregister(self._channel)

    def _take_report(self, rank: int) -> bool:
        """Take in a rank's report; False at the end of what it said."""
        report = self._reports.get(rank)
        if report is None:
            return False
        received = report.receive()
        if received is None:
            self._selector.unregister(report)
            del self._reports[rank]
            report.close()
            return False
        message, descriptors = received
        if message["kind"] == "value":
            self.values[rank] = unpack(descriptors[0])
            self.outcomes[rank].returned = True
            self.outcomes[rank].when = message["time"]
        else:
            self.outcomes[rank].error = message
        return True

    def _signal_all(self, number: int) -> None:
        if self._channel is None:
            return
        for rank in self.running:
            self.outcomes[rank].ended_by_us = True
            with contextlib.suppress(OSError):
                self._channel.send({"kind": "signal", "rank": rank, "number": int(number)})

    def _wait_for_groups(self, deadline: float) -> None:
        """Wait until the ranks' process groups, data loader workers included, are gone."""
        left = set(self.pids.values())
        while left and time.monotonic() < deadline:
            left = {group for group in left if _exists(group)}
            if left:
                time.sleep(POLL)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number belongs to somebody else by now
        return False
    return True
