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
from typing import Any, cast

import numpy
import torch
from torch import nn

from lockstep.comm.activity import publish
from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.kernel.rng_scopes import BEFORE, RngScopes
from lockstep.kernel.seeds import PlainSeeder, Seeder, remember_others
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
        self._restored = b""  # numpy's memory that was restored last, without a second number

    def seed_others(self, seed: int) -> None:
        """Seed the generators of Python and numpy with the seed that `seed` has just returned."""
        if address := _find_python_memory():
            self._native.seed_python(address)
            random._inst.gauss_next = None  # type: ignore[attr-defined]
        else:
            random.seed(seed)
        generator, is_seeded = _get_numpy_generator(), False
        if address := _find_numpy_memory(generator):
            with generator.lock:
                is_seeded = self._native.seed_numpy(address)
        if not is_seeded:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def remember_others(self) -> Callable[[], None]:
        """Return a function that restores the present states of Python's and numpy's generators."""
        own, generator = getattr(random, "_inst", None), _get_numpy_generator()
        own_address, address = _find_python_memory(), _find_numpy_memory(generator)
        if own is None or not own_address or not address:
            return remember_others()
        own_memory, own_second = ctypes.string_at(own_address, MEMORY_BYTES), own.gauss_next
        memory, state = ctypes.string_at(address, MEMORY_BYTES), cast(Any, None)

        def restore() -> None:
            ctypes.memmove(own_address, own_memory, MEMORY_BYTES)
            own.gauss_next = own_second
            if _get_numpy_generator() is not generator:
                numpy.random.set_bit_generator(generator)  # type: ignore[attr-defined]
            with generator.lock:
                is_untouched = self._native.seed_numpy(address)
            if not is_untouched:
                numpy.random.seed(0)  # drops a cached second number
            with generator.lock:
                ctypes.memmove(address, memory, MEMORY_BYTES)
            if state is None:
                self._restored = memory
            else:
                numpy.random.set_state(state)

        # Normal numbers are drawn in pairs, and numpy caches the second one outside of this memory.
        # If there is one, drawing it does not change the memory.
        if memory != self._restored:
            second = numpy.random.standard_normal()
            if ctypes.string_at(address, MEMORY_BYTES) == memory:
                now: Any = numpy.random.get_state(legacy=False)
                state = now | {"has_gauss": 1, "gauss": second}
            restore()
        return restore


MEMORY_BYTES = 624 * 4 + 4  # of a Mersenne Twister: its words, and the position in them

_get_numpy_generator: Callable[[], Any] = numpy.random.get_bit_generator  # type: ignore[attr-defined]


@functools.cache
def _find_python_memory() -> int:
    """Return the address of Python's global generator; 0 if this Python keeps it elsewhere.

    Its own functions take 10 us each to get and set a state; copies of the memory take 0.3 us.
    """
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return 0
    if _random.Random.__basicsize__ < object.__basicsize__ + MEMORY_BYTES:
        return 0
    address = id(generator) + object.__basicsize__  # after the header of the object
    position, *words = struct.unpack("=i624I", ctypes.string_at(address, MEMORY_BYTES))
    return address if (*words, position) == generator.getstate()[1] else 0


@functools.lru_cache(maxsize=1)
def _find_numpy_memory(generator: Any) -> int:
    """Return the address of a generator of numpy; 0 if it is of another kind.

    Its own functions take 140 us to get and set a state; copies of the memory take 5 us.
    """
    is_known = type(generator) is numpy.random.MT19937 and _is_memory_known()
    return int(generator.ctypes.state_address) if is_known else 0


@functools.cache
def _is_memory_known() -> bool:
    """Return whether this numpy keeps the state of MT19937 as words and a position."""
    generator = numpy.random.MT19937(1)
    expected = generator.state["state"]
    memory = ctypes.string_at(generator.ctypes.state_address, MEMORY_BYTES)
    words = numpy.frombuffer(memory, numpy.uint32)
    return bool((words[:-1] == expected["key"]).all() and words[-1] == expected["pos"])
