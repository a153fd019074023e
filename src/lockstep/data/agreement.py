"""The agreement: do all ranks go through the same samples in the same order?

Each rank describes its epoch in 80 bytes; the ranks exchange them, once an epoch,
and every rank that reads another's compares for itself. When the first batch is loaded
they exchange the fingerprints of a few samples (`lockstep.data.probe`) likewise. Without
this, ranks whose datasets or samplers differ would train on a batch that nobody asked
for, or wait for each other at the end of the shorter epoch.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from lockstep.errors import DisagreementError

__all__ = ["Description", "check", "check_samples", "packed_samples"]

FORMAT = struct.Struct("<8q16s")  # little-endian: hosts may differ
UNKNOWN = -1

DIFFERENCES = {
    "ready": "could not make its order of the samples; its own message says why",
    "samples": "has a dataset of {theirs} samples, rank {other} one of {ours}",
    "batch_size": "has batch size {theirs}, rank {other} {ours}",
    "microbatches": "cuts a batch into {theirs} micro-batches, rank {other} into {ours}",
    "seed": "has seed {theirs}, rank {other} {ours}",
    "epoch": "is in epoch {theirs}, rank {other} in epoch {ours}",
    "position": "begins at batch {theirs}, rank {other} at batch {ours}",
    "batches": "has {theirs} batches in the epoch, rank {other} {ours}",
    "order": "goes through the samples in another order than rank {other}; a sampler may draw only "
    "from torch's, Python's and numpy's own generators, which are seeded alike on every rank",
}


@dataclass(frozen=True)
class Description:
    """What must be equal on all ranks; -1 stands for what cannot be known."""

    ready: int = 0
    samples: int = UNKNOWN
    batch_size: int = UNKNOWN
    microbatches: int = UNKNOWN
    seed: int = UNKNOWN
    epoch: int = UNKNOWN
    position: int = UNKNOWN
    batches: int = UNKNOWN
    order: bytes = bytes(16)

    def packed(self) -> bytes:
        """Return the bytes that are exchanged; the same number on every rank."""
        return FORMAT.pack(*astuple(self))

    @classmethod
    def unpacked(cls, data: bytes) -> Description:
        """Read what another rank packed."""
        return cls(*FORMAT.unpack(data))


def check(exchanged: list[bytes]) -> None:
    """Compare what the ranks exchanged, in rank order.

    Raises DisagreementError that names the first rank that differs from most, or
    from the lowest rank where there is no majority, and the first thing that differs.
    """
    common, _ = Counter(exchanged).most_common(1)[0]
    other = exchanged.index(common)
    for rank, data in enumerate(exchanged):
        if data != common:
            raise DisagreementError(f"rank {rank} {_difference(data, common, other)}")


def check_samples(exchanged: Sequence[bytes]) -> None:
    """Compare what `packed_samples` returned on each rank, in rank order.

    A rank that could not load its first batch has nothing to compare; some ranks may have
    described more samples than others.

    Raises:
        DisagreementError: Some rank has another sample than most, or than the lowest rank.
    """
    everyone = {rank: json.loads(data) for rank, data in enumerate(exchanged)}
    described = {rank: samples for rank, samples in everyone.items() if samples}
    for samples in zip(*described.values(), strict=False):
        common, _ = Counter(samples).most_common(1)[0]
        other = next(rank for rank, each in zip(described, samples, strict=True) if each == common)
        for rank, each in zip(described, samples, strict=True):
            if each != common:
                raise DisagreementError(
                    f"rank {rank} has another sample {each.partition(':')[0]} than rank {other}, "
                    "although both loaded it with the same random seed: give every rank the same "
                    "dataset, from the same files, split in the same way"
                )


def packed_samples(described: Sequence[str]) -> bytes:
    """Return the bytes that are exchanged of a few samples."""
    return json.dumps(described).encode()


def _difference(data: bytes, common: bytes, other: int) -> str:
    theirs, ours = Description.unpacked(data), Description.unpacked(common)
    for name, sentence in DIFFERENCES.items():
        if getattr(theirs, name) != getattr(ours, name):
            return sentence.format(
                theirs=getattr(theirs, name), ours=getattr(ours, name), other=other
            )
    raise AssertionError("two descriptions of different bytes differ in no field")
