"""The repeatability check: loads samples of an epoch's first batch twice, and compares them.

A collate function of the user is checked in the same way, with one micro-batch.

    each rank    sample i with seed key(seed, epoch, i) ──> content
                 sample i with the same seed            ──> must be equal, or the dataset uses
                                                            random numbers that are not seeded
                 states of private generators           ──> the same, for those that change few
                                                            of the samples
    all ranks    content of sample i                    ──> must be equal, or the datasets differ

The check runs in the process that loads the samples, a worker if there are workers, because a
dataset may open its files with the first sample. It uses samples of the first batch, because
reading ahead may be expensive, and of every hundredth batch after it, on another core of the
processor, which may compute wrong. Every epoch is checked, because the script may have changed the
dataset meanwhile.

An iterable dataset that shuffles with a generator of its own, or counts its epochs, yields another
stream in its second epoch. A worker always has the first one, and so has a resumed script, which
does not iterate over finished epochs. Reading may be expensive, and some streams can be read only
once, so the first sample is loaded again only if a private generator has changed with it, or if a
generator or a number of the dataset has changed at the end of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from numbers import Number
from time import perf_counter
from typing import Any

from lockstep.data.content_hash import hash_content, hash_sample
from lockstep.data.generators import find_private_generators, generator_state
from lockstep.kernel.errors import DatasetError
from lockstep.processor_core import on_another_core

__all__ = [
    "BegunStream",
    "StreamCheck",
    "check_samples",
    "collate_and_check",
    "describe_sample",
    "is_checked",
    "select_positions",
]

EVERY = 100
"""The number of batches from one whose samples are checked to the next."""

BUDGET = 0.02
"""Seconds after which no further sample is checked."""

ADVICE = (
    "draw from torch's, Python's or numpy's global generators, which are seeded for each sample, "
    "or create a generator there, seeded with a number from a global one"
)

BegunStream = tuple[Iterator[Any], Any]
"""An iterator over a dataset, and its first sample."""


def is_checked(batch: int, first: int) -> bool:
    """Return whether samples of a batch are loaded twice; `first` is the first one of the source.

    A negative `first` stands for a source that is not checked.
    """
    return first >= 0 and (batch - first) % EVERY == 0


def select_positions(positions: Sequence[int]) -> list[int]:
    """Return up to four of the positions, spread over the batch."""
    size = len(positions)
    parts = (0, size // 2, size // 4, 3 * size // 4)
    return list(dict.fromkeys(positions[part] for part in parts))


def check_samples(
    load: Callable[[int], Any],
    positions: Sequence[int],
    names: Sequence[int],
    dataset: Any,
) -> tuple[str, ...]:
    """Load samples twice and compare them.

    Args:
        load: A function that loads the sample at a position, with the global generators seeded for
            this sample.
        positions: The positions of the samples in the order of the epoch.
        names: The indices of the samples, for messages.
        dataset: The dataset, which is searched for private generators.

    Returns:
        Descriptions of the samples, which must be equal on all ranks. Their number depends on
        the time that loading takes. The check ends at a sample that raises an exception, which the
        loader reports.

    Raises:
        DatasetError: A sample differs between the two loads.
    """
    start = perf_counter()
    descriptions: list[str] = []
    for position, name in zip(positions, names, strict=True):
        contents: list[str] = []
        states: list[list[Any]] = []
        try:
            for place in (nullcontext(), on_another_core()):
                with place:
                    sample = load(position)
                    contents.append(hash_content(sample))
                if not states:
                    generators = find_private_generators(dataset)
                states.append([*map(generator_state, generators)])
        except Exception:
            break
        what = (
            f"sample {name} of {type(dataset).__name__}, loaded twice with the same random seed, "
        )
        require_repeatable(what, contents, states)
        descriptions.append(describe_sample(name, sample))
        if perf_counter() - start > BUDGET:
            break
    return tuple(descriptions)


class StreamCheck:
    """The check of one iteration over an iterable dataset.

    Args:
        dataset: The dataset.
        read: A function that begins an iteration with seeded global generators.
    """

    def __init__(self, dataset: Any, read: Callable[[], BegunStream]) -> None:
        self._dataset = dataset
        self._read = read
        self._before = self._state()

    def begin(self) -> BegunStream:
        """Begin the iteration, again if a private generator has changed.

        Raises:
            DatasetError: The first sample differs, or a private generator has advanced.
        """
        begun = self._read()
        self._first = hash_content(begun[1])
        self._generators = self._state()[0]
        if self._generators != self._before[0]:
            begun = self._read()  # of some datasets, only the newest iterator is valid
            self._require_same(begun)
        return begun

    def end(self) -> None:
        """Begin again at the end of the stream if anything has changed.

        Raises:
            DatasetError: The first sample differs, or a private generator has advanced.
        """
        begun = None
        if self._state() != self._before:
            with suppress(Exception):  # a stream that can be read only once
                begun = self._read()
        if begun:
            self._require_same(begun)

    def _require_same(self, begun: BegunStream) -> None:
        require_repeatable(
            f"sample 0 of {type(self._dataset).__name__}, loaded twice with the same random seed, ",
            [self._first, hash_content(begun[1])],
            [self._generators, self._state()[0]],
        )

    def _state(self) -> tuple[list[Any], list[Any]]:
        """Return the states of the private generators, and the numbers."""
        generators = find_private_generators(self._dataset)
        values = getattr(self._dataset, "__dict__", {}).values()
        numbers = [value for value in values if isinstance(value, Number)]
        return [*map(generator_state, generators)], numbers


def collate_and_check(
    collate: Callable[[Sequence[Any]], Any],
    again: Callable[[Sequence[Any]], Any],
    pieces: Sequence[Any],
) -> Any:
    """Collate micro-batches, the first of them twice, and compare its results.

    Args:
        collate: A function that collates some of the micro-batches, with the global generators
            seeded for each. It returns a list; anything else is a failure.
        again: The same, from samples that are loaded anew.
        pieces: The micro-batches.

    Returns:
        All micro-batches, or a failure.

    Raises:
        DatasetError: The results differ.
    """
    first = collate(pieces[:1])
    if not isinstance(first, list):
        return first
    contents = [hash_content(first)]
    others = collate(pieces[1:])  # the function may keep something, such as the longest length
    with on_another_core():
        contents.append(hash_content(again(pieces[:1])))
    require_repeatable("collate_fn, called twice with the same random seed, ", contents)
    return [*first, *others] if isinstance(others, list) else others


def describe_sample(name: int, sample: Any) -> str:
    """Return the index and the hash of a sample, which must be equal on all ranks."""
    return f"{name}:{hash_sample(sample)}"


def require_repeatable(
    what: str, contents: Sequence[str], states: Sequence[Sequence[Any]] = ((), ())
) -> None:
    """Raise DatasetError unless two loads have equal contents and states of private generators."""
    if contents[0] != contents[1]:
        raise DatasetError(
            f"{what}gives different results, because it depends on something that is not seeded, "
            f"such as a private generator, a counter or the time, or a processor core is faulty: "
            f"{ADVICE}"
        )
    if states[0] != states[1]:
        raise DatasetError(
            f"{what}draws from a private generator, so its random numbers depend on what was "
            f"loaded before: {ADVICE}"
        )
