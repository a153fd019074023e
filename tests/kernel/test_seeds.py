"""Rule 3: keys, and what seeds and restores the generators of a process."""

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.seeds import isolated, key, seed_all, seed_torch

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
def test_isolated_restores_the_generators(raises: bool) -> None:
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
