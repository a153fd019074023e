"""The probe: a few samples of an epoch's first batch, loaded twice and compared.

    every rank   sample i under key(seed, epoch, i) ──> content, states of private generators
                 sample i under key(seed, epoch, i) ──> the same, or the dataset draws from
                                                        something that is not seeded
    all ranks    content of sample i ──> the same, or their datasets differ

It runs where samples are loaded, in a worker if there are workers: a dataset may
open its files with the first sample. The samples are those of one batch, because reading
far ahead may be expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from lockstep.data.fingerprint import fingerprint, sample_fingerprint
from lockstep.data.generators import private_generators, state_of_generator
from lockstep.errors import DatasetError

__all__ = ["described", "probe_collate", "probe_samples", "spread"]

COUNT = 4
"""Samples that are probed, at most."""

BUDGET = 0.02
"""Seconds after which no further sample is probed."""

ADVICE = (
    "draw from torch's, Python's or numpy's global generators, which are seeded for each sample, "
    "or make a generator there, seeded by a draw from a global one"
)


def spread(positions: Sequence[int]) -> list[int]:
    """Return up to COUNT of the positions, the first and the middle one before others."""
    size = len(positions)
    parts = (0, size // 2, size // 4, 3 * size // 4)
    return list(dict.fromkeys(positions[part] for part in parts[:COUNT]))


def probe_samples(
    load: Callable[[int], Any],
    positions: Sequence[int],
    names: Sequence[int],
    dataset: Any,
) -> tuple[str, ...]:
    """Load samples twice, and return descriptions that all ranks must share.

    How many depends on how long they take; the first ones of any two ranks are of the same
    samples. A sample that raises is left out, because it is reported in its turn.

    Args:
        load: Loads the sample at a position, with the global generators seeded for it.
        positions: Where the samples are in the epoch's order.
        names: Their indices, for messages.
        dataset: What is searched for private generators.

    Raises:
        DatasetError: A sample differs from itself.
    """
    begun = perf_counter()
    found: list[str] = []
    for position, name in zip(positions, names, strict=True):
        contents, states = [], []
        try:
            for _ in range(2):
                sample = load(position)
                contents.append(fingerprint(sample))
                states.append(_states(dataset))
        except Exception:
            break
        require_repeatable(
            f"sample {name} of {type(dataset).__name__}, loaded twice with the same random seed, ",
            contents,
            states,
        )
        found.append(described(name, sample))
        if perf_counter() - begun > BUDGET:
            break
    return tuple(found)


def probe_collate(collate: Callable[[], Any], function: Any) -> None:
    """Collate a micro-batch twice if its function has generators of its own.

    Args:
        collate: Loads and collates the micro-batch, with the global generators seeded for it.
        function: The user's function.

    Raises:
        DatasetError: One of the generators goes on from call to call.
    """
    if not private_generators(function):
        return
    states = []
    for _ in range(2):
        collate()
        states.append(_states(function))
    require_repeatable("collate_fn, called twice with the same random seed, ", ["", ""], states)


def described(name: int, sample: Any) -> str:
    """Return what all ranks must share of sample `name`."""
    return f"{name}:{sample_fingerprint(sample)}"


def require_repeatable(
    what: str, contents: Sequence[str], states: Sequence[dict[str, Any]]
) -> None:
    """Raise DatasetError unless two results, and the states of generators after them, are equal."""
    first, second = states
    names = [path for path in {**first, **second} if first.get(path) != second.get(path)]
    if names:
        raise DatasetError(
            f"{what}draws from a generator of its own ({names[0]}), so its numbers depend on who "
            f"loads what: {ADVICE}"
        )
    if contents[0] != contents[1]:
        raise DatasetError(
            f"{what}differs from itself, because it depends on something that is not seeded, such "
            f"as a generator of its own, a counter or the time: {ADVICE}"
        )


def _states(owner: Any) -> dict[str, Any]:
    return {path: state_of_generator(each) for path, each in private_generators(owner).items()}
