"""Rule 3, RNG scopes: the parts of a model whose random numbers are seeded separately.

    random numbers of           seed of the generators
    before the model            key(seed, step, m, -1)
    scope s of the model        key(seed, step, m, s)         s = 0 ... S - 1
    the loss and what follows   key(seed, step, m, S)
    both, in call c > 0         key(seed, step, m, ..., c)    a scope called several times

torch's generators are seeded before each scope, Python's and numpy's once per micro-batch.

The scopes depend only on the model, so that a partition into stages changes no bit. They are its
blocks (`lockstep.model.blocks`), or the whole model if it has none. During a step their
calls are wrapped in functions that seed the generators, outside of compiled graphs.

Activation checkpointing calls a scope again during backward, after it has restored the state of
the generators. Such a call repeats an earlier call, and gets the number of that call.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.kernel.seeds import PlainSeeder, Seeder, torch_generators

__all__ = [
    "BEFORE",
    "NO_BACKWARD",
    "AroundCalls",
    "ModuleHooks",
    "RngScopes",
    "ScopeCalls",
    "WatchedModule",
    "find_scopes",
    "is_in_backward",
    "make_seed_hook",
]

BEFORE = -1
"""The scope number of the random numbers that a manual step draws before the model."""

NO_BACKWARD = -1
"""The number of the running backward pass while none runs."""


def find_scopes(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the scopes of a model in order, each module once: the blocks with these names."""
    return list(dict.fromkeys(model.get_submodule(name) for name in names)) or [model]


@dataclass(slots=True)
class ScopeCalls:
    """The calls of the scopes in a micro-batch so far."""

    prefix: bytes  # the parts of every key that come before the scope
    last: int  # the number of the last call of the first scope, so of the model
    states: dict[int, list[bytes]]  # for each scope, the generator's state at each call
    # Seeds a call of a scope, given both, in several micro-batches that are computed together.
    several: Callable[[int, int], object] | None = None


WatchedModule = tuple[nn.Module, Callable[[], None] | None, Callable[[], None] | None]
"""A module, and the functions to call before and after each of its calls."""


class AroundCalls(Protocol):
    """Calls the functions of some watched modules while they are installed."""

    def install(self) -> None:
        """Begin to call the functions."""

    def remove(self) -> None:
        """Stop calling them."""


