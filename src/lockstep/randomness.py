"""Random numbers that depend on the computation, never on the rank that performs it.

A *key* identifies a piece of work by integers: (seed, step, micro-batch, unit)
in training, (seed, epoch, sample) in loading. Its 64-bit seed is

    key(a, b, ...) = BLAKE2b of a, b, ... as int64 LE, with 8 bytes, read as an integer LE

so that the seeds of neighbouring keys are unrelated. Seeding a generator object takes about
1 us; `torch.manual_seed` visits every device and takes 100 us.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, cast

import numpy
import torch

from lockstep.devices import default_generator, is_accelerator

__all__ = [
    "TwisterSeeder",
    "global_states",
    "isolated",
    "key",
    "key_prefix",
    "pack_key",
    "remembered",
    "seed_all",
    "seed_generator",
    "seed_others",
    "seed_torch",
    "set_global_states",
    "set_state_of_torch",
    "state_of_others",
    "state_of_torch",
]


class TwisterSeeder(Protocol):
    """Seeds generators in memory with the seed of torch's generator; part of `UnitSeeder`."""

    def seed_python(self, address: int, /) -> None:
        """Seed the generator of Python as `random.seed` does."""

    def seed_numpy(self, address: int, /) -> bool:
        """Seed the generator of numpy as `numpy.random.seed` does.

        Returns:
            False, without any effect, if numbers were drawn since the function was last called.
        """


def key(*parts: int) -> int:
    """Return the 64-bit seed of the work that `parts` identify (integers in the int64 range)."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def key_prefix(*parts: int) -> Callable[..., int]:
    """Return `key` with its first parts fixed, which is then twice as fast.

    `key_prefix(a, b)(c, d) == key(a, b, c, d)`.
    """
    prefix = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8)

    def extend(*more: int) -> int:
        hashed = prefix.copy()
        hashed.update(_pack(*more))
        return int.from_bytes(hashed.digest(), "little")

    return extend


@functools.lru_cache(1 << 12)
def _pack(*parts: int) -> bytes:
    return struct.pack(f"<{len(parts)}q", *parts)


def pack_key(*parts: int) -> bytes:
    """Return the first parts of a key, for `seed_generator`."""
    return struct.pack(f"<{len(parts)}q", *parts)


def seed_generator(prefix: bytes, unit: int, call: int = 0) -> int:
    """Seed torch's default generator of the CPU with the key of a unit's call; return the seed.

    `UnitSeeder` of the native module has the same function, which takes a tenth of the time.

    Args:
        prefix: The first parts of the key, as `pack_key` returns them.
        unit: The next part.
        call: The last part; 0 for none.
    """
    last = _pack(unit, call) if call else _pack(unit)
    digest = hashlib.blake2b(prefix + last, digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(seed)
    return seed


def seed_others(seed: int, seeder: TwisterSeeder | None = None) -> None:
    """Seed `random` and numpy's global generator, as `seed_all` does.

    Args:
        seed: The seed.
        seeder: The part of the native module that seeds generators in memory with `seed`; None to
            call their own functions, which take four times as long.
    """
    if seeder is None or (memory := _find_random_memory()) is None:
        random.seed(seed)
    else:
        memory.seed(seeder)
    if seeder is None or (numpy_memory := _find_numpy_memory()) is None:
        numpy.random.seed(seed & 0xFFFF_FFFF)
    else:
        numpy_memory.seed(seeder, seed)


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's default generator of the CPU, and of `device` if it is an accelerator.

    The CPU's Mersenne Twister takes the low 32 bits of `seed`.
    """
    torch.default_generator.manual_seed(seed)  # called per unit and micro-batch: no list for it
    if device is not None and is_accelerator(device):
        default_generator(device).manual_seed(seed)


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's generators, as `seed_torch` does, `random`, and numpy's global generator."""
    seed_torch(seed, device)
    seed_others(seed)


def state_of_torch(device: torch.device | None = None) -> bytes:
    """Return the states of the generators that `seed_torch` seeds."""
    return b"".join(each.get_state().numpy().tobytes() for each in _generators(device).values())


def set_state_of_torch(state: bytes, device: torch.device | None = None) -> None:
    """Restore the states of torch's generators that `state_of_torch` returned."""
    rest = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    for generator in _generators(device).values():
        size = generator.get_state().numel()
        generator.set_state(rest[:size].clone())
        rest = rest[size:]


def _generators(device: torch.device | None) -> dict[str, torch.Generator]:
    """Return torch's generators by the names of their states."""
    found = {"torch": torch.default_generator}
    if device is not None and is_accelerator(device):
        found[device.type] = default_generator(device)
    return found


