"""Seeding in memory: the bits of `PlainSeeder`, after any draws."""

import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.seeds import PlainSeeder, Seeder, isolated, key, pack_key, seed_all, seed_torch
from lockstep.model import native_seeder
from lockstep.model.generator_states import state_of_others
from lockstep.model.native_seeder import NativeSeeder

whole = st.integers(-(2**63), 2**63 - 1)
calls = st.tuples(st.lists(whole, max_size=2), st.integers(-2, 9), st.integers(0, 2))


@given(st.lists(st.integers(-1, 9), unique=True), st.lists(calls, max_size=12))
def test_both_ways_to_seed_a_scope_use_its_key(
    order: list[int], called: list[tuple[list[int], int, int]]
) -> None:
    """For any order of the calls, and after any draws."""
    native = NativeSeeder(order).seed
    with isolated():
        for parts, scope, call in called:
            expected = key(*parts, scope, call) if call else key(*parts, scope)
            drawn = []
            for seed in (lambda *_, e=expected: seed_torch(e) or e, PlainSeeder().seed, native):
                torch.randn(1)  # normal numbers are drawn in pairs
                assert seed(pack_key(*parts), scope, call) == expected
                state = torch.default_generator.get_state()
                drawn.append((state, torch.randn(3), torch.rand(700)))
            for other in drawn[1:]:
                assert all(map(torch.equal, drawn[0], other))


@pytest.mark.parametrize("order", [[], [0]])
def test_a_key_that_does_not_fit_into_a_block_is_refused(order: list[int]) -> None:
    seeder = NativeSeeder(order)
    with isolated():
        for _ in range(2):
            with pytest.raises(ValueError, match="the prefix is too long"):
                seeder.seed(bytes(113), 0, 0)
        assert seeder.seed(pack_key(1), 0, 0) == key(1, 0)


parts = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3)
indices = st.integers(0, 12)


@given(parts, st.lists(indices, max_size=12), st.booleans(), st.data())
def test_python_and_numpy_are_seeded_and_restored_as_by_their_own_functions(
    prefix: list[int], microbatches: list[int], is_prepared: bool, data: st.DataObject
) -> None:
    """For micro-batches in any order, with any draws in them."""
    seeder = NativeSeeder([-1, 0] if is_prepared else [])
    with isolated(everything=True):
        before = state_of_others()
        restore = seeder.remember_others()
        for microbatch in microbatches:
            own = pack_key(*prefix, microbatch)
            assert seeder.begin(own, -1) == key(*prefix, microbatch, -1)
            seeded = state_of_others()
            drawn = [random.gauss(0, 1) for _ in range(3)], numpy.random.standard_normal(3).tolist()
            restore_seeded = seeder.remember_others()
            PlainSeeder().begin(own, -1)
            assert state_of_others() == seeded
            again = [random.gauss(0, 1) for _ in range(3)], numpy.random.standard_normal(3).tolist()
            assert drawn == again
            restore_seeded()
            if data.draw(st.booleans()):
                random.random()
            for _ in range(data.draw(st.sampled_from([0, 1, 2, 623, 624, 625]))):
                numpy.random.standard_normal()
            seeder.begin(own, -1)
            if not data.draw(st.booleans()):  # else the next seeds follow without a number drawn
                numpy.random.standard_normal()
        restore()
        assert state_of_others() == before


def test_numpy_is_seeded_after_another_seeder_and_another_generator() -> None:
    """What a seeder knows of the memory holds only while nobody else has written to it."""
    one, other = (NativeSeeder([-1]) for _ in range(2))

    def draw(seeder: Any, microbatch: int, is_fast: bool = True) -> float:
        (seeder if is_fast else PlainSeeder()).begin(pack_key(7, microbatch), -1)
        return float(numpy.random.standard_normal())  # the second one of the pair is kept

    with isolated(everything=True):
        expected = [draw(one, 0, is_fast=False), draw(one, 1, is_fast=False)]
        original = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        for seeder in (one, other, one, one, other):
            assert [draw(seeder, 0), draw(seeder, 1)] == expected
            numpy.random.set_bit_generator(numpy.random.MT19937(3))  # type: ignore[attr-defined]
            assert [draw(seeder, 0), draw(seeder, 1)] == expected
            numpy.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_a_prefix_without_a_microbatch_is_refused() -> None:
    seeder = NativeSeeder([-1])
    with isolated(everything=True):
        for _ in range(2):
            with pytest.raises(ValueError, match="the prefix has no micro-batch"):
                seeder.begin(b"", -1)


