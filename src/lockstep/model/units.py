"""Units: the parts of a model whose random numbers are seeded separately.

    random numbers of           seed of the generators
    before the model            key(seed, step, m, -1)
    unit u of the model         key(seed, step, m, u)         u = 0 ... U - 1
    the loss and what follows   key(seed, step, m, U)
    both, in call c > 0         key(seed, step, m, ..., c)      a unit called several times

torch's generators are seeded before each unit, Python's and numpy's once per micro-batch.

The units depend only on the model, so that a partition into stages changes no bit. They are its
blocks (`lockstep.model.blocks`), or the whole model if it has none. During a step their
calls are wrapped in functions that seed the generators, outside of compiled graphs.

Activation checkpointing calls a unit again during backward, after it has restored the state of
the generators. Such a call repeats an earlier call, and gets the number of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm import native_module
from lockstep.comm.activity import publish
from lockstep.devices import default_generator, is_accelerator
from lockstep.model.compilation import mark_as_plain
from lockstep.randomness import (
    TwisterSeeder,
    pack_key,
    remembered,
    seed_generator,
    seed_others,
)

__all__ = ["BEFORE", "UnitCalls", "Units", "find_units", "is_in_backward"]

BEFORE = -1
"""The unit number of the random numbers that a manual step draws before the model."""


def find_units(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the units of a model in order, each module once: the blocks with these names."""
    return list(dict.fromkeys(model.get_submodule(name) for name in names)) or [model]


@dataclass
class UnitCalls:
    """The calls of the units in a micro-batch so far."""

    key: bytes  # the parts of every key that come before the unit
    states: list[list[bytes]]  # for each unit, the generator's state at each call
    last: int = 0  # the number of the last call of the first unit, so of the model


class Units:
    """The units of one model, which are seeded for the current micro-batch.

    Args:
        modules: All units of the model, in order; None for a unit on another rank.
        model: The module that is called last before the loss; None for a pipeline stage.
        seed: The seed of all random numbers.
        device: The device whose generators are seeded.
        before: The number of calls of each unit in earlier stages.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        model: nn.Module | None,
        seed: int,
        device: torch.device,
        before: Sequence[int] | None = None,
    ) -> None:
        self.modules = list(modules)
        self._model, self._seed, self._device = model, seed, device
        self._accelerator = default_generator(device) if is_accelerator(device) else None
        self._seed_cpu: Callable[[bytes, int, int], int] = seed_generator
        self._seeder: TwisterSeeder | None = None
        if native_module.reason_unavailable() is None:
            called = [number for number, unit in enumerate(self.modules) if unit is not None]
            order = [BEFORE, *called, len(self.modules)]
            native = native_module.load()
            self._seeder = seeder = native.UnitSeeder(order)
            self._seed_cpu = seeder.seed
        self._before_here = list(before or [0] * len(self.modules))
        self._now: UnitCalls | None = None

    @contextmanager
    def seed_calls(self) -> Iterator[None]:
        """Seed every call of a unit in the body; restore the generators afterwards."""
        restore = remembered(self._device, everything=True)
        remove = self._install_hooks()
        try:
            yield
        finally:
            remove()
            restore()

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Seed every call of a unit in the body."""
        remove = self._install_hooks()
        try:
            yield
        finally:
            remove()

    def _install_hooks(self) -> Callable[[], None]:
        """Seed every call of a unit, until the result is called."""
        removals = [
            _call_around(unit, before=self._make_seed_hook(number))
            for number, unit in enumerate(self.modules)
            if unit is not None
        ]
        if self._model is not None:
            removals.append(_call_around(self._model, after=self.begin_loss))

        def remove() -> None:
            self._now = None
            for each in reversed(removals):
                each()

        return remove

    @property
    def last_call(self) -> int:
        """The number of the last call of the first unit in the current micro-batch."""
        return 0 if self._now is None else self._now.last

    def begin_microbatch(self, step: int, microbatch: int, last_call: int = 0) -> None:
        """Start a micro-batch: seed all generators.

        Args:
            step: The number of the step.
            microbatch: The number of the micro-batch.
            last_call: The number of the last call of the first unit in earlier stages.
        """
        about = f"step {step}" if step >= 0 else f"evaluation {-1 - step}"
        publish(f"micro-batch {microbatch} of {about}")
        key = pack_key(self._seed, step, microbatch)
        self._now = UnitCalls(key, [[] for _ in self.modules], last_call)
        seed_others(self._seed_unit(BEFORE), self._seeder)

    def begin_loss(self, last_call: int | None = None) -> None:
        """Seed the generators for the loss, after the given call of the first unit.

        Each call of the model gets its own seed here. Otherwise every call of a unit could begin
        with the same generator state, by which a recomputation finds the call that it repeats.
        """
        if self._now is not None:
            self._seed_unit(len(self.modules), self._now.last if last_call is None else last_call)

    def pause(self) -> UnitCalls | None:
        """Return the calls of the current micro-batch so far, so that another one can start."""
        calls, self._now = self._now, None
        return calls

    def resume(self, calls: UnitCalls | None) -> None:
        """Continue a micro-batch that was paused."""
        self._now = calls

    def _seed_unit(self, unit: int, call: int = 0) -> int:
        """Seed torch's generators for a call of a unit, and return the seed."""
        assert self._now is not None
        seed = self._seed_cpu(self._now.key, unit, call)
        if self._accelerator is not None:
            self._accelerator.manual_seed(seed)
        return seed

    def _make_seed_hook(self, unit: int) -> Callable[[], None]:
        before = self._before_here[unit]

        def seed() -> None:
            now = self._now
            if now is None:
                return
            states, call = now.states[unit], before
            if states or is_in_backward():
                call += self._call_number(states)
            else:  # the first call needs no state: a repetition that matches none repeats it
                states.append(b"")
            self._seed_unit(unit, call)
            if unit == 0:
                now.last = call

        return seed

    def _call_number(self, calls: list[bytes]) -> int:
        """Return the number of this call; a repeated call is recognized by its generator state."""
        if not is_in_backward():
            calls.append(torch.default_generator.get_state().numpy().tobytes())
            return len(calls) - 1
        if len(calls) < 2:
            return 0
        entry = torch.default_generator.get_state().numpy().tobytes()
        return calls.index(entry) if entry in calls else 0


def _call_around(
    module: nn.Module,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Call `before` and `after` around every call of `module`, until the result is called."""
    if "dynamo_ctx" in vars(module):  # torch.compile(module) forwards attributes to its module
        handles = []
        if before is not None:
            handles.append(module.register_forward_pre_hook(lambda *_: before(), prepend=True))
        if after is not None:
            handles.append(module.register_forward_hook(lambda *_: after()))

        def remove_hooks() -> None:
            for handle in handles:
                handle.remove()

        return remove_hooks

    # Without hooks: torch calls modules with hooks on a slower path, and would recompile the hooks
    # of a module that was compiled in place for every seed.
    attributes = vars(module)
    replaced = attributes.get("_compiled_call_impl")
    inner = module._call_impl if replaced is None else replaced

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = inner(*args, **kwargs)
        if after is not None:
            after()
        return output

    def remove_call() -> None:
        if replaced is None:
            del attributes["_compiled_call_impl"]
        else:
            attributes["_compiled_call_impl"] = replaced

    mark_as_plain(call, replaced)
    attributes["_compiled_call_impl"] = call
    return remove_call


def is_in_backward() -> bool:
    """Return whether autograd is running, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1
