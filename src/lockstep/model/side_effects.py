"""Side effects: writes of a step to more than gradients and buffers, which break determinism.

Each rank computes some of the micro-batches of a batch. State that passes from one micro-batch
to the next depends on the number of ranks, unless the trainer merges it, as it does with
gradients and buffers. Therefore the state before and after the micro-batches is compared in the
first three steps and in every hundredth step:

    start of a step                                end of its micro-batches
    checksums of parameters ──────── same? ──────> if written in forward:             StateError
    states of private generators ─── same? ──────> if drawn from:                     StateError
    numbers in attributes ────────── same? ──────> if changed, such as a counter:     a warning

The ranks also compare the checksums, to verify that all of them train the same weights.

A number that changes in only one step may be a cache, such as the length of the longest
sequence so far; a warning names it when it changes a second time. State in globals, closures
and other objects is not detected here: `lockstep check` compares whole runs.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from lockstep.checksum import checksum
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.generators import generator_state, is_private_generator
from lockstep.errors import DisagreementError

__all__ = ["SideEffects", "require_same_weights"]

FIRST, EVERY = 3, 100
"""The steps that are checked: the first FIRST steps, and each multiple of EVERY."""

LARGEST = 1000
"""The largest number of entries of a container that is compared."""

MACHINERY = frozenset(vars(nn.Module()))
"""The attributes that torch sets in every module."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the modules at one moment, by name."""

    parameters: dict[str, int]
    """The checksums of parameters."""
    generators: dict[str, Any]
    """The states of private generators."""
    numbers: dict[str, str]
    """The `repr` of numbers, strings, and containers of them."""
    arrays: dict[str, tuple[object, int]]
    """The tensors and arrays in plain attributes, with their checksums."""


class SideEffects:
    """The comparison of the state of modules before and after a step's micro-batches.

    `begin` and `finish` are called in every step; `failure`, `warnings` and `summary`
    are the findings of the last step.

    Args:
        modules: The model, or its blocks on this rank, and the other modules that a step
            calls, by their names in messages.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._before: Snapshot | None = None
        self._changes: Counter[str] = Counter()
        self._noted: list[str] = []  # names of changed attributes in this step
        self._checksums: dict[str, int] = {}
        self.failure = ""
        """The reason why the results depend on the layout; "" if there is none."""
        self.warnings: list[str] = []
        """The reasons why the results may depend on the layout."""
        self.summary = ""
        """A hash of all parameters and buffers before the step; "" if the step is not checked."""

    def begin(self, step: int) -> None:
        """Record the state before the first micro-batch, if the step is checked."""
        self._before, self.failure, self.warnings, self.summary = None, "", [], ""
        self._noted = []
        if step >= FIRST and step % EVERY:
            return
        self._before = self._snapshot()
        self._checksums = self._before.parameters | self._checked(nn.Module.named_buffers)
        self.summary = xxhash.xxh3_64_hexdigest(repr(self._checksums).encode())

    def finish(self) -> None:
        """Compare the state after the last micro-batch with the recorded one."""
        if self._before is None:
            return
        before, after = self._before, self._snapshot()
        self._before = None
        self.failure = _failure(before, after)
        changed = [*_differing(before.numbers, after.numbers)]
        changed += [
            name
            for name, (array, content) in after.arrays.items()
            # An array that is replaced in every step holds activations.
            if (old := before.arrays.get(name)) and old[0] is array and old[1] != content
        ]
        self._noted = changed
        self._changes.update(changed)
        self.warnings = [_warning(name) for name in changed if self._changes[name] == 2]

    def undo(self) -> None:
        """Discard the findings of `finish`, because the step is repeated."""
        self._changes.subtract(self._noted)
        self._noted = []

    def checksums(self) -> dict[str, int]:
        """Return the checksums by name, of which `summary` is the hash."""
        return self._checksums

    def _snapshot(self) -> Snapshot:
        attributes = dict(self._attributes())
        return Snapshot(
            parameters=self._checked(nn.Module.named_parameters),
            generators={
                name: generator_state(value)
                for name, value in attributes.items()
                if is_private_generator(value)
            },
            numbers={
                name: text
                for name, value in attributes.items()
                if (text := _numbers(value)) is not None
            },
            arrays={
                name: (value, checksum(torch.as_tensor(value)))
                for name, value in attributes.items()
                if type(value) is torch.Tensor or _is_numeric_array(value)
            },
        )

    def _checked(self, named: Callable[[nn.Module], Iterable[tuple[str, Any]]]) -> dict[str, int]:
        return {
            ".".join(part for part in (root, name) if part): checksum(tensor)
            for root, module in self._modules.items()
            for name, tensor in named(module)
        }

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for root, module in self._modules.items():
            for prefix, part in module.named_modules():
                for name, value in vars(part).items():
                    if name not in MACHINERY:
                        yield ".".join(each for each in (root, prefix, name) if each), value


def require_same_weights(
    mine: Mapping[str, int], about: str, group: dist.ProcessGroup | None
) -> None:
    """Find and report the first tensor in which ranks differ.

    A collective call, for steps in which `SideEffects.summary` differs between ranks.

    Args:
        mine: The checksums of this rank's tensors, by name.
        about: A description of the step, the same on every rank.
        group: The group of the training's ranks.

    Raises:
        DisagreementError: A tensor differs between ranks. Raised on every rank.
    """
    messages = all_gather_bytes(json.dumps(mine).encode(), f"comparing weights {about}", group)
    everyone = [json.loads(message) for message in messages]
    for name in dict.fromkeys(name for each in everyone for name in each):
        holders = [rank for rank, each in enumerate(everyone) if name in each]
        common, _ = Counter(everyone[rank][name] for rank in holders).most_common(1)[0]
        others = [rank for rank in holders if everyone[rank][name] != common]
        if others:
            rank = next(rank for rank in holders if everyone[rank][name] == common)
            raise DisagreementError(
                f"{name} has other values on rank {others[0]} than on rank {rank} {about}, "
                "although all ranks began with the same: something wrote into it on some ranks "
                "only; make every change on all ranks"
            )


def _failure(before: Snapshot, after: Snapshot) -> str:
    for name in _differing(before.parameters, after.parameters):
        return (
            f"parameter {name} was written during forward or backward; each rank computes other "
            "micro-batches, so the ranks would end with different weights: leave out options "
            "such as max_norm, and update it after the step, on all ranks"
        )
    for name in _differing(before.generators, after.generators):
        return (
            f"the generator {name} was used; its state continues from one micro-batch to the next, "
            "so its numbers depend on the number of ranks: draw from torch's default generator "
            "(leave generator= out), which is seeded for each micro-batch"
        )
    return ""


def _warning(name: str) -> str:
    return (
        f"the attribute {name} changes from step to step; if forward also reads it, the bits "
        "depend on the number of ranks: register a buffer for it, and run `lockstep check` on the "
        "script"
    )


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [name for name, value in after.items() if name in before and before[name] != value]


def _is_numeric_array(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def _numbers(value: Any) -> str | None:
    """Return the `repr` of a number, a string, or a container of these; otherwise None."""
    waiting: list[Any] = [value]
    for _ in range(LARGEST):
        if not waiting:
            return repr(value)
        each = waiting.pop()
        if isinstance(each, (list, tuple, set, frozenset, deque)):
            waiting += each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif each is not None and not isinstance(each, (bool, int, float, complex, str)):
            return None
    return None
