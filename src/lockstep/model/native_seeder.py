"""Seeding the generators of a step in memory, with the bits of their own functions.

    own functions       random.seed 3 us, numpy.random.seed 1 us, their states 70 us per step
    in memory           all of them 1 us, their states 6 us per step

The generators of Python and numpy are Mersenne Twisters at a known address, which is checked before
it is used. `lockstep.kernel.seeds.PlainSeeder` is the same in Python.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.comm.activity import publish
from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.kernel.rng_scopes import BEFORE, RngScopes
from lockstep.kernel.seeds import PlainSeeder, Seeder, remember_numpy
from lockstep.model.call_interception import InterceptedCalls

__all__ = ["NativeSeeder", "make_rng_scopes", "make_seeder"]


def make_seeder(order: Sequence[int]) -> Seeder:
    """Return a seeder for these scopes, of the native module if there is one."""
    is_native = reason_unavailable() is None
    return NativeSeeder(order) if is_native else PlainSeeder()


def make_rng_scopes(
    modules: Sequence[nn.Module | None],
    model: nn.Module | None,
    seed: int,
    device: torch.device,
    before: Sequence[int] | None = None,
) -> RngScopes:
    """Return the RNG scopes of a model, which the native module seeds if there is one.

    The arguments are those of `RngScopes`.
    """
    called = [number for number, module in enumerate(modules) if module is not None]
    seeder = make_seeder([BEFORE, *called, len(modules)])
    return RngScopes(modules, model, seed, device, before, seeder, publish, InterceptedCalls)


class NativeSeeder:
    """Seeds torch's generator of the CPU, Python's and numpy's in memory.

    Args:
        order: The scopes of a micro-batch in the order in which they are expected, whose seeds the
            native module computes ahead.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._native = load_native().UnitSeeder(order)
        self.seed: Callable[[bytes, int, int], int] = self._native.seed

    def seed_others(self, seed: int) -> None:
        """Seed the generators of Python and numpy with the seed that `seed` has just returned."""
        if (memory := _find_random_memory()) is None:
            random.seed(seed)
        else:
            self._native.seed_python(memory.address)
            memory.generator.gauss_next = None
        is_seeded = False
        if (numpy_memory := _find_numpy_memory()) is not None:
            with numpy_memory.generator.lock:
                is_seeded = self._native.seed_numpy(numpy_memory.address)
        if not is_seeded:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def remember_others(self) -> Callable[[], None]:
        """Return a function that restores the present states of Python's and numpy's generators."""
        memory, numpy_memory = _find_random_memory(), _find_numpy_memory()
        restore_random: Callable[[], object]
        if memory is None:
            restore_random = partial(random.setstate, random.getstate())
        else:
            restore_random = memory.remember()
        restore_numpy = remember_numpy() if numpy_memory is None else numpy_memory.remember()

        def restore() -> None:
            restore_random()
            restore_numpy()

        return restore


MEMORY_BYTES = 624 * 4 + 4  # of a Mersenne Twister: its words, and the position in them


class _RandomMemory:
    """The memory of Python's global generator.

    Its own functions take 10 us each to get and set a state; copies of the memory take 0.3 us.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.address = id(generator) + object.__basicsize__  # after the header of the object

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        memory = ctypes.string_at(self.address, MEMORY_BYTES)
        second = self.generator.gauss_next

        def restore() -> None:
            ctypes.memmove(self.address, memory, MEMORY_BYTES)
            self.generator.gauss_next = second

        return restore


@functools.cache
def _find_random_memory() -> _RandomMemory | None:
    """Return the memory of Python's global generator; None if this Python keeps it elsewhere."""
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    if _random.Random.__basicsize__ < object.__basicsize__ + MEMORY_BYTES:
        return None
    known = _RandomMemory(generator)
    position, *words = struct.unpack("=i624I", ctypes.string_at(known.address, MEMORY_BYTES))
    return known if (*words, position) == generator.getstate()[1] else None


class _NumpyMemory:
    """The memory of numpy's global generator.

    Its own functions take 140 us to get and set a state; copies of the memory take 5 us.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.address = generator.ctypes.state_address
        self._restored = b""  # the last memory that was restored, which needs no second number

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        address, generator = self.address, self.generator
        memory = ctypes.string_at(address, MEMORY_BYTES)

        def restore() -> None:
            if numpy.random.get_bit_generator() is not generator:  # type: ignore[attr-defined]
                numpy.random.set_bit_generator(generator)  # type: ignore[attr-defined]
            numpy.random.seed(0)  # drops a cached second number
            with generator.lock:
                ctypes.memmove(address, memory, MEMORY_BYTES)
            self._restored = memory

        # Normal numbers are drawn in pairs, and the second one is cached outside of this memory. If
        # there is one, drawing it does not change the memory.
        if memory == self._restored:
            return restore
        second = numpy.random.standard_normal()
        if ctypes.string_at(address, MEMORY_BYTES) == memory:
            state: Any = numpy.random.get_state(legacy=False)
            state |= {"has_gauss": 1, "gauss": second}
            restore = partial(numpy.random.set_state, state)
        restore()
        return restore


def _find_numpy_memory() -> _NumpyMemory | None:
    """Return the memory of numpy's global generator; None if it is another generator."""
    generator: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not numpy.random.MT19937 or not _is_memory_known():
        return None
    return _make_numpy_memory(generator)


@functools.lru_cache(maxsize=1)
def _make_numpy_memory(generator: Any) -> _NumpyMemory:
    return _NumpyMemory(generator)


@functools.cache
def _is_memory_known() -> bool:
    """Return whether this numpy keeps the state of MT19937 as `_NumpyMemory` expects."""
    generator = numpy.random.MT19937(1)
    expected = generator.state["state"]
    memory = ctypes.string_at(generator.ctypes.state_address, MEMORY_BYTES)
    words = numpy.frombuffer(memory, numpy.uint32)
    return bool((words[:-1] == expected["key"]).all() and words[-1] == expected["pos"])
