"""The connections between hosts: messages over Gloo, with deadlines, and counted.

Every rank has a connection to every other rank. Gloo's own exceptions name neither the rank nor
the call, so each wait translates them. A wait that times out closes all of Gloo's connections of
this process; `close` makes use of that, because Gloo has no other way to wake its waiting threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.native_module import load_native

__all__ = ["HostLink", "LinkTransfer"]

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
    """The connections of one rank.

    Args:
        gloo: A `ProcessGroupGloo` of all ranks of the group.
        other: Any rank on another host.
        describe_wait: Returns a description of the wait for a rank, such as
            "reproducible_all_reduce #3 on group default, waiting for rank 2 on host b".
        explain: Returns the exception to raise when a message from or to a rank fails.

    Attributes:
        deadline: The time (`time.monotonic()`) until which `LinkTransfer.wait` waits.
        sent: The bytes sent so far, by rank.
    """

    def __init__(
        self,
        gloo: Any,
        other: int,
        describe_wait: Callable[[int], str],
        explain: Callable[[int, str], Exception],
    ) -> None:
        self._gloo, self._other = gloo, other
        self.describe_wait, self.explain = describe_wait, explain
        self.deadline = 0.0
        self.sent: dict[int, int] = {}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> LinkTransfer:
        """Start to send one contiguous CPU tensor.

        Raises:
            Exception: As `LinkTransfer.wait`.
        """
        self.sent[peer] = self.sent.get(peer, 0) + tensors[0].nbytes
        return self._start(self._gloo.send, tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> LinkTransfer:
        """Start to receive one contiguous CPU tensor.

        Raises:
            Exception: As `LinkTransfer.wait`.
        """
        return self._start(self._gloo.recv, tensors, peer, tag)

    def _start(
        self, function: Callable[..., Any], tensors: list[torch.Tensor], peer: int, tag: int
    ) -> LinkTransfer:
        try:
            return LinkTransfer(self, function(tensors, peer, tag), peer)
        except RuntimeError as error:
            raise self.explain(peer, str(error)) from None

    def close(self) -> None:
        """Close all connections. Threads that wait, here and on the other ranks, wake up."""
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._gloo.recv([nothing], self._other, CLOSING_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
