"""Units: the pieces of a model whose random numbers are keyed one by one.

    what draws                  generator state before it
    before the model            key(seed, step, m, -1)
    unit u of the model         key(seed, step, m, u)         u = 0 ... U - 1
    the loss and what follows   key(seed, step, m, U)
    either one, call c > 0      key(seed, step, m, ..., c)      a model called several times

torch's generators are seeded before each unit, Python's and numpy's once a
micro-batch.

The units are fixed by the model, so that a cut into stages changes no bit: its
blocks (`lockstep.pipeline.partition`), and otherwise the model as a whole. The
generators are seeded by hooks that exist only while a step is computed; a
compiled model is seeded outside its graph.

Activation checkpointing calls a unit again during backward, after it has put
the generator back to where it stood. Such a call is the repetition of one of
the calls before and is given that call's number, not a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.randomness import isolated, key, seed_all, seed_torch

__all__ = ["BEFORE", "Calls", "Units", "in_backward", "units_of"]

BEFORE = -1
"""The unit number of what a loop of one's own draws before it calls the model."""


def units_of(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the model's units in order, each module once: its blocks of these names."""
    return list(dict.fromkeys(model.get_submodule(name) for name in names)) or [model]


@dataclass
class Calls:
    """A micro-batch's calls of the units so far, where the next ones are numbered from."""

    place: tuple[int, int]  # step, micro-batch
    states: list[list[bytes]]  # of each unit, the generator's state at each call
    last: int = 0  # of the first unit, so of the model


class Units:
    """The units of one model, seeded for the micro-batch that is being computed.

    Parameters:
        modules: all units of the model, in order; None for one that is not here.
        model: what is called last before the loss; None where only a stage is here.
        before: how often each unit was called in the stages before this one.
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
        self._before_here = list(before or [0] * len(self.modules))
        self._now: Calls | None = None

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Seed every unit while the body runs; give the generators back afterwards."""
        with self.hooked(), isolated(self._device, everything=True):
            yield

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Seed every unit while the body runs."""
        with ExitStack() as stack:
            for number, unit in enumerate(self.modules):
                if unit is not None:
                    stack.enter_context(_surrounded(unit, before=self._before(number)))
            if self._model is not None:
                stack.enter_context(_surrounded(self._model, after=self.end))
            try:
                yield
            finally:
                self._now = None

    @property
    def last_call(self) -> int:
        """Number of the last call of the first unit in the micro-batch that is computed."""
        return 0 if self._now is None else self._now.last

    def begin(self, step: int, microbatch: int, last_call: int = 0) -> None:
        """Say which micro-batch is computed from now on.

        Args:
            step: Its step.
            microbatch: Its number.
            last_call: Number of the last call of the first unit in the stages before.
        """
        self._now = Calls((step, microbatch), [[] for _ in self.modules], last_call)
        seed_all(key(self._seed, step, microbatch, BEFORE))
        self._seed_unit(BEFORE)

    def end(self, last_call: int | None = None) -> None:
        """Say that the loss comes now, after that call of the first unit."""
        if self._now is not None:
            self._seed_unit(len(self.modules), self._now.last if last_call is None else last_call)

    def pause(self) -> Calls | None:
        """Return what the micro-batch has called so far; another one may begin."""
        calls, self._now = self._now, None
        return calls

    def resume(self, calls: Calls | None) -> None:
        """Go on with a micro-batch that was paused."""
        self._now = calls

    def _seed_unit(self, unit: int, call: int = 0) -> None:
        assert self._now is not None
        parts = (self._seed, *self._now.place, unit, call)
        seed_torch(key(*(parts if call else parts[:-1])), self._device)

    def _before(self, unit: int) -> Callable[[], None]:
        def seed() -> None:
            if self._now is not None:
                call = self._call_number(self._now.states[unit]) + self._before_here[unit]
                self._seed_unit(unit, call)
                if unit == 0:
                    self._now.last = call

        return seed

    def _call_number(self, calls: list[bytes]) -> int:
        """Count the calls of a unit, and recognise the repetition of one by its entry state."""
        if not in_backward():
            # The first call needs no state: it is what a repetition is when nothing else fits.
            calls.append(torch.default_generator.get_state().numpy().tobytes() if calls else b"")
            return len(calls) - 1
        if len(calls) < 2:
            return 0
        entry = torch.default_generator.get_state().numpy().tobytes()
        return calls.index(entry) if entry in calls else 0


@contextmanager
def _surrounded(
    module: nn.Module,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call `before` and `after` around every call of `module` while the body runs."""
    slot: Any = module
    if (compiled := slot._compiled_call_impl) is None:
        handles = []
        if before is not None:
            handles.append(module.register_forward_pre_hook(lambda *_: before(), prepend=True))
        if after is not None:
            handles.append(module.register_forward_hook(lambda *_: after()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = compiled(*args, **kwargs)
        if after is not None:
            after()
        return output

    # Compiled in place, by module.compile(): hooks would become a part of its graph, which
    # would be compiled again for every seed.
    slot._compiled_call_impl = call
    try:
        yield
    finally:
        slot._compiled_call_impl = compiled


def in_backward() -> bool:
    """Tell whether autograd is running: what is called then is a recomputation."""
    return torch._C._current_graph_task_id() != -1