def test_another_memory_of_python_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(random.Random):
        """A generator whose memory is not known."""

    native_seeder._find_python_memory.cache_clear()
    monkeypatch.setattr(random, "_inst", Other(3))
    try:
        assert native_seeder._find_python_memory() == 0
        with isolated(everything=True):
            seeder = NativeSeeder([-1])
            seed = seeder.begin(pack_key(5), -1)
            drawn = random.random()
            random.seed(seed)
            assert random.random() == drawn
    finally:
        native_seeder._find_python_memory.cache_clear()


def restored_by_numpy(before: dict[str, object]) -> list[float]:
    numpy.random.set_state(before)
    return [float(numpy.random.standard_normal()) for _ in range(3)]


@pytest.mark.parametrize("seeder", [PlainSeeder(), NativeSeeder([])], ids=["plain", "native"])
@pytest.mark.parametrize("drawn", [0, 1, 2, 3, 624, 625])
@pytest.mark.parametrize("body", ["nothing", "seeds", "one normal", "two normals", "many"])
def test_numpy_is_restored_with_the_second_of_a_pair(seeder: Seeder, drawn: int, body: str) -> None:
    with isolated(everything=True):
        numpy.random.seed(drawn)
        for _ in range(drawn):
            numpy.random.standard_normal()
        before = numpy.random.get_state(legacy=False)
        restore = seeder.remember_others()
        untouched = numpy.random.get_state(legacy=False)
        assert all(untouched[name] == before[name] for name in ("has_gauss", "gauss"))
        for _ in range(2):
            if body == "seeds":
                seed_all(3)
            for _ in range({"one normal": 1, "two normals": 2, "many": 1000}.get(body, 0)):
                numpy.random.standard_normal()
            restore()
            now = [float(numpy.random.standard_normal()) for _ in range(3)]
            assert now == restored_by_numpy(before)


@pytest.mark.parametrize("seeder", [PlainSeeder(), NativeSeeder([])], ids=["plain", "native"])
@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
def test_another_generator_of_numpy_is_restored(
    seeder: Seeder, kind: type[numpy.random.BitGenerator]
) -> None:
    own = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(kind(5))
        before = numpy.random.get_state(legacy=False)
        expected = restored_by_numpy(before)
        numpy.random.set_state(before)
        restore = seeder.remember_others()
        if kind is numpy.random.MT19937:  # numpy itself refuses to seed others
            seed_all(2)
        numpy.random.standard_normal()
        numpy.random.set_bit_generator(own)  # as a model may do in a step
        restore()
        assert [float(numpy.random.standard_normal()) for _ in range(3)] == expected
    finally:
        numpy.random.set_bit_generator(own)


@pytest.mark.parametrize("find", [native_seeder._find_second_number, lambda: 0])
def test_a_known_memory_gets_a_second_number(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is one that was restored without a second number before."""
    monkeypatch.setattr(native_seeder, "_find_second_number", find)
    seeder = NativeSeeder([-1])
    with isolated(everything=True):
        numpy.random.seed(3)
        _ = numpy.random.randn()
        kept = numpy.random.get_state()
        second = numpy.random.randn()
        seeder.remember_others()()
        numpy.random.set_state(kept)
        restore = seeder.remember_others()
        seeder.begin(pack_key(7, 0), -1)
        restore()
        assert numpy.random.randn() == second
