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

from lockstep.comm.backend_errors import BackendError, Failure
from lockstep.comm.hosts.connections import close_connections
from lockstep.comm.hosts.map import HostMap
from lockstep.foreign_messages import CONNECTION_ENDS, is_gloo_timeout, says_lost_connection

__all__ = ["ANSWER_TIMEOUT", "GLOO_MARGIN", "HostGroup"]

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
        failure: Why the group can no longer be used; None if it can.
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
        self.map = hosts
        self.rank = rank
        self.name = name
        self._global_ranks = tuple(global_ranks)
        self._host_names = tuple(host_names)
        self._cause = FailureCause(store)
        self.local = local
        self.gloo = gloo
        self.timeout = timeout
        self._sums_begun = 0
        self.failure: Failure | None = None
        self._failing = threading.Lock()
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
            BackendError: The group has failed before.
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
            failure = self.fail(Failure.of(error))
            raise self._make_error(call, failure, failure.reason) from None
        except (KeyboardInterrupt, SystemExit):
            self.fail(Failure(f"{self.describe(self.rank)} was interrupted"))
            raise

    # ---- failures ----

    def check_process(self) -> None:
        """Raise BackendError in a fork of the process that joined the group."""
        if self.process != os.getpid():
            raise BackendError(
                f"{self.format_rank(self.rank)}: process {os.getpid()} is a fork of process "
                f"{self.process}, which joined group {self.name}, and cannot use the group: make "
                f"this call in process {self.process}, or start the new process by spawning it and "
                "let it join a group of its own"
            )

    def check(self, call: str) -> None:
        """Raise BackendError if the group has failed before this call."""
        if (failure := self.failure) is not None:
            raise self._make_error(call, failure, f"the group had failed: {failure.reason}")

    def explain_call(
        self, call: str, awaited: str, peer: int | None, seconds: float, error: str
    ) -> BackendError:
        """Return the exception for a call of Gloo that failed, and end the group.

        Args:
            call: The call, such as "all_reduce #3".
            awaited: What it waits for, such as "the other ranks".
            peer: The rank at the other end of a message; None for all others.
            seconds: The timeout.
            error: Gloo's message.
        """
        if is_gloo_timeout(error):
            observed = Failure(
                f"{self.describe(self.rank)} timed out after {seconds:g} s in {call}, waiting for "
                f"{awaited}: check that every rank makes this call, and that the network between "
                "the hosts works"
            )
        else:
            closed = self._find_closed() if peer is None else peer
            rank = None if closed is None else self.global_rank(closed)
            is_lost = says_lost_connection(error)
            reason = self._explain_connection(closed, error)
            observed = Failure(reason, "closed", rank) if is_lost else Failure(reason)
        failure = self.fail(observed)
        return self._make_error(call, failure, failure.reason)

    def has_ended(self) -> bool:
        """Return whether a rank has written why the group has failed; ask again.

        Gloo may forget a message whose connection is closed, and never wake who waits for it.
        """
        return self._cause.is_written() or self.failure is not None

    def fail(self, failure: Failure) -> Failure:
        """End the group for all its ranks.

        Returns:
            The failure that counts: the first one, of this rank and of all ranks.
        """
        with self._failing:
            if self.failure is None:
                self.failure = self._cause.agree(failure)
                self.local._abort_because(*self.failure.to_native())
                close_connections(self.gloo)
            return self.failure

    def _make_error(self, call: str, failure: Failure, reason: str) -> BackendError:
        """Return the exception of a call of this rank, which a failure of the group has ended."""
        who = self.format_rank(self.rank)
        message = f"{who}: {call} on group {self.name} failed: {reason}"
        return failure.make_error(message, call)

    def _explain_connection(self, peer: int | None, error: str) -> str:
        other = "another rank" if peer is None else self.describe(peer)
        if any(entry.is_in(error) for entry in CONNECTION_ENDS):
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
        if self.failure is None:
            self.failure = Failure(f"{self.describe(self.rank)} has left the group")
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

    def agree(self, failure: Failure) -> Failure:
        """Return the cause that another rank has written, or else write this one."""
        causes = [failure]

        def ask() -> None:
            with suppress(RuntimeError):
                agreed = self._store.compare_set(CAUSE, "", failure.encode())
                causes.append(Failure.decode(agreed))

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
