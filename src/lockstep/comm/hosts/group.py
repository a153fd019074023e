"""A group of ranks on several hosts, as one of its ranks holds it.

    local     the native group of the ranks on this host: shared memory
    between   the connections of this rank to the ranks on other hosts

If a call fails, one cause is stated by all ranks: the rank that finds it writes it to the store,
then wakes the ranks of its host (through the native group) and those of other hosts (by closing
its connections).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.hosts.link import HostLink
from lockstep.comm.hosts.map import HostMap

__all__ = ["GroupError", "HostGroup"]

CAUSE = "lockstep/cause"  # key in the store
GRACE = 2.0  # seconds to wait for the cause of a failure
LOCAL_MARGIN = 1.0
"""Seconds by which ranks of one host wait longer for each other than for other hosts."""

WATCH_PERIOD = 0.2  # seconds
SILENCE = re.compile(r"rank \d+ on host \S* timed out after [\d.]+ s, waiting for ")


class GroupError(RuntimeError):
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
        between: The connections to other hosts.
        name: The name of the group.
        timeout: Seconds for each call.
        failure: Why the group can no longer be used; "" if it can.
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
        self._store = store
        self.local = local
        self.host = hosts.host_of(rank)
        other = next(ranks[0] for number, ranks in enumerate(hosts.hosts) if number != self.host)
        self.between = HostLink(gloo, rank, other, self.describe_wait, self.explain)
        self.set_timeout(timeout)
        self.failure = ""
        self._failing = threading.Lock()
        self._call, self._call_timeout = "a call", timeout  # such as "all_reduce #3"
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._watch_local, name="lockstep-hosts", daemon=True)
        self._watch.start()

    # ---- names ----

    def format_rank(self, rank: int) -> str:
        """Return "rank 2", with the rank in the world."""
        return f"rank {self._global_ranks[rank]}"

    def describe(self, rank: int) -> str:
        """Return "rank 2 on host b"."""
        return f"{self.format_rank(rank)} on host {self._host_names[self.map.host_of(rank)]}"

    def describe_wait(self, peer: int) -> str:
        """Return what a thread waits for."""
        return f"{self._call} on group {self.name}, waiting for {self.describe(peer)}"

    # ---- calls ----

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds for each of the calls that follow."""
        self.timeout = timeout
        self.local._set_default_timeout(timedelta(seconds=timeout + LOCAL_MARGIN))

    def begin_call(self, call: str, timeout: float) -> None:
        """Begin a call, such as "all_reduce #3", with its timeout in seconds.

        Raises:
            GroupError: The group has failed before.
        """
        if self.failure:
            raise GroupError(self.sentence(call, f"the group had failed: {self.failure}"))
        self._call, self._call_timeout = call, timeout
        self.between.deadline = time.monotonic() + timeout

    # ---- failures ----

    def explain(self, peer: int, error: str) -> GroupError:
        """Return the exception for a message from or to `peer` that failed, and end the group."""
        if "Timed out" in error:
            reason = (
                f"{self.describe(self.rank)} timed out after {self._call_timeout:g} s, waiting for "
                f"{self.describe(peer)}"
            )
        elif "closed by peer" in error or "reset by peer" in error or "pair closure" in error:
            reason = (
                f"{self.describe(peer)} closed its connection (its process has ended or has left "
                "the group, see its output)"
            )
        else:
            said = error.rpartition("] ")[2].partition(". ")[0]
            reason = (
                f"the connection of {self.describe(self.rank)} to {self.describe(peer)} failed: "
                f"{said}"
            )
        return self.fail(reason)

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
                self.between.close()
        return GroupError(self.sentence(self._call, self.failure))

    def sentence(self, call: str, reason: str) -> str:
        """Return the message of an exception about a call of this rank."""
        return f"{self.format_rank(self.rank)}: {call} on group {self.name} failed: {reason}"

    def _agree_on_cause(self, reason: str) -> str:
        """Wake the ranks of this host, and return the cause that the first rank has found.

        Silence may have a cause on the other host, which is found there a moment later.
        """
        is_silence = SILENCE.match(reason) is not None
        if is_silence:
            self.local._abort_because(reason)
        cause = self._exchange_cause(reason, is_silence)
        self.local._abort_because(cause)
        if not is_silence:
            return cause
        if SILENCE.match(cause) is None:
            return f"{reason}, because {cause}"
        return f"{reason}: check that the host is up and that the network between the hosts works"

    def _exchange_cause(self, reason: str, is_silence: bool) -> str:
        found = [reason]

        def ask() -> None:
            with suppress(RuntimeError):
                if is_silence:
                    with suppress(RuntimeError):
                        self._store.wait([CAUSE], timedelta(seconds=GRACE))
                found.append(self._store.compare_set(CAUSE, "", reason).decode() or reason)

        # In a thread: the store may be on a host that has vanished.
        thread = threading.Thread(target=ask, name="lockstep-cause", daemon=True)
        thread.start()
        thread.join(GRACE * 1.5)
        return found[-1]

    def _watch_local(self) -> None:
        """Tell the other hosts when a rank of this host has ended the native group."""
        while not self.failure and not self._stopped.wait(WATCH_PERIOD):
            if self.local._is_aborted():
                try:
                    self.local.barrier(dist.BarrierOptions()).wait()
                except RuntimeError as error:
                    self.explain_local(str(error))

    def close(self) -> None:
        """Leave the group; calls that are still running fail."""
        self.failure = self.failure or f"{self.describe(self.rank)} has left the group"
        self._stopped.set()
        self.between.close()
        if self._watch is not threading.current_thread():
            self._watch.join()
        self.local.shutdown()
