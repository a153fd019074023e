"""The states of the generators of a process: to compare, to send and to save them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch

from lockstep.kernel.seeds import torch_generators

__all__ = [
    "global_states",
    "set_global_states",
    "set_state_of_torch",
    "state_of_all",
    "state_of_others",
    "state_of_torch",
]


def state_of_torch(device: torch.device | None = None) -> bytes:
    """Return the states of the generators that `seed_torch` seeds."""
    return b"".join(
        generator.get_state().numpy().tobytes() for generator in torch_generators(device).values()
    )


def set_state_of_torch(state: bytes, device: torch.device | None = None) -> None:
    """Restore the states of torch's generators that `state_of_torch` returned."""
    rest = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    for generator in torch_generators(device).values():
        size = generator.get_state().numel()
        generator.set_state(rest[:size].clone())
        rest = rest[size:]


def state_of_others() -> tuple[object, ...]:
    """Return the states of Python's and numpy's global generators, for comparison."""
    _, numbers, position, *_ = cast("tuple[Any, ...]", numpy.random.get_state())
    return random.getstate(), bytes(numbers), position


def state_of_all(device: torch.device | None = None) -> tuple[bytes, tuple[object, ...]]:
    """Return the states of torch's generators and of the others, for comparison."""
    return state_of_torch(device), state_of_others()


def global_states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of the global generators by name, as tensors, tuples and arrays.

    These are torch's generators, on the CPU and on `device` if it is an accelerator, whose type is
    the name of its state, and those of `random` and numpy.
    """
    states: dict[str, Any] = {
        name: generator.get_state() for name, generator in torch_generators(device).items()
    }
    return states | {"random": random.getstate(), "numpy": numpy.random.get_state()}


def set_global_states(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states of global generators that `global_states` returned."""
    for name, generator in torch_generators(device).items():
        if name in states:
            generator.set_state(states[name])
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        numpy.random.set_state(states["numpy"])
