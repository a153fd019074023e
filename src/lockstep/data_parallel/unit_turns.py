"""Turns of units on threads: the generators belong to the process, so units that draw run alone.

    thread of device 0   conv  relu  [dropout]        linear
    thread of device 1   conv  relu            [dropout]  linear       [ ] runs alone, seeded

The units and their seeds are those of the trainer (`lockstep.model.units`). Which units draw is
observed in the first pass, which computes one micro-batch after another. From then on a unit that
draws waits until no other unit runs; the others run at the same time. After each such unit and at
the end of a pass, the state of the generators must be what it was before: if it is not, a unit drew
that had not drawn before, and the pass is repeated, one micro-batch after another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.devices import default_generator
from lockstep.kernel.errors import StateError
from lockstep.model.units import is_in_backward
from lockstep.randomness import seed_torch, set_state_of_torch, state_of_others, state_of_torch

__all__ = ["OUTSIDE", "DrawingUnits", "GeneratorStates", "RandomOperators", "UnitTurns"]

OUTSIDE = -1
"""The number of code that draws outside of any unit."""


class DrawingUnits:
    """What is known about the units of a module that draw random numbers.

    Attributes:
        is_known: Whether a forward and its backward have been observed.
        is_serial: Whether micro-batches cannot be computed at the same time, because something
            draws outside of a unit, in backward, or from the generators of Python and numpy.
        units: The numbers of the units that draw.
    """

    def __init__(self, is_serial: bool) -> None:
        self.is_known = False
        self.is_serial = is_serial
        self.units: set[int] = set()

    def add(self, found: set[int]) -> None:
        """Add the units that drew in a pass."""
        self.is_serial |= OUTSIDE in found
        self.units |= found - {OUTSIDE}


class RandomOperators(TorchDispatchMode):
    """Notes which units call operators that change the state of the default generators.

    Attributes:
        unit: The unit that runs.
        found: The units that drew.

    Raises:
        StateError: In the body, an operator draws from another generator.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.unit = OUTSIDE
        self.found: set[int] = set()
        self._names, self._device = names, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and compare the states before and after it if it may draw."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self._reject_generators([*args, *kwargs.values()])
        before = state_of_torch(self._device)
        result = func(*args, **kwargs)
        if state_of_torch(self._device) != before:
            self.found.add(self.unit)
        return result

    @contextmanager
    def observe(self, unit: int) -> Iterator[None]:
        """Attribute the operators of the body to a unit."""
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def watch(self, unit: int, module: nn.Module) -> None:
        """Attribute the operators of all calls of a module to a unit."""

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.observe(unit):
                return call(*args, **kwargs)

        _wrap(module, around)

    def _reject_generators(self, values: Sequence[Any]) -> None:
        defaults = [torch.default_generator, default_generator(self._device)]
        for value in values:
            if isinstance(value, torch.Generator) and all(value is not one for one in defaults):
                where = "code outside of its blocks"
                if self.unit != OUTSIDE:
                    where = self._names[self.unit]
                raise StateError(
                    f"{where} draws from a generator of its own, so its numbers would depend on "
                    "which thread comes first: draw from torch's default generator"
                )


class GeneratorStates:
    """The states of the generators during a pass, to which every unit that draws returns them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._states = {each: state_of_torch(each) for each in devices}
        self._others = state_of_others()
        self._changed = False

    def restore(self, device: torch.device) -> None:
        """Restore the states after a unit has drawn on a device."""
        set_state_of_torch(self._states[device], device)

    def compare(self, device: torch.device) -> None:
        """Note whether the states differ from those at the start of the pass."""
        self._changed |= state_of_torch(device) != self._states[device]

    def has_changed(self) -> bool:
        """Return whether anything drew that was not known to draw."""
        for device in self._states:
            self.compare(device)
        return self._changed or state_of_others() != self._others


class UnitTurns:
    """The turns of the units of one pass: a unit that draws runs alone.

    Args:
        drawing: The numbers of the units that draw.
        states: The states of the generators.
    """

    def __init__(self, drawing: set[int], states: GeneratorStates) -> None:
        self._drawing, self._states = drawing, states
        self._condition = threading.Condition()
        self._running = 0
        self._waiting = 0

    def install(
        self, units: Sequence[nn.Module], key: Callable[..., int], device: torch.device
    ) -> Callable[[], AbstractContextManager[None]]:
        """Let the units of a replica take turns.

        Args:
            units: The units of a replica of one micro-batch.
            key: A function that returns the seed of a unit and a call.
            device: The device of the micro-batch.

        Returns:
            A function that returns the context of the loss.
        """
        calls = [0] * len(units)

        def take(unit: int, call: int) -> AbstractContextManager[None]:
            if unit not in self._drawing:
                return self._together()
            return self._alone(key(unit, call) if call else key(unit), device)

        def make(unit: int) -> Callable[..., Any]:
            def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if is_in_backward():  # a recomputation, which draws nothing here
                    return call(*args, **kwargs)
                number, calls[unit] = calls[unit], calls[unit] + 1
                with take(unit, number):
                    return call(*args, **kwargs)

            return around

        for number, unit in enumerate(units):
            _wrap(unit, make(number))
        return lambda: take(len(units), max(0, calls[0] - 1))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Run the body while no unit draws; those that wait to draw come first."""
        with self._condition:
            self._condition.wait_for(lambda: self._running >= 0 and not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextmanager
    def _alone(self, seed: int, device: torch.device) -> Iterator[None]:
        """Run the body, with seeded generators, while nothing else runs."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: self._running == 0)
                self._running = -1
            finally:
                self._waiting -= 1
        try:
            self._states.compare(device)
            seed_torch(seed, device)
            yield
        finally:
            self._states.restore(device)
            with self._condition:
                self._running = 0
                self._condition.notify_all()


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(call, ...)` in place of a module that belongs to a replica."""
    replaced = vars(module).get("_compiled_call_impl")
    reference = weakref.ref(module)  # without a cycle, which would keep the replica until gc runs

    def call(*args: Any, **kwargs: Any) -> Any:
        inner = replaced
        if inner is None:
            called = reference()
            assert called is not None
            inner = called._call_impl
        return around(inner, *args, **kwargs)

    vars(module)["_compiled_call_impl"] = call