class ModuleHooks:
    """Calls the functions of watched modules by torch's hooks; others may only be faster."""

    def __init__(self, watched: Sequence[WatchedModule]) -> None:
        self._watched = watched
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Begin to call the functions."""
        for module, before, after in self._watched:
            if before is not None:
                hook = partial(_call, before)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if after is not None:
                self._handles.append(module.register_forward_hook(partial(_call, after)))

    def remove(self) -> None:
        """Stop calling them."""
        while self._handles:
            self._handles.pop().remove()


def _call(function: Callable[[], None], *_: object) -> None:
    function()


def make_seed_hook(scopes: RngScopes, scope: int, before: int | None) -> Callable[[], None]:
    """Return the function that seeds a scope when it is called.

    Args:
        scopes: The scopes of the model.
        scope: The number of the scope.
        before: The number of its calls in earlier stages; None for the loss.
    """
    if before is None:
        return partial(RngScopes.begin_loss, scopes)

    def seed() -> None:
        if (now := scopes._now) is None:
            return
        states = now.states.setdefault(scope, [])
        call = before
        if states or torch._C._current_graph_task_id() != NO_BACKWARD:
            call += scopes._call_number(states)
        else:  # the first call needs no state: a repetition that matches none repeats it
            states.append(b"")
        scopes._seed(now, scope, call)
        if scope == 0:
            now.last = call

    return seed


class RngScopes:
    """The RNG scopes of one model, which are seeded for the current micro-batch.

    Args:
        modules: All scopes of the model, in order; None for a scope on another rank.
        model: The module that is called last before the loss; None for a pipeline stage.
        seed: The seed of all random numbers.
        device: The device whose generators are seeded.
        before: The number of calls of each scope in earlier stages.
        seeder: Seeds the generators that the CPU has; None for a `PlainSeeder`.
        announce: A function that is called with the step and the micro-batch that begins.
        watch: A function that returns what calls the functions of watched modules.
        make_hook: A function that returns what seeds a scope; `make_seed_hook` or a faster one.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        model: nn.Module | None,
        seed: int,
        device: torch.device,
        before: Sequence[int] | None = None,
        seeder: Seeder | None = None,
        announce: Callable[[int, int], object] = lambda step, microbatch: None,
        watch: Callable[[Sequence[WatchedModule]], AroundCalls] = ModuleHooks,
        make_hook: Callable[[Any, int, int | None], Callable[[], None]] = make_seed_hook,
    ) -> None:
        self.modules = list(modules)
        # The first parts of a key, as `pack_key` returns them.
        self._pack_prefix = partial(struct.pack, "<3q", seed)
        self._announce = announce
        self._generators = [*torch_generators(device).values()]
        self._accelerators = self._generators[1:]
        self._seeder = seeder or PlainSeeder()
        self._seed_call = self._seed_all if self._accelerators else self._seeder.seed
        self._now: ScopeCalls | None = None
        own = weakref.proxy(self)  # a cycle would keep the modules until garbage is collected
        watched: list[WatchedModule] = [
            (module, make_hook(own, number, before[number] if before else 0), None)
            for number, module in enumerate(self.modules)
            if module is not None
        ]
        if model is not None:
            watched.append((model, None, make_hook(own, len(self.modules), None)))
        self._around_calls = watch(watched)

    @contextmanager
    def seed_calls(self) -> Iterator[None]:
        """Seed every call of a scope in the body; restore the generators afterwards."""
        restore = self.remember()
        self._around_calls.install()
        try:
            yield
        finally:
            self._now = None
            self._around_calls.remove()
            restore()

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present states of the generators."""
        states = [generator.get_state() for generator in self._generators]
        restore_others = self._seeder.remember_others()

        def restore() -> None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            restore_others()

        return restore

    def read_states(self) -> object:
        """Return the present states of the generators, to find out whether something has drawn."""
        states = [generator.get_state().numpy().tobytes() for generator in self._generators]
        return states, self._seeder.read_others()

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Seed every call of a scope in the body."""
        self._around_calls.install()
        try:
            yield
        finally:
            self._now = None
            self._around_calls.remove()

    @property
    def last_call(self) -> int:
        """The number of the last call of the first scope in the current micro-batch."""
        return 0 if self._now is None else self._now.last

    def begin_microbatch(self, step: int, microbatch: int, last_call: int = 0) -> None:
        """Start a micro-batch: seed all generators.

        Args:
            step: The number of the step.
            microbatch: The number of the micro-batch.
            last_call: The number of the last call of the first scope in earlier stages.
        """
        prefix = self._pack_prefix(step, microbatch)
        self._now = ScopeCalls(prefix, last_call, {})
        self._announce(step, microbatch)
        seed = self._seeder.begin(prefix, BEFORE)
        for generator in self._accelerators:
            generator.manual_seed(seed)

    def begin_microbatches(
        self,
        step: int,
        microbatches: Sequence[int],
        seed: Callable[[list[bytes], int, int], object],
        last_call: int = 0,
    ) -> None:
        """Start several micro-batches that are computed together.

        The generators of Python and numpy are those of the first one.

        Args:
            step: The number of the step.
            microbatches: The numbers of the micro-batches.
            seed: A function that seeds a generator for each of them, with the first parts of their
                keys, a scope and the number of its call.
            last_call: The number of the last call of the first scope in earlier stages.
        """
        self.begin_microbatch(step, microbatches[0], last_call)
        prefixes = [self._pack_prefix(step, number) for number in microbatches]
        seed(prefixes, BEFORE, 0)
        assert self._now is not None
        self._now.several = partial(seed, prefixes)

    def begin_loss(self, last_call: int | None = None) -> None:
        """Seed the generators for the loss, after the given call of the first scope.

        Each call of the model gets its own seed here. Otherwise every call of a scope could begin
        with the same generator state, by which a recomputation finds the call that it repeats.
        """
        if (now := self._now) is not None:
            call = now.last if last_call is None else last_call
            self._seed(now, len(self.modules), call)

    def pause(self) -> ScopeCalls | None:
        """Return the calls of the current micro-batch so far, so that another one can start."""
        calls = self._now
        self._now = None
        return calls

    def resume(self, calls: ScopeCalls | None) -> None:
        """Continue a micro-batch that was paused."""
        self._now = calls

    def _seed(self, now: ScopeCalls, scope: int, call: int) -> None:
        """Seed a call of a scope, or of what follows them."""
        if now.several is None:
            self._seed_call(now.prefix, scope, call)
        else:
            now.several(scope, call)

    def _seed_all(self, prefix: bytes, scope: int, call: int, /) -> int:
        """Seed the generators of the CPU and of the accelerator, and return the seed."""
        seed = self._seeder.seed(prefix, scope, call)
        for generator in self._accelerators:
            generator.manual_seed(seed)
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


def is_in_backward() -> bool:
    """Return whether autograd is running, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != NO_BACKWARD
