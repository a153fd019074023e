"""Aliasing: tensors that share memory in one process, but not across a stage boundary.

    one process    block A returns h and v = h.view(-1)      B writes into h, and v changes
    two stages     A sends h and v                           B writes into its h, v does not change

Views and detached tensors are sent as separate tensors. The results differ only if a block
writes into one of them, so the sender lists the pairs of tensors that share memory, and the
receiver checks their version counters. A tensor must not change after it was sent either,
because the transfer may not be complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lockstep.kernel.errors import LayoutError
from lockstep.model.memory_overlap import find_overlaps
from lockstep.pipeline.boundary import Aliases, Structure, get_aliases

__all__ = ["ReceivedTensors", "SentTensors", "find_overlapping"]

LOCAL = -1
"""The number in a pair that stands for memory that is not sent: a buffer's or the targets'."""


class ReceivedTensors:
    """The input tensors of a stage for one micro-batch.

    Args:
        tensors: The tensors.
        aliases: The pairs of tensors, by position, that share memory on the sender.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], aliases: Aliases) -> None:
        self._aliases = aliases
        self._tensors = {n: tensors[n] for pair in aliases for n in pair if n != LOCAL}
        self._versions = {n: _version(tensor) for n, tensor in self._tensors.items()}

    @classmethod
    def from_structure(
        cls, structure: Structure, tensors: Sequence[torch.Tensor]
    ) -> ReceivedTensors:
        """Return the tensors of a value that the previous stage sent."""
        return cls(tensors, get_aliases(structure))

    @classmethod
    def from_batch(
        cls, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> ReceivedTensors:
        """Return the inputs of a micro-batch; its targets belong to the last stage."""
        return cls(inputs, tuple((LOCAL, n) for n in find_overlapping(inputs, targets)))

    @property
    def has_aliases(self) -> bool:
        """Whether some of the tensors share memory on the sender."""
        return bool(self._aliases)

    def check(self, where: str) -> None:
        """Check that the stage wrote into no tensor that shares memory on the sender.

        Args:
            where: Rank, stage, step and micro-batch, for messages.

        Raises:
            LayoutError: A block wrote into a tensor that shares memory with another one.
        """
        written = {n for n, one in self._tensors.items() if _version(one) != self._versions[n]}
        for pair in self._aliases:
            if written.intersection(pair):
                other = "a buffer, or the targets" if LOCAL in pair else "another one"
                raise LayoutError(
                    f"{where}: a block writes in place into an input that shares its memory with "
                    f"{other}; a stage has copies of both, of which only one would change: let the "
                    "previous block return a copy (.clone()), or do not write in place"
                )

    def find_aliases(self, tensors: Sequence[torch.Tensor], local: Iterable[int] = ()) -> Aliases:
        """Return the pairs of output tensors of the stage that share memory.

        Args:
            tensors: The output tensors.
            local: Positions of the tensors that share memory with a buffer of the stage.
        """
        aliases = {(LOCAL, n) for n in local}
        aliases |= {*find_overlaps(tensors)} if _share_storage(tensors) else set()
        for one, other in self._aliases:
            ones = [LOCAL] if one == LOCAL else find_overlapping(tensors, [self._tensors[one]])
            others = find_overlapping(tensors, [self._tensors[other]])
            aliases |= {(min(a, b), max(a, b)) for a in ones for b in others if a != b}
        return tuple(sorted(aliases))


class SentTensors:
    """The tensors that a stage has sent for one micro-batch."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sent = [(tensor, _version(tensor)) for tensor in tensors]

    def check(self, where: str) -> None:
        """Check that no tensor changed since it was sent.

        Args:
            where: Rank, stage, step and micro-batch, for messages.

        Raises:
            LayoutError: A block wrote into a tensor that it had returned.
        """
        if any(_version(tensor) != version for tensor, version in self._sent):
            raise LayoutError(
                f"{where}: a block wrote into a tensor that it had returned for this micro-batch, "
                "while it computed another one: with stages, several micro-batches are in flight, "
                "so return a tensor that is not written again (.clone())"
            )


def find_overlapping(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the tensors that overlap any of the others in memory."""
    if not tensors or not others or not _share_storage([*tensors, *others]):
        return []
    count = len(tensors)
    pairs = find_overlaps([*tensors, *others])
    return sorted({one for one, other in pairs if one < count <= other})


def _share_storage(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any two tensors have the same storage; otherwise they share no memory."""
    if len(tensors) < 2:
        return False
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return len({tensor.untyped_storage()._cdata for tensor in dense}) < len(dense)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes when a tensor is written into."""
    return 0 if tensor.is_inference() else tensor._version
