"""The identity of a batch: do all ranks compute their parts of the same one?

Ranks that train on different batches (one skipped a batch, or was given another one)
would add gradients that belong to no batch. So each rank describes its batch in one
line, which travels with the messages of a step and is compared before gradients
are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import DisagreementError

__all__ = ["Identity", "require_same_batch"]


@dataclass(frozen=True)
class Identity:
    """What a batch has in common on all ranks, and with no other batch.

    Attributes:
        epoch: Of a batch from a loader, its epoch.
        position: Of a batch from a loader, its number in the epoch, from 0.
        order: Of a batch from a loader, a digest of the epoch's order; "" for a stream.
        checksum: Of a batch that was given whole, a hash of its content.
    """

    epoch: int = -1
    position: int = -1
    order: str = ""
    checksum: str = ""

    def packed(self) -> str:
        """Return a line that says it all, without spaces inside its fields."""
        return f"{self.epoch} {self.position} {self.order or '-'} {self.checksum or '-'}"

    @classmethod
    def unpacked(cls, line: str) -> Identity:
        """Read what `packed` wrote."""
        epoch, position, order, checksum = line.split(" ")
        return cls(int(epoch), int(position), order.strip("-"), checksum.strip("-"))

    def __str__(self) -> str:
        """Return words for an error message."""
        if self.checksum:
            return f"a batch with checksum {self.checksum}"
        if self.position < 0:
            return "a batch from a driver"
        return f"batch {self.position} of epoch {self.epoch} from trainer.batches"


def require_same_batch(everyone: Sequence[str], step: int) -> None:
    """Raise DisagreementError unless all ranks train on one batch.

    Args:
        everyone: What each rank's `Identity.packed` returned, in rank order.
        step: The number of the step, for the message.
    """
    common, _ = Counter(everyone).most_common(1)[0]
    if len(everyone) == everyone.count(common):
        return
    rank, theirs = next((r, each) for r, each in enumerate(everyone) if each != common)
    other = everyone.index(common)
    difference = _difference(Identity.unpacked(theirs), Identity.unpacked(common), rank, other)
    raise DisagreementError(f"in step {step}, {difference}")


def _difference(theirs: Identity, ours: Identity, rank: int, other: int) -> str:
    if theirs.checksum and ours.checksum:
        return (
            f"rank {rank} was given another batch than rank {other} (checksums {theirs.checksum} "
            f"and {ours.checksum}): give every rank the same whole batch, of which each computes "
            "its part. A DataLoader with a DistributedSampler, or with shuffle=True and no common "
            "seed, gives every rank another batch; use trainer.batches(dataset, batch_size) instead"
        )
    if (theirs.epoch, theirs.position) != (ours.epoch, ours.position):
        return (
            f"rank {rank} trains on {theirs} while rank {other} trains on {ours}: pass the same "
            "batches to trainer.step on every rank, and skip a batch on all ranks or on none"
        )
    return (
        f"rank {rank} trains on {theirs} in another order of the samples than rank {other}: give "
        "trainer.batches the same dataset, seed and sampler on every rank"
    )
