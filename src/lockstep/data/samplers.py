"""Samplers of the user, with the same order on every rank and after a resume.

An order that is drawn from global generators depends only on (seed, epoch). The state of a
sampler's private generators is saved, so that a resumed training draws the same orders:

    epoch                 0              1              2
    sampler's generator   s0 ──order──> s1 ──order──> s2 ──order──> s3
    saved in epoch 1                     s1             s2
                                         restored for   restored for
                                         epoch 1        epoch 2
"""

from __future__ import annotations

import copy
import json
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lockstep.data.epoch_order import EpochOrder
from lockstep.data.generators import generator_state, private_generators, set_generator_state
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import isolated, key, seed_all

__all__ = [
    "KnownSamplers",
    "SamplerStates",
    "draw_batches",
    "draw_indices",
    "keep_sampler",
    "restore_sampler_state",
    "sampler_chain",
    "sampler_state",
    "validate_sampler",
]


def sampler_chain(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it wraps, the outermost first."""
    chain: list[Any] = []
    while sampler is not None and not any(sampler is known for known in chain):
        chain.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return chain


def validate_sampler(sampler: Any) -> None:
    """Raise DatasetError for a DistributedSampler, which yields only a part of the dataset."""
    if any(
        isinstance(part, DistributedSampler) and part.num_replicas > 1
        for part in sampler_chain(sampler)
    ):
        raise DatasetError(
            "a DistributedSampler yields a different part on each rank, but every batch is "
            "already split over the ranks; pass a sampler of the whole dataset, or none"
        )


def draw_indices(
    sampler: Iterable[int], batch_size: int, seed: int, epoch: int, drop_last: bool = False
) -> EpochOrder:
    """Draw the order of an epoch from a sampler, with seeded global generators.

    Raises:
        DatasetError: The sampler yields nothing, or something other than integers.
    """
    _set_epoch(sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        indices = _to_integers(sampler)
    if not indices:
        raise DatasetError(f"the sampler {type(sampler).__name__} yielded no sample")
    return EpochOrder.from_indices(
        torch.tensor(indices, dtype=torch.int64), batch_size, drop_last
    ).with_repeats()


def draw_batches(batch_sampler: Iterable[Sequence[int]], seed: int, epoch: int) -> EpochOrder:
    """Draw the batches of an epoch from a batch sampler, with seeded global generators.

    Raises:
        DatasetError: The sampler yields nothing, an empty batch, or something other than integers.
    """
    _set_epoch(batch_sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        batches = [_to_integers(batch) for batch in batch_sampler]
    if not batches:
        raise DatasetError(f"the batch sampler {type(batch_sampler).__name__} yielded no batch")
    return EpochOrder.from_batches(batches)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in sampler_chain(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _to_integers(indices: Iterable[Any]) -> list[int]:
    result = []
    for index in indices:
        try:
            result.append(operator.index(index))
        except TypeError:
            raise DatasetError(
                f"the sampler yielded {index!r}, but indices of samples must be integers"
            ) from None
    return result


DATA = frozenset({"data_source", "dataset"})
"""The attributes of samplers that hold the dataset; its generators do not belong to the sampler."""

State = dict[str, Any]
"""The states of generators by attribute path, and the results of `state_dict`."""


def sampler_state(sampler: Any) -> State:
    """Return the state on which the next order of a sampler depends, as JSON values.

    The state is empty for a sampler with neither private generators nor `state_dict`.
    """
    generators = private_generators(sampler, without=DATA)
    state = {path: generator_state(generator) for path, generator in generators.items()}
    for name, part in _stateful(sampler):
        value = copy.deepcopy(part.state_dict())
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue  # the value cannot be saved as JSON
        state[name] = value
    return state


def restore_sampler_state(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore the parts of `state` that `sampler` has; ignore the others.

    Raises:
        DatasetError: The state does not fit, such as that of another type of generator.
    """
    try:
        for path, generator in private_generators(sampler, without=DATA).items():
            if path in state:
                set_generator_state(generator, state[path])
        for name, part in _stateful(sampler):
            if name in state:
                part.load_state_dict(copy.deepcopy(state[name]))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise DatasetError(
            f"the saved state does not fit the sampler {type(sampler).__name__}: {error}"
        ) from error


def keep_sampler(sampler: Any) -> Callable[[], None]:
    """Return a function that restores the current state of a sampler."""
    kept = {} if sampler is None else sampler_state(sampler)
    return lambda: restore_sampler_state(sampler, kept) if kept else None


def _stateful(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, sampler) for the samplers of a chain that have `state_dict`."""
    for depth, part in enumerate(sampler_chain(sampler)):
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            yield f"state_dict of {type(part).__name__} {depth}", part


@dataclass(frozen=True)
class DrawnOrder:
    """The states of a sampler before and after it drew the order of an epoch."""

    epoch: int
    before: State
    after: State


class SamplerStates:
    """The sampler states before and after the latest orders of a training.

    An epoch may draw several orders, for two datasets or twice for one dataset. These orders are
    numbered within the epoch; orders that depend only on (seed, epoch) are not counted.
    """

    def __init__(self) -> None:
        self._epoch, self._number = -1, 0  # of the next order
        self._latest: dict[int, DrawnOrder] = {}  # by number
        self._saved: dict[int, DrawnOrder] = {}  # by number; loaded, but not resumed yet

    def resume(self, sampler: Any, epoch: int) -> None:
        """Restore the state of a sampler if there is a saved one.

        Raises:
            DatasetError: The state cannot be restored.
        """
        saved = self._saved.get(self._number if epoch == self._epoch else 0)
        here = sampler_state(sampler)
        if saved is None or not here:
            return
        name = type(sampler).__name__
        if epoch not in (saved.epoch, saved.epoch + 1):
            raise DatasetError(
                f"the sampler {name} has a private generator, whose state was saved in "
                f"epoch {saved.epoch} and is unknown for epoch {epoch}: continue with epoch "
                f"{saved.epoch} or {saved.epoch + 1}, or let the sampler draw from torch's "
                "default generator"
            )
        state = saved.before if epoch == saved.epoch else saved.after
        if state.keys() != here.keys():
            raise DatasetError(
                f"the state was saved with a sampler that had {_named(state)}, but {name} has "
                f"{_named(here)}: its order cannot be resumed; pass the same sampler"
            )
        restore_sampler_state(sampler, state)

    def record(self, epoch: int, before: State, after: State) -> None:
        """Record the sampler states before and after an order was drawn."""
        if not before and not after:
            return
        if epoch != self._epoch:
            self._epoch, self._number = epoch, 0
        self._latest[self._number] = DrawnOrder(epoch, before, after)
        self._saved.pop(self._number, None)  # from here, the sampler has the right state itself
        self._number += 1

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states as JSON values."""
        latest = self._saved | self._latest
        return [{"number": number, **vars(draw)} for number, draw in sorted(latest.items())]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Load states, from which the next orders are resumed."""
        self._epoch, self._number = -1, 0
        self._latest, self._saved = {}, {}
        for entry in state:
            self._saved[entry["number"]] = DrawnOrder(
                entry["epoch"], entry["before"], entry["after"]
            )


class KnownSamplers:
    """The samplers that a script has used, numbered in the order of their first use.

    A resumed script creates its samplers again, and draws no orders for complete epochs. When a
    sampler is first used, the saved state with its number is restored.
    """

    def __init__(self) -> None:
        self._known: list[Callable[[], Any]] = []  # weak references
        self._saved: dict[int, State] = {}  # of samplers that have not been used since the load

    def use(self, sampler: Any) -> None:
        """Number a sampler, and restore its state if it is used for the first time.

        Raises:
            DatasetError: The saved state does not fit the sampler.
        """
        is_known = any(reference() is sampler for reference in self._known)
        if sampler is None or is_known or not sampler_state(sampler):
            return
        restore_sampler_state(sampler, self._saved.pop(len(self._known), {}))
        try:
            self._known.append(weakref.ref(sampler))
        except TypeError:
            self._known.append(lambda: sampler)

    def state_dict(self) -> dict[int, State]:
        """Return the states of the samplers that still exist, by number."""
        known = ((number, reference()) for number, reference in enumerate(self._known))
        used = {number: sampler_state(sampler) for number, sampler in known if sampler is not None}
        return self._saved | used

    def load_state_dict(self, state: Mapping[int, State]) -> None:
        """Load states, which are restored when samplers are first used from now on."""
        self._saved = dict(state)


def _named(state: State) -> str:
    return f"the generators {', '.join(sorted(state))}" if state else "no private generator"
