"""Draws: the states of samplers' own generators, so that a resumed training draws the same.

    epoch                 0              1              2
    sampler's generator   s0 ──order──> s1 ──order──> s2 ──order──> s3
    saved in epoch 1                     s1             s2
                                         restored for   restored for
                                         epoch 1        epoch 2

An order that is drawn from global generators depends on (seed, epoch) alone and needs
none of this.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.generators import (
    private_generators,
    restore_generator,
    state_of_generator,
)
from lockstep.data.sampling import nested
from lockstep.errors import DatasetError

__all__ = ["Draws", "restore_sampler", "state_of_sampler"]

DATA = frozenset({"data_source", "dataset"})
"""Attributes of samplers that hold the data, whose generators are not the sampler's."""

State = dict[str, Any]
"""States of generators by their path in the sampler, and what `state_dict` returned."""


def state_of_sampler(sampler: Any) -> State:
    """Return the state that a sampler's next order depends on, as JSON values.

    Empty where it has neither generators of its own nor `state_dict`.
    """
    generators = private_generators(sampler, without=DATA)
    state = {path: state_of_generator(each) for path, each in generators.items()}
    for name, each in _stateful(sampler):
        value = copy.deepcopy(each.state_dict())
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue  # it could not be saved beside the rest
        state[name] = value
    return state


def restore_sampler(sampler: Any, state: Mapping[str, Any]) -> None:
    """Put what `sampler` has of `state` into that state; the rest is left alone.

    Raises DatasetError where a generator is of another kind than the saved one.
    """
    try:
        for path, each in private_generators(sampler, without=DATA).items():
            if path in state:
                restore_generator(each, state[path])
        for name, each in _stateful(sampler):
            if name in state:
                each.load_state_dict(copy.deepcopy(state[name]))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise DatasetError(
            f"the saved state of the sampler {type(sampler).__name__} is of another one: {error}"
        ) from error


def _stateful(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Give the samplers that save their state themselves, by a name."""
    for depth, each in enumerate(nested(sampler)):
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            yield f"state_dict of {type(each).__name__} {depth}", each


@dataclass(frozen=True)
class Draw:
    """The states of a sampler around the order that it drew for an epoch."""

    epoch: int
    before: State
    after: State


class Draws:
    """What the latest orders of a training were drawn from.

    An epoch may draw several orders (of two datasets, or of one dataset twice); they are
    told apart by their number within the epoch. Orders that depend on (seed, epoch) alone
    do not count.
    """

    def __init__(self) -> None:
        self._epoch, self._number = -1, 0  # of the next draw
        self._latest: dict[int, Draw] = {}  # by number
        self._saved: dict[int, Draw] = {}  # to be resumed

    def resume(self, sampler: Any, epoch: int) -> None:
        """Restore what the next order depends on, where a state was loaded.

        Raises DatasetError where it cannot be restored.
        """
        saved = self._saved.get(self._number if epoch == self._epoch else 0)
        here = state_of_sampler(sampler)
        if saved is None or not here:
            return
        name = type(sampler).__name__
        if epoch not in (saved.epoch, saved.epoch + 1):
            raise DatasetError(
                f"the sampler {name} has a generator of its own, whose state was saved in epoch "
                f"{saved.epoch} and is not known in epoch {epoch}: go on with epoch {saved.epoch} "
                f"or {saved.epoch + 1}, or let the sampler draw from torch's default generator"
            )
        state = saved.before if epoch == saved.epoch else saved.after
        if state.keys() != here.keys():
            raise DatasetError(
                f"the state was saved with a sampler that had {_named(state)}, but {name} has "
                f"{_named(here)}: its order could not go on; give the same sampler"
            )
        restore_sampler(sampler, state)

    def record(self, epoch: int, before: State, after: State) -> None:
        """Take note of an order that was drawn."""
        if not before and not after:
            return
        if epoch != self._epoch:
            self._epoch, self._number = epoch, 0
        self._latest[self._number] = Draw(epoch, before, after)
        self._saved.pop(self._number, None)  # from here on the sampler goes on by itself
        self._number += 1

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what `load_state_dict` takes, as JSON values."""
        latest = self._saved | self._latest
        return [{"number": number, **vars(draw)} for number, draw in sorted(latest.items())]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Let the next draws go on from a saved state."""
        self._epoch, self._number = -1, 0
        self._latest, self._saved = {}, {}
        for each in state:
            self._saved[each["number"]] = Draw(each["epoch"], each["before"], each["after"])


def _named(state: State) -> str:
    return f"the generators {', '.join(sorted(state))}" if state else "no generator of its own"
