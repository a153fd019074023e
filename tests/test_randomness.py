import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import randomness
from lockstep.comm import native_module
from lockstep.randomness import (
    isolated,
    key,
    key_prefix,
    pack_key,
    remembered,
    seed_all,
    seed_generator,
    seed_torch,
)

whole = st.integers(-(2**63), 2**63 - 1)


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


@given(st.lists(whole, max_size=5))
def test_a_key_fits_in_64_bits_and_is_the_same_again(parts: list[int]) -> None:
    assert 0 <= key(*parts) < 2**64
    assert key(*parts) == key(*parts)


@given(st.lists(whole, max_size=4), st.lists(whole, max_size=4))
def test_different_work_has_different_keys(one: list[int], other: list[int]) -> None:
    assert (key(*one) == key(*other)) == (one == other)


def test_the_key_is_the_written_formula() -> None:
    import hashlib

    packed = b"".join(part.to_bytes(8, "little", signed=True) for part in (7, -1, 3))
    expected = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    assert key(7, -1, 3) == expected


@given(st.lists(whole, max_size=3), st.lists(whole, max_size=3))
def test_a_prefix_makes_the_same_keys(one: list[int], other: list[int]) -> None:
    assert key_prefix(*one)(*other) == key(*one, *other)


calls = st.tuples(st.lists(whole, max_size=2), st.integers(-2, 9), st.integers(0, 2))


@given(st.lists(st.integers(-1, 9), unique=True), st.lists(calls, max_size=12))
def test_both_ways_to_seed_a_unit_use_its_key(
    order: list[int], called: list[tuple[list[int], int, int]]
) -> None:
    """Whatever the order of the calls, and whatever was drawn before."""
    native = native_module.load().UnitSeeder(order).seed
    with isolated():
        for parts, unit, call in called:
            expected = key(*parts, unit, call) if call else key(*parts, unit)
            drawn = []
            for seed in (lambda *_, e=expected: seed_torch(e) or e, seed_generator, native):
                torch.randn(1)  # normal numbers are drawn in pairs
                assert seed(pack_key(*parts), unit, call) == expected
                state = torch.default_generator.get_state()
                drawn.append((state, torch.randn(3), torch.rand(700)))
            for other in drawn[1:]:
                assert all(map(torch.equal, drawn[0], other))


@pytest.mark.parametrize("order", [[], [0]])
def test_a_key_that_does_not_fit_into_a_block_is_refused(order: list[int]) -> None:
    seeder = native_module.load().UnitSeeder(order)
    with isolated():
        for _ in range(2):
            with pytest.raises(ValueError, match="the prefix is too long"):
                seeder.seed(bytes(113), 0)
        assert seeder.seed(pack_key(1), 0) == key(1, 0)


parts = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3)
indices = st.integers(0, 12)


@given(parts, st.lists(indices, max_size=12), st.booleans(), st.data())
def test_python_and_numpy_are_seeded_and_restored_as_by_their_own_functions(
    prefix: list[int], microbatches: list[int], is_prepared: bool, data: st.DataObject
) -> None:
    """For micro-batches in any order, and whatever is drawn in them."""
    seeder = native_module.load().UnitSeeder([-1, 0] if is_prepared else [])
    with isolated(everything=True):
        before = randomness.state_of_others()
        restore = randomness.remembered(everything=True)
        for microbatch in microbatches:
            seed = seeder.seed(pack_key(*prefix, microbatch), -1)
            randomness.seed_others(seed, seeder)
            seeded = randomness.state_of_others()
            drawn = [random.gauss(0, 1) for _ in range(3)], numpy.random.standard_normal(3).tolist()
            restore_seeded = randomness.remembered(everything=True)
            randomness.seed_others(seed)
            assert randomness.state_of_others() == seeded
            again = [random.gauss(0, 1) for _ in range(3)], numpy.random.standard_normal(3).tolist()
            assert drawn == again
            restore_seeded()
            if data.draw(st.booleans()):
                random.random()
            for _ in range(data.draw(st.sampled_from([0, 1, 2, 623, 624, 625]))):
                numpy.random.standard_normal()
            randomness.seed_others(seed, seeder)
            if not data.draw(st.booleans()):  # else the next seeds follow without a number drawn
                numpy.random.standard_normal()
        restore()
        assert randomness.state_of_others() == before


