"""Reproducible all-reduce: a bucket is added over the ranks along the tree, on any backend.

Each rank holds some nodes of the tree for every tensor of the bucket: one node if the ranks
divide the leaves evenly, several otherwise. Six implementations do the same additions:

    `native_all_reduce`     the backend "lockstep" on one host: in shared memory, without messages
    `hosts.all_reduce`      the same backend across hosts: whole subtrees of a host first
    `ipc_all_reduce`        ranks that share a device: in its memory
    `pair_all_reduce`       two ranks with one node each, in memory of the CPU: torch's all-reduce
    `portable_all_reduce`   any other backend: all-to-all, add, all-gather
    `piecewise_all_reduce`  the same for large buckets in memory of the CPU, piece by piece

A tensor without a value in some leaf is absent from the sum, not zero, so that -0.0 stays -0.0.
Each addition rounds to the dtype of the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.bucket import Bucket, Member

__all__ = [
    "ABSENT",
    "NEW",
    "Held",
    "ReproducibleAllReduce",
    "Values",
    "reproducible_all_reduce",
]

Values = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""Tensors by the index of their bucket member; None if absent."""

Held = Mapping[tuple[int, int], Values]
"""The values of each node (lo, hi) of the tree that a rank holds."""

ABSENT = 0
NEW = 1
"""The flags of a tensor in a node."""


class ReproducibleAllReduce(ABC):
    """The reproducible all-reduce of one bucket; its buffers are reused.

    Ranks must make the same calls in the same order. `lockstep.comm.make_all_reduce` chooses the
    implementation.

    Attributes:
        bucket: The planned bucket; its members refer to tensors by index.
        sums: The sums of all members, as a vector; valid between `gather` and the next launch.
        fits_messages: Whether every rank may `pack` its nodes and send them with another message:
            on the backend "lockstep", if half of its longest message can contain them.
    """

    bucket: Bucket
    sums: torch.Tensor
    fits_messages = False

    def destination(self, node: tuple[int, int], member: Member) -> torch.Tensor | None:
        """Return the destination of a value of one of this rank's nodes, or None.

        The destination is a vector of the member's length, aligned to 64 bytes. `launch` does not
        copy values that are already there. Only the backend "lockstep" has destinations, and two
        ranks with one node each; the destinations of the first node later hold the sums.
        """
        return None

    def uses(self) -> int:
        """Return the reference count of the memory of the sums, to detect sums that are in use."""
        return int(torch._C._storage_Use_Count(self.sums.untyped_storage()._cdata))

    @abstractmethod
    def launch(
        self,
        held: Held,
        in_steps: bool = False,
    ) -> None:
        """Start step 1: copy this rank's nodes and start the exchange.

        Args:
            held: The tensors of each of this rank's nodes, by index; None if absent.
            in_steps: Whether the backend "lockstep" does not add in a background thread, but in
                this one, in `advance`. It avoids that both take turns on one core.
        """

    def pack(self, held: Held) -> bytes:
        """Return this rank's nodes, to be sent with another message, instead of `launch`.

        Only if `fits_messages` is true.
        """
        raise NotImplementedError

    def add_packed(self, messages: Sequence[bytes]) -> list[tuple[int, torch.Tensor | None]]:
        """Add the nodes with which the messages of all ranks end, instead of waiting for them.

        Returns:
            What `gather` returns.

        Raises:
            UsageError: A message ends with something else.
        """
        raise NotImplementedError

    def advance(self) -> None:  # noqa: B027
        """Do what the other ranks are ready for, of a sum launched in steps.

        Does not wait; the last steps are taken by `gather`.
        """

    def combine(self) -> None:  # noqa: B027
        """Do step 2 and start step 3: add this rank's slice along the tree, start the gather."""

    @abstractmethod
    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish step 3.

        Returns:
            (index, sum) of every member; None if no rank used the member. A sum is a vector in
            the memory order of the values, an aligned view of a buffer that is valid until the
            next launch.
        """


def reproducible_all_reduce(
    sums: Sequence[ReproducibleAllReduce], held: Held
) -> list[tuple[int, torch.Tensor | None]]:
    """Reduce several buckets; the exchange of each overlaps the additions of the previous one.

    The order of the calls is the same on every rank:

        launch 0, launch 1, combine 0, launch 2, combine 1, gather 0, ..., combine last, gather last

    Two buckets after a launch its messages are free for the next one.
    """
    pairs: list[tuple[int, torch.Tensor | None]] = []
    for number in range(len(sums) + 2):
        if number < len(sums):
            sums[number].launch(held)
        if 1 <= number <= len(sums):
            sums[number - 1].combine()
        if number >= 2:
            pairs += sums[number - 2].gather()
    return pairs
