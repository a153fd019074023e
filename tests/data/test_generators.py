"""Private generators: which objects are some, and their states."""

import random
from typing import Any

import numpy
import pytest
import torch

from lockstep.data.generators import generator_state, is_private_generator

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g)),
    "RandomState": (lambda: numpy.random.RandomState(3), lambda g: g.randn(3)),
    "random": (lambda: random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    "PCG64": (lambda: numpy.random.default_rng(3), lambda g: g.normal(size=3)),
    "MT19937": (
        lambda: numpy.random.Generator(numpy.random.MT19937(3)), lambda g: g.normal(size=3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_changes_the_state_of_a_generator(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make()
    other = make()
    assert is_private_generator(generator)
    assert generator_state(generator) == generator_state(other)
    draw(generator)
    assert generator_state(generator) != generator_state(other)
    draw(other)
    assert generator_state(generator) == generator_state(other)


def test_other_objects_are_no_private_generators() -> None:
    shared: list[Any] = [torch.default_generator, numpy.random.mtrand._rand, random._inst]  # type: ignore[attr-defined]
    for value in (*shared, random.SystemRandom(), torch.ones(3), 7):
        assert not is_private_generator(value)