def global_states(device: torch.device | None = None, *, everything: bool = True) -> dict[str, Any]:
    """Return the states of the global generators by name, as tensors, tuples and arrays.

    These are torch's generators, on the CPU and on `device` if it is an accelerator, whose type is
    the name of its state; with `everything` also those of `random` and numpy.
    """
    states: dict[str, Any] = {
        name: generator.get_state() for name, generator in _generators(device).items()
    }
    if everything:
        states |= {"random": random.getstate(), "numpy": numpy.random.get_state()}
    return states


def set_global_states(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states of global generators that `global_states` returned."""
    for name, generator in _generators(device).items():
        if name in states:
            generator.set_state(states[name])
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        numpy.random.set_state(states["numpy"])


def state_of_others() -> tuple[object, ...]:
    """Return the states of Python's and numpy's global generators, for comparison."""
    _, numbers, position, *_ = cast("tuple[Any, ...]", numpy.random.get_state())
    return random.getstate(), bytes(numbers), position


def remembered(
    device: torch.device | None = None, *, everything: bool = False
) -> Callable[[], None]:
    """Return a function that restores the generators' present states, each time it is called.

    `device` and `everything` select the generators as in `global_states`.
    """
    states = global_states(device, everything=False)
    if not everything:
        return partial(set_global_states, states, device)
    restore_random, restore_numpy = _remember_random(), _remember_numpy()

    def restore() -> None:
        set_global_states(states, device)
        restore_random()
        restore_numpy()

    return restore


MEMORY_BYTES = 624 * 4 + 4  # of a Mersenne Twister: its words, and the position in them


class _RandomMemory:
    """The memory of Python's global generator.

    Its own functions take 10 us each to get and set a state; copies of the memory take 0.3 us.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._address = id(generator) + object.__basicsize__  # after the header of the object

    def read(self) -> bytes:
        """Return a copy: the position in the words, and the words."""
        return ctypes.string_at(self._address, MEMORY_BYTES)

    def seed(self, seeder: TwisterSeeder) -> None:
        """Seed the generator, as `random.seed` does."""
        seeder.seed_python(self._address)
        self._generator.gauss_next = None

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        memory, second = self.read(), self._generator.gauss_next

        def restore() -> None:
            ctypes.memmove(self._address, memory, MEMORY_BYTES)
            self._generator.gauss_next = second

        return restore


@functools.cache
def _find_random_memory() -> _RandomMemory | None:
    """Return the memory of Python's global generator; None if this Python keeps it elsewhere."""
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    if _random.Random.__basicsize__ < object.__basicsize__ + MEMORY_BYTES:
        return None
    found = _RandomMemory(generator)
    position, *words = struct.unpack("=i624I", found.read())
    return found if (*words, position) == generator.getstate()[1] else None


def _remember_random() -> Callable[[], None]:
    """Return a function that restores the present state of Python's global generator."""
    memory = _find_random_memory()
    return partial(random.setstate, random.getstate()) if memory is None else memory.remember()


class _NumpyMemory:
    """The memory of numpy's global generator.

    Its own functions take 140 us to get and set a state; copies of the memory take 5 us.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._address = generator.ctypes.state_address
        self._restored = b""  # the last memory that was restored, which needs no second number

    def seed(self, seeder: TwisterSeeder, seed: int) -> None:
        """Seed the generator, as `numpy.random.seed` does."""
        with self._generator.lock:
            is_seeded = seeder.seed_numpy(self._address)
        if not is_seeded:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        address, generator = self._address, self._generator
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


def _remember_numpy() -> Callable[[], None]:
    """Return a function that restores the present state of numpy's global generator."""
    if (memory := _find_numpy_memory()) is not None:
        return memory.remember()
    return partial(numpy.random.set_state, numpy.random.get_state(legacy=False))


@functools.cache
def _is_memory_known() -> bool:
    """Return whether this numpy keeps the state of MT19937 as `_NumpyMemory` expects."""
    generator = numpy.random.MT19937(1)
    expected = generator.state["state"]
    memory = ctypes.string_at(generator.ctypes.state_address, MEMORY_BYTES)
    found = numpy.frombuffer(memory, numpy.uint32)
    return bool((found[:-1] == expected["key"]).all() and found[-1] == expected["pos"])


@contextlib.contextmanager
def isolated(device: torch.device | None = None, *, everything: bool = False) -> Iterator[None]:
    """Restore the generators' states after the body.

    Without this, the numbers that the user's code draws between two steps would depend on
    which micro-batch this rank computed last. `device` and `everything` select the generators
    as in `remembered`.
    """
    restore = remembered(device, everything=everything)
    try:
        yield
    finally:
        restore()
