"""Numbers formatted for people."""

import pytest

from lockstep.formatting import format_bytes, format_duration, format_metric, format_number


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
    ("count", "said"), [(999, "999 B"), (1e6, "1.00 MB"), (1.52e9, "1.52 GB"), (2e12, "2.00 TB")]
)
def test_bytes(count, said):
    assert format_bytes(count) == said


def test_ratios_are_recognized_by_their_name():
    assert format_metric("accuracy", 0.9721) == "accuracy 97.2%"
    assert format_metric("top5_accuracy", 0.5) == "top5_accuracy 50.0%"
    assert format_metric("perplexity", 12.34) == "perplexity 12.3"