def test_numpy_is_seeded_after_another_seeder_and_another_generator() -> None:
    """What a seeder knows of the memory holds only while nobody else has written to it."""
    one, other = (native_module.load().UnitSeeder([-1]) for _ in range(2))

    def draw(seeder: Any, microbatch: int, is_fast: bool = True) -> float:
        seed = seeder.seed(pack_key(7, microbatch), -1)
        randomness.seed_others(seed, seeder if is_fast else None)
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
    seeder = native_module.load().UnitSeeder([-1])
    with isolated(everything=True):
        seed = seeder.seed(b"", -1)
        for _ in range(2):
            with pytest.raises(ValueError, match="the prefix has no micro-batch"):
                randomness.seed_others(seed, seeder)


def test_another_memory_of_python_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(random.Random):
        """A generator whose memory is not known."""

    randomness._find_random_memory.cache_clear()
    monkeypatch.setattr(random, "_inst", Other(3))
    try:
        assert randomness._find_random_memory() is None
        with isolated(everything=True):
            seeder = native_module.load().UnitSeeder([-1])
            seed = seeder.seed(pack_key(5), -1)
            randomness.seed_others(seed, seeder)
            drawn = random.random()
            random.seed(seed)
            assert random.random() == drawn
    finally:
        randomness._find_random_memory.cache_clear()


def test_neighbouring_keys_differ_in_the_low_32_bits() -> None:
    """The CPU's generator takes no more than these."""
    low = {key(0, 0, sample) & 0xFFFF_FFFF for sample in range(1000)}
    assert len(low) == 1000


def test_seed_all_fixes_all_three_generators() -> None:
    with isolated(everything=True):
        seed_all(5)
        first = draws()
        seed_all(5)
        assert draws() == first
        seed_all(6)
        assert not set(draws()) & set(first)


def test_seed_torch_leaves_the_other_generators() -> None:
    with isolated(everything=True):
        seed_all(1)
        _, expected_random, expected_numpy = draws()
        seed_all(1)
        seed_torch(99)
        number, from_random, from_numpy = draws()
    assert (from_random, from_numpy) == (expected_random, expected_numpy)
    torch.default_generator.manual_seed(99)
    assert torch.rand(()).item() == number


@pytest.mark.parametrize("raises", [False, True])
def test_isolated_gives_the_generators_back(raises: bool) -> None:
    seed_all(3)
    expected = draws()
    seed_all(3)
    try:
        with isolated(everything=True):
            seed_all(4)
            draws()
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    assert draws() == expected


def test_isolated_alone_covers_torch_only() -> None:
    seed_all(3)
    expected = draws()
    seed_all(3)
    with isolated():
        draws()
    number, from_random, from_numpy = draws()
    assert number == expected[0]
    assert from_random != expected[1]
    assert from_numpy != expected[2]


def restored_by_numpy(before: dict[str, object]) -> list[float]:
    numpy.random.set_state(before)
    return [float(numpy.random.standard_normal()) for _ in range(3)]


@pytest.mark.parametrize("drawn", [0, 1, 2, 3, 624, 625])
@pytest.mark.parametrize("body", ["nothing", "seeds", "one normal", "two normals", "many"])
def test_numpy_is_restored_with_the_second_of_a_pair(drawn: int, body: str) -> None:
    with isolated(everything=True):
        numpy.random.seed(drawn)
        for _ in range(drawn):
            numpy.random.standard_normal()
        before = numpy.random.get_state(legacy=False)
        restore = remembered(everything=True)
        untouched = numpy.random.get_state(legacy=False)
        assert [untouched["has_gauss"], untouched["gauss"]] == [
            before["has_gauss"],
            before["gauss"],
        ]
        for _ in range(2):
            if body == "seeds":
                seed_all(3)
            for _ in range({"one normal": 1, "two normals": 2, "many": 1000}.get(body, 0)):
                numpy.random.standard_normal()
            restore()
            now = [float(numpy.random.standard_normal()) for _ in range(3)]
            assert now == restored_by_numpy(before)


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
def test_another_generator_of_numpy_is_restored(kind: type[numpy.random.BitGenerator]) -> None:
    own = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(kind(5))
        before = numpy.random.get_state(legacy=False)
        expected = restored_by_numpy(before)
        numpy.random.set_state(before)
        if kind is numpy.random.MT19937:
            with isolated(everything=True):
                seed_all(2)
        else:  # numpy itself refuses to seed it
            restore = remembered(everything=True)
            numpy.random.standard_normal()
            restore()
        assert [float(numpy.random.standard_normal()) for _ in range(3)] == expected
    finally:
        numpy.random.set_bit_generator(own)
