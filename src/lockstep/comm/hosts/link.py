"""The connections between hosts: messages and buffers of the sums of gradients, over Gloo.

Every rank has a connection to every other rank. Gloo's own exceptions name neither the rank nor
the call, so each wait translates them. A wait that times out closes all of Gloo's connections of
this process; `close_connections` makes use of that, because Gloo has no other way to wake its
waiting threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.native_module import load_native

__all__ = ["HostLink", "LinkTransfer", "close_connections"]

CLOSING_TAG = (1 << 31) - 1  # of a message that nobody sends


class LinkTransfer:
    """A message on its way.

    Args:
        link: The connections.
        work: Gloo's work, which keeps the tensor.
        peer: The rank of the group at the other end.
    """

    __slots__ = ("_link", "_peer", "_work")

    def __init__(self, link: HostLink, work: Any, peer: int) -> None:
        self._link, self._work, self._peer = link, work, peer

    def wait(self) -> None:
        """Wait until the message is sent or received, at most until the deadline of the call.

        Raises:
            Exception: What `explain` of the link returns for the peer and Gloo's error.
        """
        link = self._link
        remaining = timedelta(seconds=max(link.deadline - time.monotonic(), 0.001))
        native = load_native()
        native.begin_wait(link.describe_wait(self._peer))
        try:
            self._work.wait(remaining)
        except RuntimeError as error:
            failure = link.explain(self._peer, str(error))
        else:
            return
        finally:
            native.end_wait()
        raise failure


class HostLink:
    """The messages and buffers of one rank in the sums of gradients across hosts.

    `lockstep.comm.hosts.reduction_plan` says which rank combines and sends what.

    Args:
        hosts: The ranks of each host.
        rank: This rank.
        local: The native backend of the ranks on this host, in the order of the map.
        gloo: A `ProcessGroupGloo` of all ranks of the group.
        describe_wait: Returns a description of the wait for a rank, such as
            "reproducible_all_reduce #3 on group default, waiting for rank 2 on host b".
        explain: Returns the exception to raise when a message from or to a rank fails.

    Attributes:
        rank: This rank.
        host: The number of its host.
        deadline: The time (`time.monotonic()`) until which `LinkTransfer.wait` waits.
        sent: The bytes sent so far, by rank.
    """

    def __init__(
        self,
        hosts: HostMap,
        rank: int,
        local: Any,
        gloo: Any,
        describe_wait: Callable[[int], str],
        explain: Callable[[int, str], Exception],
    ) -> None:
        self.rank, self.host = rank, hosts.host_of(rank)
        self._local, self._gloo = local, gloo
        self.describe_wait, self.explain = describe_wait, explain
        self.deadline = 0.0
        self.sent: dict[int, int] = {}
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def barrier(self) -> None:
        """Wait until all ranks of this host have come here."""
        self._local.barrier(dist.BarrierOptions()).wait()

    def buffer(self, name: str, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer, which is kept for the next calls."""
        needed = size * dtype.itemsize
        kept = self._buffers.get((name, number))
        if kept is None or kept.numel() < needed:
            kept = self._buffers[name, number] = torch.empty(needed, dtype=torch.uint8)
        return kept[:needed].view(dtype)

    def send(self, vector: torch.Tensor, peer: int, tag: int) -> LinkTransfer:
        """Start to send a vector to a rank of another host.

        Raises:
            Exception: As `LinkTransfer.wait`.
        """
        self.sent[peer] = self.sent.get(peer, 0) + vector.nbytes
        return self._start(self._gloo.send, vector, peer, tag)

    def receive(self, vector: torch.Tensor, peer: int, tag: int) -> LinkTransfer:
        """Start to receive a vector from a rank of another host.

        Raises:
            Exception: As `LinkTransfer.wait`.
        """
        return self._start(self._gloo.recv, vector, peer, tag)

    def _start(
        self, function: Callable[..., Any], vector: torch.Tensor, peer: int, tag: int
    ) -> LinkTransfer:
        try:
            return LinkTransfer(self, function([vector.view(torch.uint8)], peer, tag), peer)
        except RuntimeError as error:
            raise self.explain(peer, str(error)) from None

    def close(self) -> None:
        """Close all connections; see `close_connections`."""
        close_connections(self._gloo)


def close_connections(gloo: Any) -> None:
    """Close all connections of a `ProcessGroupGloo`, which cannot be used any longer.

    Threads that wait, here and on the other ranks, wake up. Safe on any thread.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for other in range(gloo.size()):
        if other != gloo.rank():
            try:
                gloo.recv([nothing], other, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "imed out" in str(error):
                    return  # it has closed all; a connection that is closed already raises, too
