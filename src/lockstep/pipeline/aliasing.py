"""Aliasing: tensors that share memory in one process, and not behind a stage boundary.

    one process    block A returns h and v = h.view(-1)      B writes into h, and v changes
    two stages     A sends h and v                           B writes into its h, and v does not

Views and detached tensors cross as tensors of their own, which makes no difference unless
somebody writes into one of them. So the sender names the pairs of tensors that share
memory, and the receiver looks at the version counters of those. Nor may a tensor change
after it was sent: its bytes may still be on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lockstep.errors import UsageError
from lockstep.model.memory_overlap import overlaps
from lockstep.pipeline.boundary import Aliases, Pattern, aliases_of

__all__ = ["Arrival", "Departure", "touching"]

STAYS = -1
"""Stands in a pair for memory that stays with the sender: of a buffer, or of the targets."""


class Arrival:
    """The tensors that a stage is given for one micro-batch.

    Args:
        tensors: The tensors.
        aliases: Pairs of them, by position, that share memory where they come from.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], aliases: Aliases) -> None:
        self._aliases = aliases
        self._tensors = {n: tensors[n] for pair in aliases for n in pair if n != STAYS}
        self._versions = {n: _version(tensor) for n, tensor in self._tensors.items()}

    @classmethod
    def of(cls, pattern: Pattern, tensors: Sequence[torch.Tensor]) -> Arrival:
        """Return the arrival of a value from the stage before."""
        return cls(tensors, aliases_of(pattern))

    @classmethod
    def of_batch(cls, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        """Return the arrival of a micro-batch, of which the last stage has the targets."""
        return cls(inputs, tuple((STAYS, n) for n in touching(inputs, targets)))

    def check(self, place: str) -> None:
        """Refuse what the stage wrote where other blocks would have seen it.

        Args:
            place: Where the step is, for messages.

        Raises:
            UsageError: A block wrote into a tensor that shares memory with another one.
        """
        written = {n for n, each in self._tensors.items() if _version(each) != self._versions[n]}
        for pair in self._aliases:
            if written.intersection(pair):
                other = "a buffer, or the targets" if STAYS in pair else "another one"
                raise UsageError(
                    f"{place}: a block writes in place into a tensor that it was given and that "
                    f"shares its memory with {other}; a stage has copies, of which only one "
                    "changes: let the block before return a copy (.clone()), or do not write in "
                    "place"
                )

    def aliases_among(
        self, tensors: Sequence[torch.Tensor], staying: Iterable[int] = ()
    ) -> Aliases:
        """Return which pairs of the tensors that the stage sends on share memory.

        Args:
            tensors: What it sends.
            staying: Positions of those that share memory with a buffer of the stage.
        """
        found = {(STAYS, n) for n in staying}
        found |= {*overlaps(tensors)} if _share_storage(tensors) else set()
        for one, other in self._aliases:
            ones = [STAYS] if one == STAYS else touching(tensors, [self._tensors[one]])
            others = touching(tensors, [self._tensors[other]])
            found |= {(min(a, b), max(a, b)) for a in ones for b in others if a != b}
        return tuple(sorted(found))


class Departure:
    """The tensors that a stage has sent of one micro-batch."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sent = [(tensor, _version(tensor)) for tensor in tensors]

    def check(self, place: str) -> None:
        """Refuse what changed since.

        Args:
            place: Where the step is, for messages.

        Raises:
            UsageError: A block wrote into a tensor that it had returned.
        """
        if any(_version(tensor) != version for tensor, version in self._sent):
            raise UsageError(
                f"{place}: a block wrote into a tensor that it had returned for this "
                "micro-batch, when it computed another one: with stages several are under way, so "
                "return a tensor that nobody writes into again (.clone())"
            )


def touching(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the tensors that share memory with some of the others."""
    if not tensors or not others or not _share_storage([*tensors, *others]):
        return []
    count = len(tensors)
    pairs = overlaps([*tensors, *others])
    return sorted({one for one, other in pairs if one < count <= other})


def _share_storage(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether some tensors have one storage, without which no memory is shared."""
    if len(tensors) < 2:
        return False
    dense = [each for each in tensors if each.layout is torch.strided]
    return len({each.untyped_storage()._cdata for each in dense}) < len(dense)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes when a tensor is written into."""
    return 0 if tensor.is_inference() else tensor._version
