import json
import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from lockstep.data.generators import generator_state, private_generators, set_generator_state

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g)),
    "RandomState": (lambda: numpy.random.RandomState(3), lambda g: g.randn(3)),
    "random": (lambda: random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
} | {
    kind.__name__: (lambda kind=kind: numpy.random.Generator(kind(3)), lambda g: g.normal(size=3))
    for kind in (
        numpy.random.PCG64,
        numpy.random.MT19937,
        numpy.random.Philox,
        numpy.random.SFC64,
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_from_a_state_that_went_through_json(kind: str) -> None:
    make, draw = KINDS[kind]
    generator: Any = make()
    draw(generator)
    state = json.loads(json.dumps(generator_state(generator)))
    expected = list(draw(generator))
    other: Any = make()
    set_generator_state(other, state)
    assert list(draw(other)) == expected


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None: ...


def test_generators_are_found_wherever_an_object_keeps_them() -> None:
    g = torch.Generator()
    r = numpy.random.default_rng(1)
    inner = Holder(rng=r)
    assert private_generators(Holder(rng=g)) == {"rng": g}
    assert private_generators(Holder(inner=inner)) == {"inner.rng": r}
    assert private_generators(Holder(steps=[inner, 1])) == {"steps.0.rng": r}
    assert private_generators(Holder(indices=list(range(1000)), last=[*"abc", inner])) == {
        "last.3.rng": r
    }
    assert private_generators(Holder(by_name={"a": inner})) == {"by_name.a.rng": r}
    assert private_generators(partial(print, rng=r)) == {"keywords.rng": r}
    assert private_generators(inner.method) == {"__self__.rng": r}
    assert private_generators(g) == {"": g}


def test_what_is_no_private_generator_is_not_found() -> None:
    endless = Holder()
    endless.itself = endless  # type: ignore[attr-defined]
    shared = Holder(a=torch.default_generator, b=numpy.random.mtrand._rand, c=random._inst)  # type: ignore[attr-defined]
    for owner in (endless, shared, Holder(rng=random.SystemRandom()), Holder(x=torch.ones(3)), 7):
        assert private_generators(owner) == {}
    assert private_generators(Holder(rng=torch.Generator()), without=frozenset({"rng"})) == {}
