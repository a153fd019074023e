"""A group of ranks on several hosts, as one of its ranks holds it.

    local     the native group of the ranks on this host: shared memory
    gloo      the connections of this rank to all others

If a call fails, one cause is stated by all ranks: the rank that finds it writes it to the store,
then wakes the ranks of its host (through the native group) and all others (by closing its
connections).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.hosts.connections import close_connections
from lockstep.comm.hosts.map import HostMap

__all__ = ["ANSWER_TIMEOUT", "GLOO_MARGIN", "GroupError", "HostGroup"]

GLOO_MARGIN = timedelta(seconds=1)
"""The time by which Gloo waits longer than a rank, which can then write the cause before the
connections are closed."""

CAUSE = "lockstep/cause"  # the key of the cause in the store of the group
ANSWER_TIMEOUT = 1.0  # seconds; the store may be on a host that has vanished
PROBE_TAG = (1 << 31) - 2  # of a message that nobody receives

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
        self.timeout, self._sums_begun = timeout, 0
        self.failure, self._failing = "", threading.Lock()
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

    # ---- sums ----

    def begin_sum(self) -> tuple[str, int]:
        """Begin a sum; return its name, such as "reproducible_all_reduce #3", and its number.

        Raises:
            GroupError: The group has failed before.
        """
        self.check_process()
        self._sums_begun += 1
        call = f"reproducible_all_reduce #{self._sums_begun}"
        self.check(call)
        self.limit_local_calls(0.0)
        return call, self._sums_begun

    def limit_local_calls(self, extra: float) -> None:
        """Let the next calls of the native group wait some seconds longer than the timeout."""
        self.local._set_default_timeout(timedelta(seconds=self.timeout + extra))

    @contextmanager
    def explaining(self, call: str) -> Iterator[None]:
        """End the group if a call of the native group fails in the body."""
        try:
            yield
        except RuntimeError as error:
            self.fail(str(error).partition("\n")[0].rpartition(" failed: ")[2])
            raise GroupError(self.sentence(call, self.failure)) from None
        except (KeyboardInterrupt, SystemExit):
            self.fail(f"{self.describe(self.rank)} was interrupted")
            raise

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

    def fail(self, reason: str) -> None:
        """End the group for all its ranks.

        Only the first reason counts, of this rank and of all ranks.
        """
        with self._failing:
            if not self.failure:
                self.failure = self._cause.agree(reason)
                self.local._abort_because(self.failure)
                close_connections(self.gloo)

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

    def close(self) -> None:
        """Leave the group; calls that are still running fail."""
        _open.discard(self)
        self.failure = self.failure or f"{self.describe(self.rank)} has left the group"
        close_connections(self.gloo)
        self.local.shutdown()


class FailureCause:
    """The cause of a failure that the first rank has written.

    Args:
        store: The store of the group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_written = False
        self._asking = threading.Thread()

    def agree(self, reason: str) -> str:
        """Return the cause that another rank has written, or else write this reason."""
        causes = [reason]

        def ask() -> None:
            with suppress(RuntimeError):
                causes.append(self._store.compare_set(CAUSE, "", reason).decode() or reason)

        self._start(ask).join(ANSWER_TIMEOUT)
        return causes[-1]

    def is_written(self) -> bool:
        """Return whether the store had a cause when it was last asked; ask again."""

        def ask() -> None:
            with suppress(RuntimeError):
                self._is_written = self._store.check([CAUSE])

        if not self._asking.is_alive():
            self._asking = self._start(ask)
        return self._is_written

    def _start(self, ask: Any) -> threading.Thread:
        thread = threading.Thread(target=ask, name="lockstep-cause", daemon=True)
        thread.start()
        return thread
