"""Consistency checks between ranks: same epoch, same samples, same batch.

Ranks that train on different data would add gradients of different batches, or wait for each
other at the end of the shorter epoch. Therefore the ranks exchange and compare:

- a summary of the epoch, once per epoch: dataset length, settings, order;
- hashes of a few samples of the first batch (`lockstep.data.repeatability`);
- the identity of the batch, with the messages of each step, before gradients are added.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from lockstep.kernel.batch import BatchIdentity
from lockstep.kernel.errors import DisagreementError

__all__ = [
    "BatchIdentity",
    "EpochSummary",
    "pack_samples",
    "require_same_batch",
    "require_same_epoch",
    "require_same_samples",
    "unpack_identity",
]

DIFFERENCES = {
    "ready": "could not determine its order of the samples; see its own error message",
    "samples": "has a dataset of {theirs} samples, rank {other} one of {ours}",
    "batch_size": "has batch size {theirs}, rank {other} {ours}",
    "drop_last": "has drop_last={theirs}, rank {other} drop_last={ours}",
    "microbatches": "splits a batch into {theirs} micro-batches, rank {other} into {ours}",
    "seed": "has seed {theirs}, rank {other} {ours}",
    "epoch": "is in epoch {theirs}, rank {other} in epoch {ours}",
    "position": "starts at batch {theirs}, rank {other} at batch {ours}",
    "batches": "has {theirs} batches in the epoch, rank {other} {ours}",
    "order": "has a different order of the samples than rank {other}; a sampler must draw from "
    "torch's, Python's or numpy's global generators, which are seeded identically on every rank",
}


@dataclass(frozen=True)
class EpochSummary:
    """The settings of an epoch, which must be equal on all ranks; None if unknown."""

    ready: bool = False
    samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    microbatches: int | None = None
    seed: int | None = None
    epoch: int | None = None
    position: int | None = None
    batches: int | None = None
    order: str = ""

    def pack(self) -> bytes:
        """Return the bytes to exchange."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> EpochSummary:
        """Return the summary from the result of `pack` on another rank."""
        return cls(*json.loads(data))


def require_same_epoch(exchanged: list[bytes]) -> None:
    """Compare the epoch summaries of all ranks, in rank order.

    Raises:
        DisagreementError: A rank differs from the most frequent summary (from the lowest rank's in
            a tie). The message names the first such rank and the first differing field.
    """
    common, _ = Counter(exchanged).most_common(1)[0]
    other = exchanged.index(common)
    for rank, data in enumerate(exchanged):
        if data != common:
            raise DisagreementError(f"rank {rank} {_difference(data, common, other)}")


def require_same_samples(exchanged: Sequence[bytes]) -> None:
    """Compare the results of `pack_samples` of all ranks, in rank order.

    A rank that could not load its first batch has no samples; ranks may have different numbers
    of samples.

    Raises:
        DisagreementError: A sample of a rank differs from the most frequent one (from the lowest
            rank's in a tie).
    """
    everyone = {rank: json.loads(data) for rank, data in enumerate(exchanged)}
    described = {rank: samples for rank, samples in everyone.items() if samples}
    for samples in zip(*described.values(), strict=False):
        common, _ = Counter(samples).most_common(1)[0]
        other = next(
            rank for rank, sample in zip(described, samples, strict=True) if sample == common
        )
        for rank, sample in zip(described, samples, strict=True):
            if sample != common:
                raise DisagreementError(
                    f"sample {sample.partition(':')[0]} of rank {rank} differs from that of rank "
                    f"{other}, "
                    "although both loaded it with the same random seed: use the same dataset on "
                    "every rank, from the same files and with the same split"
                )


def pack_samples(described: Sequence[str]) -> bytes:
    """Return the bytes to exchange for a few sample descriptions."""
    return json.dumps(described).encode()


def _difference(data: bytes, common: bytes, other: int) -> str:
    theirs, ours = EpochSummary.unpack(data), EpochSummary.unpack(common)
    for name, text in DIFFERENCES.items():
        if getattr(theirs, name) != getattr(ours, name):
            return text.format(theirs=getattr(theirs, name), ours=getattr(ours, name), other=other)
    raise AssertionError("two different summaries have no different field")


def require_same_batch(everyone: Sequence[str], step: int) -> None:
    """Check that all ranks train on the same batch.

    Args:
        everyone: The results of `BatchIdentity.pack` of all ranks, in rank order.
        step: The number of the step, for the message.

    Raises:
        DisagreementError: Some ranks have different batches.
    """
    common, _ = Counter(everyone).most_common(1)[0]
    if len(everyone) == everyone.count(common):
        return
    rank, theirs = next((r, line) for r, line in enumerate(everyone) if line != common)
    other = everyone.index(common)
    difference = _batch_difference(unpack_identity(theirs), unpack_identity(common), rank, other)
    raise DisagreementError(f"in step {step}, {difference}")


def unpack_identity(line: str) -> BatchIdentity:
    """Return the identity from the result of `BatchIdentity.pack`, without `samples`."""
    epoch, position, order, checksum = line.split(" ")
    return BatchIdentity(int(epoch), int(position), order.strip("-"), checksum.strip("-"))


def _describe(batch: BatchIdentity) -> str:
    if batch.checksum:
        return f"a batch with checksum {batch.checksum}"
    if batch.position < 0:
        return "a batch from a driver"
    return f"batch {batch.position} of epoch {batch.epoch} from trainer.batches"


def _batch_difference(theirs: BatchIdentity, ours: BatchIdentity, rank: int, other: int) -> str:
    if theirs.checksum and ours.checksum:
        return (
            f"rank {rank} got a different batch than rank {other} (checksums {theirs.checksum} "
            f"and {ours.checksum}): pass the same whole batch on every rank; each computes its "
            "part. A DataLoader with a DistributedSampler, or with shuffle=True and no common "
            "seed, returns a different batch on every rank; use "
            "trainer.batches(dataset, batch_size) instead"
        )
    if (theirs.epoch, theirs.position) != (ours.epoch, ours.position):
        return (
            f"rank {rank} trains on {_describe(theirs)} while rank {other} trains on "
            f"{_describe(ours)}: pass the same batches to trainer.step on every rank, and skip a "
            "batch on all ranks or on none"
        )
    return (
        f"rank {rank} trains on {_describe(theirs)} with a different order of the samples than "
        f"rank {other}: pass the same dataset, seed and sampler to trainer.batches on every rank"
    )
