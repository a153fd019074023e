"""Sizes with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.sizes import format_size, parse_size, parse_sizes, size_range
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("64K", 65536), ("64k", 65536), ("1MiB", 1 << 20), ("2 GB", 2 << 30),
     ("0.5M", 1 << 19), ("12B", 12)],
)  # fmt: skip
def test_units_are_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "four", "-4", "4T", "4KK", "1,5K"])
def test_invalid_size_raises(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_a_list():
    assert parse_sizes("4,1K, 1M") == [4, 1024, 1 << 20]


@given(st.integers(1, 10_000), st.integers(0, 1 << 30), st.floats(1.01, 100))
def test_sizes_ascend_from_begin_to_end(begin, more, factor):
    sizes = size_range(begin, begin + more, factor)
    assert sizes[0] == begin
    assert sizes[-1] <= begin + more
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("begin", "end", "factor"), [(0, 4, 2), (8, 4, 2), (4, 8, 1)])
def test_invalid_size_range_raises(begin, end, factor):
    with pytest.raises(UsageError, match="by a factor of"):
        size_range(begin, end, factor)


@given(st.integers(0, 16), st.sampled_from(["", "K", "M", "G"]))
def test_a_label_can_be_read_back(power, unit):
    size = parse_size(f"{1 << power}{unit}")
    assert parse_size(format_size(size)) == size
