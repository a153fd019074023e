"""Consistency checks between ranks: same epoch, same samples, same batch.

Ranks that train on different data would add gradients of different batches, or wait for each
other at the end of the shorter epoch. Therefore the ranks exchange and compare:

- the settings of the epoch, once per epoch: dataset length, options, order;
- hashes of a few samples of the first batch (`lockstep.data.repeatability`);
- the identity of the batch, with the messages of each step, before gradients are added.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from lockstep.kernel.batch import BatchIdentity
from lockstep.kernel.errors import DisagreementError

__all__ = [
    "ORDER",
    "BatchIdentity",
    "GatherFn",
    "compare_first",
    "pack_described",
    "require_same_batch",
    "require_same_epoch",
    "require_same_samples",
    "unpack_identity",
]

ORDER = "order of the samples"

T = TypeVar("T")

GatherFn = Callable[[bytes, str], list[bytes]]
"""A function (message, subject) that exchanges messages; returns those of all ranks, in order."""


def pack_described(described: Mapping[str, Any] | Sequence[str]) -> bytes:
    """Return the bytes to exchange for the settings of an epoch, or for descriptions of samples.

    Settings are given by their names in messages. Empty ones say that this rank could not determine
    the order of the samples.
    """
    return json.dumps(described, default=int).encode()  # numpy has integers of its own


def require_same_epoch(exchanged: list[bytes]) -> None:
    """Compare the packed settings of all ranks, in rank order.

    Raises:
        DisagreementError: A rank differs from the most frequent settings (from the lowest rank's in
            a tie). The message names the first such rank and the first difference.
    """
    everyone = [json.loads(settings) for settings in exchanged]
    if {} in everyone:
        raise DisagreementError(
            f"rank {everyone.index({})} could not determine its order of the samples; see its own "
            "error message"
        )
    common, _ = Counter(exchanged).most_common(1)[0]
    other = exchanged.index(common)
    for rank, settings in enumerate(everyone):
        for name, ours in everyone[other].items():
            if settings[name] == ours:
                continue
            if name == ORDER:
                raise DisagreementError(
                    f"rank {rank} has a different order of the samples than rank {other}; a "
                    "sampler must draw from torch's, Python's or numpy's global generators, which "
                    "are seeded identically on every rank"
                )
            raise DisagreementError(
                f"rank {rank}: {name} is {settings[name]}, on rank {other} it is {ours}"
            )


def require_same_samples(exchanged: Sequence[bytes]) -> None:
    """Compare the packed samples of all ranks, in rank order.

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


def compare_first(items: Generator[T], gather: GatherFn | None) -> Generator[T]:
    """Yield items; before the first one, compare the samples that it describes with all ranks."""
    exchange = gather or (lambda message, subject: [message])
    with closing(items):
        try:
            first = next(items, None)
        except Exception:
            # the other ranks wait for this message
            exchange(pack_described(()), "comparing samples of")
            raise
        descriptions = pack_described(getattr(first, "descriptions", ()))
        require_same_samples(exchange(descriptions, "comparing samples of"))
        if first is not None:
            yield first
            del first  # free its memory
            yield from items


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
    return f"batch {batch.position} of epoch {batch.epoch}"


def _batch_difference(theirs: BatchIdentity, ours: BatchIdentity, rank: int, other: int) -> str:
    if theirs.checksum and ours.checksum:
        return (
            f"rank {rank} got a different batch than rank {other} (checksums {theirs.checksum} "
            f"and {ours.checksum}): pass the same whole batch on every rank; each computes its "
            "part. A DataLoader with a DistributedSampler, or with shuffle=True and no common "
            "seed, returns a different batch on every rank; use "
            "batches(dataset, batch_size) instead"
        )
    if (theirs.epoch, theirs.position) != (ours.epoch, ours.position):
        return (
            f"rank {rank} trains on {_describe(theirs)} while rank {other} trains on "
            f"{_describe(ours)}: take a step on the same batches on every rank, and skip a batch "
            "on all ranks or on none"
        )
    return (
        f"rank {rank} trains on {_describe(theirs)} with a different order of the samples than "
        f"rank {other}: pass the same dataset, seed and sampler on every rank"
    )
