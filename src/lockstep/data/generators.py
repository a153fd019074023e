"""Private random generators of samplers and datasets: found, saved and restored.

The global generators of torch, Python and numpy are seeded for each order and each sample. A
private generator of a sampler or dataset is not, so its numbers depend on all earlier draws.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch

__all__ = [
    "generator_state",
    "is_private_generator",
    "private_generators",
    "set_generator_state",
]

DEPTH, LIMIT = 5, 1000
"""The maximum depth of attributes, and the maximum number of objects, that are searched."""

PLAIN = {bool, int, float, complex, str, bytes, type(None)}
"""Types that cannot hold a generator."""

CALLED = ("__getitem__", "__call__", "forward")
"""The methods of datasets and transforms in which generators of a module are searched."""

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)

SHARED: tuple[Any, ...] = (
    torch.default_generator,
    random._inst,
    numpy.random.mtrand._rand,
)
"""The global generators, which the loader seeds."""


def is_private_generator(value: Any) -> bool:
    """Return whether `value` is a generator with its own state, not a global generator.

    `random.SystemRandom` has no state: it draws from the operating system.
    """
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return not any(value is generator for generator in SHARED)


def private_generators(owner: Any, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the private generators among the attributes of `owner`, by attribute path.

    Containers, `functools.partial`, objects among the attributes, and what functions refer to are
    searched too.

    Args:
        owner: The object, for instance a sampler or a dataset.
        without: The names of attributes to skip.
    """
    generators: dict[str, Any] = {}
    seen: set[int] = set()

    def search(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or len(seen) >= LIMIT:
            return
        seen.add(id(value))
        if is_private_generator(value):
            generators[path] = value
        elif depth < DEPTH and not isinstance(value, GENERATORS):
            for name, part in _parts(value):
                if name not in without:
                    search(part, f"{path}.{name}" if path else name, depth + 1)

    search(owner, "", 0)
    return generators


def generator_state(generator: Any) -> Any:
    """Return the state of a generator as JSON values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, numpy.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.getstate())


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `generator_state` returned.

    Raises:
        TypeError, ValueError, KeyError: The state belongs to another type of generator.
    """
    if isinstance(generator, torch.Generator):
        octets = bytearray.fromhex(state)
        generator.set_state(torch.frombuffer(octets, dtype=torch.uint8))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes or items of an object by name, except numbers and strings."""
    if isinstance(value, (str, bytes, torch.Tensor, numpy.ndarray, type, ModuleType)):
        return
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, dict):  # only dict: other mappings may load their values on access
        if len(value) <= LIMIT:
            yield from ((str(key), part) for key, part in value.items() if type(part) not in PLAIN)
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= LIMIT:
            # Often a list of indices, which must not take the time of 1000 objects.
            yield from (
                (str(number), part) for number, part in enumerate(value) if type(part) not in PLAIN
            )
    else:
        if isinstance(value, MethodType):
            yield "__self__", value.__self__
            value = value.__func__
        called = (getattr(type(value), name, None) for name in CALLED)
        for function in (value, *called):
            if isinstance(function, FunctionType) and not _is_of_library(function):
                yield from _names_of(function)
        yield from getattr(value, "__dict__", {}).items()


def _is_of_library(function: FunctionType) -> bool:
    """Return whether a function is the standard library's, some of which draw, such as tempfile."""
    return (function.__module__ or "").partition(".")[0] in sys.stdlib_module_names


def _names_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: in its closure, its defaults and its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        known = (name for name in code.co_names if name in function.__globals__)
        root = function.__module__
        yield from ((f"{root}.{name}", function.__globals__[name]) for name in known)


def _plain(value: Any) -> Any:
    """Convert nested numbers to JSON values."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    return value
