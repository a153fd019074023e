"""The first difference of two records: what is compared, in which order, and where to search."""

import math
from dataclasses import replace

import pytest

from lockstep.record.fingerprints import RecordedStep
from lockstep.tools.replay.record_difference import (
    SearchWindow,
    Stop,
    compare_records,
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


def test_whether_all_micro_batches_differ():
    some = first_record_difference(STEPS, changed(4, losses=(0.5, 0.125, None)))
    every = first_record_difference(STEPS, changed(4, losses=(0.25, 0.125, 1.0)))
    assert some is not None
    assert some.is_partial
    assert every is not None
    assert not every.is_partial


def test_values_that_are_not_finite_are_compared_by_their_bits():
    nan = changed(4, norm=math.nan)
    assert find(nan, nan) is None
    assert find(changed(4, norm=-0.0), changed(4, norm=0.0)) == (4, "norm", None, "0.0", "-0.0")


NAN = Stop(6, 2, "the loss is nan", is_value=True)
KEY = Stop(6, None, "KeyError: 'lr'", is_value=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "stops", "expected"),
    [
        (10, 6, (None, NAN), (6, "stop", 2, "", "the loss is nan")),
        (6, 10, (NAN, None), (6, "stop", 2, "the loss is nan", "")),
        (6, 6, (NAN, replace(NAN, microbatch=1)), (6, "stop", 1, NAN.what, NAN.what)),
        (6, 6, (NAN, NAN), None),
        (4, 6, (None, NAN), None),  # it may have stopped there as well
        (6, 10, (KEY, None), None),  # an error of the program, not of its numbers
        (0, 10, (replace(NAN, step=0), None), (0, "stop", 2, "the loss is nan", "")),
    ],
)
def test_a_run_that_a_value_stopped(ours, theirs, stops, expected):
    found = first_record_difference(STEPS[:ours], STEPS[:theirs], stops)
    assert (found and (found.step, found.what, found.microbatch, found.a, found.b)) == expected


DIGESTS = {3: "x", 6: "y", 10: "z"}


@pytest.mark.parametrize(
    ("step", "digests", "expected"),
    [
        (None, DIGESTS, None),
        (None, {}, None),
        (None, DIGESTS | {10: "other"}, SearchWindow(6, 9, is_narrow=False)),
        (None, DIGESTS | {6: "other", 10: "other"}, SearchWindow(3, 5, is_narrow=False)),
        (None, DIGESTS | {3: "other"}, SearchWindow(0, 2, is_narrow=False)),
        (None, {0: "x"}, None),
        (5, {}, SearchWindow(4, 5, is_narrow=True)),
        (5, DIGESTS, SearchWindow(4, 5, is_narrow=True)),
        (6, DIGESTS, SearchWindow(6, 6, is_narrow=True)),  # the weights before it are equal
        (0, DIGESTS, SearchWindow(0, 0, is_narrow=True)),
        (5, DIGESTS | {6: "other"}, SearchWindow(4, 5, is_narrow=True)),
        (8, DIGESTS | {6: "other"}, SearchWindow(3, 5, is_narrow=False)),
        (6, DIGESTS | {6: "other"}, SearchWindow(3, 5, is_narrow=False)),
        (1, {1: "other"}, SearchWindow(0, 0, is_narrow=True)),
    ],
)
def test_where_to_search(step, digests, expected):
    found = None if step is None else first_record_difference(STEPS, changed(step, loss=9.0))
    assert compare_records(DIGESTS | {1: "w"}, digests, found) == expected
