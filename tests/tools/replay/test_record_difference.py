"""The first difference of two records: what is compared, in which order, and where to search."""

import math
from dataclasses import replace

import pytest

from lockstep.record.fingerprints import RecordedStep
from lockstep.tools.replay.record_difference import (
    find_window,
    first_record_difference,
)

STEPS = [
    RecordedStep(number, 0, 1.0 / (number + 3), 2.0, (0.5, 0.25, None), f"batch {number}")
    for number in range(10)
]


def changed(step, **fields):
    """Return the steps with other values in one of them."""
    return [replace(each, **fields) if each.step == step else each for each in STEPS]


def find(b, a=STEPS):
    found = first_record_difference(a, b)
    return found and (found.step, found.what, found.microbatch, found.a, found.b)


def test_equal_records_have_no_difference():
    assert find(STEPS) is None
    assert find(STEPS[3:], STEPS[:5]) is None, "only common steps are compared"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"batch": "other"}, ("batch", None, "batch 4", "other")),
        ({"losses": (0.5, 0.125, None)}, ("loss of the micro-batch", 1, "0.25", "0.125")),
        ({"losses": (0.5, 0.25, 3.0)}, ("loss of the micro-batch", 2, "none", "3.0")),
        ({"losses": (0.5, 0.25)}, None),
        ({"loss": math.nextafter(1 / 7, 1)}, ("loss", None, repr(1 / 7), "0.14285714285714288")),
        ({"norm": 2.5}, ("norm", None, "2.0", "2.5")),
        ({"norm": 2.5, "batch": "other"}, ("batch", None, "batch 4", "other")),
        ({"norm": None, "batch": None, "losses": ()}, None),  # an older version's
        ({"norm": math.nan}, ("norm", None, "2.0", "nan")),
        ({"losses": (0.5, 0.25, None), "loss": -math.inf}, ("loss", None, repr(1 / 7), "-inf")),
    ],
)
def test_each_field_is_compared_and_the_first_one_is_named(fields, expected):
    assert find(changed(4, **fields)) == (expected and (4, *expected))


def test_values_that_are_not_finite_are_compared_by_their_bits():
    nan = changed(4, norm=math.nan)
    assert find(nan, nan) is None
    assert find(changed(4, norm=-0.0), changed(4, norm=0.0)) == (4, "norm", None, "0.0", "-0.0")


DIGESTS = {3: "x", 6: "y", 10: "z"}


@pytest.mark.parametrize(
    ("step", "digests", "expected"),
    [
        (None, DIGESTS, None),
        (None, {}, None),
        (None, DIGESTS | {10: "other"}, (6, 9)),
        (None, DIGESTS | {6: "other", 10: "other"}, (3, 5)),
        (None, DIGESTS | {3: "other"}, (0, 2)),
        (None, {0: "x"}, None),
        (5, {}, (0, 5)),
        (5, DIGESTS, (3, 5)),
        (6, DIGESTS, (6, 6)),  # the weights before it are equal
        (0, DIGESTS, (0, 0)),
        (5, DIGESTS | {6: "other"}, (3, 5)),
        (8, DIGESTS | {6: "other"}, (3, 5)),
        (6, DIGESTS | {6: "other"}, (3, 5)),
        (1, {1: "other"}, (0, 0)),
    ],
)
def test_where_to_search(step, digests, expected):
    found = None if step is None else first_record_difference(STEPS, changed(step, loss=9.0))
    assert find_window(DIGESTS | {1: "w"}, digests, found) == expected
