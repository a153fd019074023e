"""Numbers formatted for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.formatting import (
    format_bytes,
    format_duration,
    format_loss,
    format_metric,
    format_number,
    format_numbered,
    format_size,
    parse_size,
    parse_sizes,
)
from lockstep.kernel.errors import UsageError


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s"), (85e-6, "85.0 us"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (4.1, "4.10 s"),
        (59.94, "59.9 s"), (59.96, "1 min 0 s"), (125.2, "2 min 5 s"), (11520, "3 h 12 min"),
        (200_000, "2 d 7 h"), (float("nan"), "?"), (12, "12 s"),
    ],
)  # fmt: skip
def test_durations(seconds, said):
    assert format_duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"), (0.123456, "0.123"), (5321.4, "5,321"), (88.43, "88.4"), (99.96, "100"),
        (1e-7, "1e-07"), (-2.5, "-2.50"), (3e12, "3e+12"), (float("inf"), "?"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value, said):
    assert format_number(value) == said


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (2.16664, "2.1666"), (0.0851, "0.0851"), (0.001234, "0.00123"), (2.4e-07, "2.4e-07"),
        (-0.5, "-0.5000"), (0.0, "0"), (12345.6, "12,346"), (float("nan"), "?"),
    ],
)  # fmt: skip
def test_a_small_loss_keeps_its_digits(loss, said):
    assert format_loss(loss) == said


@pytest.mark.parametrize(
    ("count", "said"), [(999, "999 B"), (1e6, "1.00 MB"), (1.52e9, "1.52 GB"), (2e12, "2.00 TB")]
)
def test_bytes(count, said):
    assert format_bytes(count) == said


def test_ratios_are_recognized_by_their_name():
    assert format_metric("accuracy", 0.9721) == "accuracy 97.2%"
    assert format_metric("top5_accuracy", 0.5) == "top5_accuracy 50.0%"
    assert format_metric("perplexity", 12.34) == "perplexity 12.3"


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


@given(st.integers(0, 16), st.sampled_from(["", "K", "M", "G"]))
def test_a_label_can_be_read_back(power, unit):
    size = parse_size(f"{1 << power}{unit}")
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([2], "rank 2"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2], "ranks 0, 1 and 2")],
)
def test_numbered_things(numbers, text):
    assert format_numbered("rank", numbers) == text
