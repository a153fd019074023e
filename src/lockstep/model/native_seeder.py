"""Seeding the generators of a step in memory, with the bits of their own functions.

    own functions       random.seed 3 us, numpy.random.seed 1 us, their states 70 us per step
    in memory           all of them 1 us, their states 2 us per step

The generators of Python and numpy are Mersenne Twisters at a known address, which is checked before
it is used, as is that of the second normal number that numpy keeps.
`lockstep.kernel.seeds.PlainSeeder` is the same in Python.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.comm.activity import publish_microbatch
from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.kernel.rng_scopes import BEFORE, RngScopes, make_seed_hook
from lockstep.kernel.seeds import (
    PlainSeeder,
    Seeder,
    read_others,
    remember_others,
    seed_others,
    torch_generators,
)
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
    make_hook = make_seed_hook
    if isinstance(seeder, NativeSeeder) and len(torch_generators(device)) == 1:
        make_hook = seeder.make_hook
    announce = publish_microbatch if reason_unavailable() else load_native().publish_microbatch
    return RngScopes(
        modules,
        model,
        seed,
        device,
        before,
        seeder=seeder,
        announce=announce,
        watch=InterceptedCalls,
        make_hook=make_hook,
    )


class NativeSeeder:
    """Seeds torch's generator of the CPU, Python's and numpy's in memory.

    Args:
        order: The scopes of a micro-batch in the order in which they are expected, whose seeds the
            native module computes ahead.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._native = load_native().ScopeSeeder(order, _get_numpy_generator, _seed_others)
        self.seed: Callable[[bytes, int, int], int] = self._native.seed
        self.begin: Callable[[bytes, int], int] = self._native.begin

    def make_hook(self, scopes: RngScopes, scope: int, before: int | None) -> Callable[[], None]:
        """Return what `make_seed_hook` returns, without a frame of Python in the usual case."""
        make = load_native().make_scope_hook
        again = make_seed_hook(scopes, scope, before)
        hook: Callable[[], None] = make(self._native, scopes, again, scope, before)
        return hook

    def read_others(self) -> object:
        """Return the states of Python's and numpy's generators, for comparison."""
        return self._native.read_others() or read_others()

    def remember_others(self) -> Callable[[], None]:
        """Return a function that restores the present states of Python's and numpy's generators."""
        native = self._native
        generator = _get_numpy_generator()
        saved = native.read_others() or (_find_memory(native) and native.read_others())
        if not saved:
            return remember_others()

        def restore() -> None:
            if _get_numpy_generator() is not generator:
                numpy.random.set_bit_generator(generator)  # type: ignore[attr-defined]
                _find_memory(native)
            native.write_others(saved)

        return restore


def _seed_others(native: Any, seed: int) -> None:
    """Seed the generators of numpy and Python, whose memory `native` does not know yet."""
    seed_others(seed)
    _find_memory(native)


def _find_memory(native: Any) -> bool:
    """Tell a native seeder where the generators are; return whether this is known."""
    generator = _get_numpy_generator()
    own_address = _find_python_memory()
    address = _find_numpy_memory(generator)
    offset = _find_second_number() if own_address and address else 0
    if offset:
        second_address = id(numpy.random.mtrand._rand) + offset
        native.know_others(random._inst, own_address, generator, address, second_address)
    return bool(offset)


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
def _find_second_number() -> int:
    """Return the offset in a `RandomState` of the second normal number; 0 if it is unknown.

    Normal numbers are drawn in pairs, and numpy keeps the second one outside of the generator:
    whether there is one, as an int, and the number.
    """
    generator = numpy.random.RandomState(1)
    generator.standard_normal()
    memory = ctypes.string_at(id(generator), type(generator).__basicsize__)
    expected: Any = generator.get_state(legacy=False)
    offset = memory.find(struct.pack("=qd", 1, expected["gauss"]))  # an int and its padding
    if offset < 0 or type(numpy.random.mtrand._rand) is not numpy.random.RandomState:
        return 0
    ctypes.memset(id(generator) + offset, 0, struct.calcsize("=qd"))
    now: Any = generator.get_state(legacy=False)
    return 0 if now["has_gauss"] or now["gauss"] else offset


@functools.cache
def _is_memory_known() -> bool:
    """Return whether this numpy keeps the state of MT19937 as words and a position."""
    generator = numpy.random.MT19937(1)
    expected = generator.state["state"]
    memory = ctypes.string_at(generator.ctypes.state_address, MEMORY_BYTES)
    words = numpy.frombuffer(memory, numpy.uint32)
    return bool((words[:-1] == expected["key"]).all() and words[-1] == expected["pos"])
