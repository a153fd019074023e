"""A group of ranks on several hosts, as one of its ranks holds it.

    local     the native group of the ranks on this host: shared memory
    link      the connections of this rank to the ranks on other hosts

Sums of gradients run one after the other in a thread of the group. If a call fails, one cause is
stated by all ranks: the rank that finds it writes it to the store, then wakes the ranks of its host
(through the native group) and all others (by closing its connections).
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.hosts.failure_cause import FailureCause
from lockstep.comm.hosts.link import HostLink
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.sum_thread import SumThread
from lockstep.comm.native_module import load_native

__all__ = ["GLOO_MARGIN", "GroupError", "HostGroup"]

SILENCE_GRACE = 2.0  # seconds to wait for the cause of a failure
LOCAL_MARGIN = 1.0
"""Seconds by which ranks of one host wait longer for each other than for other hosts."""

GLOO_MARGIN = timedelta(seconds=1)
"""The time by which Gloo waits longer than a rank, which can then write the cause before the
connections are closed."""

PROBE_TAG = (1 << 31) - 2  # of a message that nobody receives
SILENCE = re.compile(r"rank \d+ on host \S* timed out after [\d.]+ s, waiting for rank ")

_open: weakref.WeakSet[HostGroup] = weakref.WeakSet()  # whose connections are not closed yet


@atexit.register
def _close_connections() -> None:
    """Close what a program has left open: a thread that Gloo wakes later would end the process.

    It would wait for the interpreter's lock, which Python 3.11 answers at exit by ending the
    thread, in a destructor of C++ that must not throw.
    """
    for group in list(_open):
        if group.process == os.getpid():  # not a fork of the process that joined the group
            group.close()


class GroupError(dist.DistBackendError):
    """A call of a group across hosts failed; the group cannot be used any longer."""


class HostGroup:
    """A group of ranks on several hosts.

    It has 17 attributes, because every error names the ranks, their hosts, the call and the cause.

    Args:
        hosts: The ranks of each host.
        rank: This rank.
        global_ranks: The ranks of the world, by rank of the group.
        host_names: The name of each host.
        name: The name of the group.
        store: The store of the group.
        local: The native backend of the ranks on this host, in the order of the map.
        gloo: A `ProcessGroupGloo` of all ranks.
        timeout: Seconds for each call.

    Attributes:
        map: The ranks of each host.
        rank: This rank.
        local: The native backend of this host.
        gloo: The `ProcessGroupGloo`.
        link: The connections to other hosts, for the thread of the sums.
        name: The name of the group.
        timeout: Seconds for each call.
        failure: Why the group can no longer be used; "" if it can.
        process: The process that joined the group.
    """

    def __init__(
        self,
        hosts: HostMap,
        rank: int,
        global_ranks: Sequence[int],
        host_names: Sequence[str],
        name: str,
        store: Any,
        local: Any,
        gloo: Any,
        timeout: float,
    ) -> None:
        self.map, self.rank, self.name = hosts, rank, name
        self._global_ranks, self._host_names = tuple(global_ranks), tuple(host_names)
        self._cause = FailureCause(store)
        self.local, self.gloo = local, gloo
        self.link = HostLink(hosts, rank, local, gloo, self.describe_wait, self.explain)
        self.set_timeout(timeout)
        self.failure, self._failing = "", threading.Lock()
        self._sum, self._sums_begun = "", 0  # such as "reproducible_all_reduce #3"
        self._sums = SumThread(self._explain_sum)
        self.process = os.getpid()
        _open.add(self)

    # ---- names ----

    def format_rank(self, rank: int) -> str:
        """Return "rank 2", with the rank in the world."""
        return f"rank {self.global_rank(rank)}"

    def global_rank(self, rank: int) -> int:
        """Return the rank in the world."""
        return self._global_ranks[rank]

    def describe(self, rank: int) -> str:
        """Return "rank 2 on host b"."""
        return f"{self.format_rank(rank)} on host {self._host_names[self.map.host_of(rank)]}"

    def describe_wait(self, peer: int) -> str:
        """Return what the thread of the sums waits for."""
        return f"{self._sum} on group {self.name}, waiting for {self.describe(peer)}"

    # ---- sums ----

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds for each of the calls that follow."""
        self.timeout = timeout
        self.local._set_default_timeout(timedelta(seconds=timeout + LOCAL_MARGIN))

    def submit(self, function: Callable[[], None]) -> PendingSum:
        """Run a function in the thread of the sums, after the earlier ones."""
        self.check_process()
        return PendingSum(self, self._sums.submit(function))

    def begin_sum(self, count: int) -> int:
        """Begin a sum of some elements; return its number in the group, from 1.

        Raises:
            GroupError: The group has failed before.
        """
        self._sums_begun += 1
        self._sum = f"reproducible_all_reduce #{self._sums_begun}"
        self.check(self._sum)
        self.link.deadline = time.monotonic() + self.timeout
        load_native().publish_call(
            "reproducible_all_reduce", -1, self._sums_begun, count, self.name
        )
        return self._sums_begun

    def _explain_sum(self, error: BaseException) -> BaseException:
        """Return the exception for a sum that failed, and end the group."""
        if isinstance(error, GroupError):
            return error
        if isinstance(error, RuntimeError):
            return self.explain_local(str(error))
        self.fail(f"{self.describe(self.rank)} raised {type(error).__name__}: {error}")
        return error

    # ---- failures ----

    def check_process(self) -> None:
        """Raise DistBackendError in a fork of the process that joined the group."""
        if self.process != os.getpid():
            raise dist.DistBackendError(
                f"{self.format_rank(self.rank)}: process {os.getpid()} is a fork of process "
                f"{self.process}, which joined group {self.name}, and cannot use the group: make "
                f"this call in process {self.process}, or start the new process by spawning it and "
                "let it join a group of its own"
            )

    def check(self, call: str) -> None:
        """Raise GroupError if the group has failed before this call."""
        if self.failure:
            raise GroupError(self.sentence(call, f"the group had failed: {self.failure}"))

    def explain(self, peer: int, error: str) -> GroupError:
        """Return the exception for a message of a sum that failed, and end the group."""
        if "Timed out" in error:
            return self.fail(
                f"{self.describe(self.rank)} timed out after {self.timeout:g} s, waiting for "
                f"{self.describe(peer)}"
            )
        return self.fail(self._explain_connection(peer, error))

    def explain_call(
        self, call: str, awaited: str, peer: int | None, seconds: float, error: str
    ) -> GroupError:
        """Return the exception for a call of Gloo that failed, and end the group.

        Args:
            call: The call, such as "all_reduce #3".
            awaited: What it waits for, such as "the other ranks".
            peer: The rank at the other end of a message; None for all others.
            seconds: The timeout.
            error: Gloo's message.
        """
        if "imed out" in error:
            self.fail(
                f"{self.describe(self.rank)} timed out after {seconds:g} s in {call}, waiting for "
                f"{awaited}: check that every rank makes this call, and that the network between "
                "the hosts works"
            )
        else:
            closed = self._find_closed() if peer is None else peer
            self.fail(self._explain_connection(closed, error))
        return GroupError(self.sentence(call, self.failure))

    def has_ended(self) -> bool:
        """Return whether a rank has written why the group has failed; ask again.

        Gloo may forget a message whose connection is closed, and never wake who waits for it.
        """
        return self._cause.is_written() or bool(self.failure)

    def explain_local(self, error: str) -> GroupError:
        """Return the exception for a call of the native group that failed, and end the group."""
        return self.fail(error.partition("\n")[0].rpartition(" failed: ")[2])

    def fail(self, reason: str) -> GroupError:
        """End the group for all its ranks; return the exception to raise.

        Only the first reason counts, of this rank and of all ranks.
        """
        with self._failing:
            if not self.failure:
                self.failure = self._agree_on_cause(reason)
                self.link.close()
        return GroupError(self.sentence(self._sum, self.failure))

    def sentence(self, call: str, reason: str) -> str:
        """Return the message of an exception about a call of this rank."""
        return f"{self.format_rank(self.rank)}: {call} on group {self.name} failed: {reason}"

    def _explain_connection(self, peer: int | None, error: str) -> str:
        other = "another rank" if peer is None else self.describe(peer)
        if "closed by peer" in error or "reset by peer" in error or "pair closure" in error:
            return (
                f"{other} closed its connection (its process has ended or has left the group, see "
                "its output)"
            )
        said = error.rpartition("] ")[2].partition(". ")[0]
        return f"the connection of {self.describe(self.rank)} to {other} failed: {said}"

    def _find_closed(self) -> int | None:
        """Return the first rank whose connection is closed; None if none is.

        A rank that closes its connections because of another one has written the cause before.
        """
        probe = torch.empty(1, dtype=torch.uint8)
        for rank in range(self.map.size):
            if rank != self.rank:
                try:
                    self.gloo.send([probe], rank, PROBE_TAG)
                except RuntimeError:
                    return rank
        return None

    def _agree_on_cause(self, reason: str) -> str:
        """Wake the ranks of this host, and return the cause that the first rank has found.

        Silence may have a cause on the other host, which is found there a moment later.
        """
        is_silence = SILENCE.match(reason) is not None
        if is_silence:
            self.local._abort_because(reason)
        cause = self._cause.agree(reason, SILENCE_GRACE if is_silence else 0.0)
        self.local._abort_because(cause)
        if not is_silence:
            return cause
        if SILENCE.match(cause) is None:
            return f"{reason}, because {cause}"
        return f"{reason}: check that the host is up and that the network between the hosts works"

    def close(self) -> None:
        """Leave the group; calls that are still running fail."""
        _open.discard(self)
        self.failure = self.failure or f"{self.describe(self.rank)} has left the group"
        self.link.close()
        if not self._sums.stop(LOCAL_MARGIN):  # it waits for a rank of this host
            self.local._abort_because(self.failure)
            self._sums.stop()
        self.local.shutdown()


class PendingSum:
    """A sum that runs in the thread of its group."""

    def __init__(self, group: HostGroup, future: Future[None]) -> None:
        self._group, self._future = group, future

    def wait(self) -> None:
        """Wait until the sum is complete; raise its error."""
        native, group = load_native(), self._group
        native.begin_wait("")  # the thread of the sums publishes what it waits for
        try:
            self._future.result()
        except (KeyboardInterrupt, SystemExit):
            group.fail(f"{group.describe(group.rank)} was interrupted")
            raise
        finally:
            native.end_wait()
