"""Rule 3, seeds: random numbers depend on what is computed, never on the rank that computes it.

A *key* identifies a piece of work by integers: (seed, step, micro-batch, scope) in training,
(seed, epoch, sample) in loading. Its 64-bit seed is

    key(a, b, ...) = BLAKE2b of a, b, ... as int64 LE, with 8 bytes, read as an integer LE

so that the seeds of neighbouring keys are unrelated. Seeding a generator object takes about
1 us; `torch.manual_seed` visits every device and takes 100 us.

The generators are those of torch, on the CPU and on the accelerator, and the *others*: Python's,
and numpy's global one if the process has loaded numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

__all__ = [
    "PlainSeeder",
    "Seeder",
    "default_generator",
    "find_seed",
    "isolated",
    "key",
    "pack_key",
    "remember_numpy",
    "remember_others",
    "remembered",
    "seed_all",
    "seed_others",
    "seed_torch",
    "torch_generators",
]


def key(*parts: int) -> int:
    """Return the 64-bit seed of the work that `parts` identify (integers in the int64 range)."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def pack_key(*parts: int) -> bytes:
    """Return the first parts of a key, for a `Seeder`."""
    return struct.pack(f"<{len(parts)}q", *parts)


def find_seed(prefix: bytes, scope: int, call: int) -> int:
    """Return the seed of a call of a scope.

    Args:
        prefix: The first parts of the key, as `pack_key` returns them.
        scope: The next part.
        call: The last part; 0 for none.
    """
    last = pack_key(scope, call) if call else pack_key(scope)
    return int.from_bytes(hashlib.blake2b(prefix + last, digest_size=8).digest(), "little")


class Seeder(Protocol):
    """Seeds and restores the generators that the CPU has, many times per step."""

    def seed(self, prefix: bytes, scope: int, call: int, /) -> int:
        """Seed torch's default generator with the key of a call; return the seed.

        Args:
            prefix: The first parts of the key, as `pack_key` returns them.
            scope: The next part.
            call: The last part; 0 for none.
        """

    def begin(self, prefix: bytes, scope: int, /) -> int:
        """Seed a scope and the generators of Python and numpy; return the seed."""

    def remember_others(self) -> Callable[[], None]:
        """Return a function that restores the present states of Python's and numpy's generators."""

    def read_others(self) -> object:
        """Return the states of Python's and numpy's generators, for comparison."""


class PlainSeeder:
    """The seeder that calls the generators' own functions; others may only be faster."""

    def seed(self, prefix: bytes, scope: int, call: int, /) -> int:
        """Seed torch's default generator with the key of a call; return the seed."""
        seed = find_seed(prefix, scope, call)
        torch.default_generator.manual_seed(seed)
        return seed

    def begin(self, prefix: bytes, scope: int, /) -> int:
        """Seed a scope and the generators of Python and numpy; return the seed."""
        seed = self.seed(prefix, scope, 0)
        seed_others(seed)
        return seed

    def remember_others(self) -> Callable[[], None]:
        """Return a function that restores the present states of Python's and numpy's generators."""
        return remember_others()

    def read_others(self) -> object:
        """Return the states of Python's and numpy's generators, for comparison."""
        return read_others()


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which operators on a device draw if they are given none."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator
    if device.type == "mps":  # has a single one, and a function instead of a tuple
        generator = module._get_default_mps_generator()
    else:
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    return generator


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's default generator of the CPU, and of `device` if it is an accelerator.

    The CPU's Mersenne Twister takes the low 32 bits of `seed`.
    """
    for generator in torch_generators(device).values():
        generator.manual_seed(seed)


def seed_others(seed: int) -> None:
    """Seed Python's `random` and numpy's global generator, as `seed_all` does."""
    random.seed(seed)
    if (numpy := _find_numpy()) is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's generators, as `seed_torch` does, `random`, and numpy's global generator."""
    seed_torch(seed, device)
    seed_others(seed)


def torch_generators(device: torch.device | None) -> dict[str, torch.Generator]:
    """Return torch's generators by the names of their states."""
    generators = {"torch": torch.default_generator}
    if device is not None and device.type not in ("cpu", "meta"):
        generators[device.type] = default_generator(device)
    return generators


def _find_numpy() -> Any:
    """Return the module numpy if the process has loaded it; nobody draws from it otherwise."""
    return sys.modules.get("numpy")


def remember_others() -> Callable[[], None]:
    """Return a function that restores the present states of Python's and numpy's generators."""
    state = random.getstate()
    restore_numpy = remember_numpy()

    def restore() -> None:
        random.setstate(state)
        restore_numpy()

    return restore


def read_others() -> object:
    """Return the states of Python's and numpy's generators, for comparison."""
    if (numpy := _find_numpy()) is None:
        return random.getstate()
    _, numbers, position, *second = numpy.random.get_state()
    return random.getstate(), bytes(numbers), position, second


def remember_numpy() -> Callable[[], None]:
    """Return a function that restores numpy's present global generator and its state."""
    if (numpy := _find_numpy()) is None:
        return lambda: None
    generator = numpy.random.get_bit_generator()
    state = numpy.random.get_state(legacy=False)

    def restore() -> None:
        if numpy.random.get_bit_generator() is not generator:
            numpy.random.set_bit_generator(generator)
        numpy.random.set_state(state)

    return restore


def remembered(
    device: torch.device | None = None, *, everything: bool = False
) -> Callable[[], None]:
    """Return a function that restores the generators' present states, each time it is called.

    Args:
        device: The device whose generator is one of them, in addition to that of the CPU.
        everything: Whether Python's and numpy's generators are, too.
    """
    generators = [*torch_generators(device).values()]
    states = [generator.get_state() for generator in generators]
    restore_others = remember_others() if everything else None

    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if restore_others is not None:
            restore_others()

    return restore


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
