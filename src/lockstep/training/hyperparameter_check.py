"""Settings that a program may change between steps, compared in every step.

    trainer.optimizer.param_groups[0]["lr"] = 0.01       an option of the optimizer
    model[1].p = 0.5                                     a plain attribute of a module
    model[1].eval()                                      its mode
    model[0].weight.requires_grad_(False)                a frozen parameter

A change on one rank alone would pass unnoticed: all ranks would get the same sums, but not those
of a single process. The status of every step therefore contains a hash of these settings.
Attributes that a step or an evaluation itself changes (a counter, a cache) may differ, because
the ranks compute different micro-batches. `lockstep.model.state_mutation_check` warns of them; here
they are ignored from the first time that ranks differ in one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_bytes
from lockstep.kernel.errors import DisagreementError
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.description import (
    PLAIN,
    describe_options,
    describe_value,
    find_difference,
    iterate_attributes,
)

__all__ = ["HyperparameterCheck"]

LARGEST = 64
"""The largest container whose changes are detected, in members."""

DIRECT = PLAIN | {str}
"""Types whose values are compared directly, since they cannot be changed in place."""


DELETED = object()


class Text(str):
    """The text of a value of another type, made when the value was read."""


class HyperparameterCheck(StepHook):
    """The hook that reads the settings of modules and an optimizer, and compares them.

    Args:
        modules: The modules that a step calls, by the name that messages use.
        foreign: The names of the modules that another trainer may train. Its steps change their
            attributes, so only their modes and frozen parameters are compared.
        optimizer: The optimizer of the trainer.
        group: The group of the training's ranks.
        is_elastic: Whether the number of ranks can change.

    Attributes:
        is_needed: Whether there are other ranks to compare with, at some time.
    """

    name = "hyperparameters"

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        foreign: Collection[str],
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        is_elastic: bool = False,
    ) -> None:
        self._optimizer, self._group = optimizer, group
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._own: set[str] = set()
        self._before: list[Any] | None = None
        self._hashed: tuple[list[Any], str] = ([], "")
        self.is_needed = is_elastic or dist.get_world_size(group) > 1
        for root, module in modules.items():
            for path, part in module.named_modules(prefix=root):
                for name, value in iterate_attributes(part):
                    is_foreign = root in foreign and name != "training"
                    if _is_comparable(value) and not is_foreign:
                        entry = f"{path} ({type(part).__name__}).{name}"
                        self._places[entry] = vars(part), name
            for path, parameter in module.named_parameters(prefix=root):
                self._parameters[f"{path}.requires_grad"] = parameter

    def begin(self, step: StepContext, batch: Any) -> None:
        """Read the settings before the micro-batches of a step."""
        if self._before is not None:  # the previous step was left by an exception
            self._note_changes(self._before)
        self._before = self._read()

    def status(self, step: StepContext) -> str:
        """Read the settings after the micro-batches, to find those that the step has changed.

        Returns:
            A hash of the settings at the beginning of the step and of the optimizer's current
            options; "" if there is only one rank.
        """
        if dist.get_world_size(self._group) == 1:
            return ""
        before = self._read() if self._before is None else self._before
        self._note_changes(before)
        self._before = None
        if before != self._hashed[0]:
            self._hashed = before, xxhash.xxh3_64_hexdigest(repr(before).encode())
        options = [
            value if type(value) in PLAIN else describe_value(value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        return self._hashed[1] + xxhash.xxh3_64_hexdigest(repr(options).encode())

    def describe(self) -> str:
        """Return a text that changes with a setting, except those that a step changes itself."""
        if not self._own:
            return repr(self._read())
        pairs = zip(self._entries(), self._read(), strict=True)
        return repr([value for entry, value in pairs if entry not in self._own])

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Treat the changes made in the body as side effects of calling the model."""
        before = self._read()
        yield
        self._note_changes(before)

    def merge(self, left: str | None, right: str | None) -> str | None:
        """Return the hash of two ranges of ranks; None if they differ."""
        return left if left == right else None

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Find the difference if the hashes differ.

        Raises:
            DisagreementError: Ranks differ in a setting that no step has changed. Raised on every
                rank, with the entry, the rank and both values.
        """
        if summary.failure is None and summary.hooks[self.name] is None:
            self._require_same(step.number)

    def _require_same(self, step: int) -> None:
        values = (
            value if type(value) is Text else describe_value(value) for value in self._hashed[0]
        )
        settings = dict(zip(self._entries(), values, strict=True))
        settings |= describe_options("optimizer", self._optimizer)
        message = json.dumps([sorted(self._own), settings]).encode()
        messages = all_gather_bytes(message, f"comparing settings in step {step}", self._group)
        everyone = [json.loads(message) for message in messages]
        for entry in {entry for own, _ in everyone for entry in own}:
            self._places.pop(entry, None)
            self._parameters.pop(entry, None)
            for _, theirs in everyone:
                theirs.pop(entry, None)
        difference = find_difference([theirs for _, theirs in everyone])
        if difference is not None:
            advice = "make every change between steps on all ranks"
            raise DisagreementError(difference.format_message(advice, f" in step {step}"))

    def _note_changes(self, before: list[Any]) -> None:
        after = self._read()
        if before != after:
            pairs = zip(self._entries(), before, after, strict=True)
            self._own |= {entry for entry, old, new in pairs if old != new}

    def _entries(self) -> list[str]:
        return [*self._places, *self._parameters]

    def _read(self) -> list[Any]:
        """Return the values in the order of `_entries`."""
        values = [held.get(name, DELETED) for held, name in self._places.values()]
        values = [value if _is_plain(value) else _text(value) for value in values]
        return values + [parameter.requires_grad for parameter in self._parameters.values()]


def _is_plain(value: Any) -> bool:
    """Return whether a value can be compared directly: a tuple may hold tensors later."""
    if type(value) is tuple:
        return all(type(member) in DIRECT for member in value)
    return type(value) in DIRECT


def _text(value: Any) -> Text:
    return Text("deleted" if value is DELETED else describe_value(value))


def _is_comparable(value: Any) -> bool:
    """Return whether changes of an attribute are detected, given its initial value."""
    if type(value) in (list, dict, set):
        return len(value) <= LARGEST
    return (_is_plain(value) or type(value) is tuple) and describe_value(value) == repr(value)
