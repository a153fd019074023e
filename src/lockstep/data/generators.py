"""Private random generators of samplers, modules and other objects.

The global generators of torch, Python and numpy are seeded for each order, sample and micro-batch.
A private generator is not, so its numbers depend on all earlier draws.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy
import torch

__all__ = ["find_private_generators", "generator_state", "is_private_generator"]

LIMIT = 1000  # the most objects that are searched, and the most members of a container

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)

SHARED: tuple[Any, ...] = (
    torch.default_generator,
    random._inst,
    numpy.random.mtrand._rand,
)
"""The global generators."""


def is_private_generator(value: Any) -> bool:
    """Return whether `value` is a generator with its own state, not a global generator.

    `random.SystemRandom` has no state: it draws from the operating system.
    """
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return not any(value is generator for generator in SHARED)


def find_private_generators(owner: Any) -> list[Any]:
    """Return the private generators in the attributes of an object, and of the objects there."""
    generators: list[Any] = []
    seen = {id(owner)}
    waiting = deque([owner])
    while waiting:
        value = waiting.popleft()
        if is_private_generator(value):
            generators.append(value)
            continue
        parts = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", {})
        if isinstance(value, (type, torch.Tensor, ModuleType)) or len(parts) > LIMIT:
            continue
        for part in parts.values() if isinstance(parts, dict) else parts:
            if id(part) not in seen and len(seen) < LIMIT:
                seen.add(id(part))
                waiting.append(part)
    return generators


def generator_state(generator: Any) -> Any:
    """Return the state of a generator as plain values, which can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, numpy.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.getstate())


def _plain(value: Any) -> Any:
    """Convert nested numbers to plain values."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    return value
