"""Random trainings from `tests/grammar`: every layout gives the bits of the plain reference.

The modules of the grammar are imported within the tests: what a test module imports travels
to the ranks by value, and these are to be found there by name.
"""

import os
import time

import pytest

SHORT = range(6)
LONG = range(1_000, 2_800)
DIVERGES = {2_478}  # its loss grows to 1e35, and the norm of its gradient is infinite
AT_A_TIME = 100


@pytest.mark.timeout(300)
def test_random_trainings_give_the_bits_of_the_reference():
    from grammar.comparison import compare

    tally = compare(SHORT)
    assert not tally.failures, str(tally)
    assert tally.agreements > 0.7 * len(SHORT), str(tally)


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_many_random_trainings_give_the_bits_of_the_reference(capsys):
    """Goes through the cases until they are done or the time is over, and prints the counts."""
    from grammar.comparison import Tally, compare

    deadline = time.monotonic() + float(os.environ.get("LOCKSTEP_SOAK_SECONDS", "120"))
    tally = Tally()
    for begin in range(LONG.start, LONG.stop, AT_A_TIME):
        seeds = range(begin, min(begin + AT_A_TIME, LONG.stop))
        tally.add(compare([each for each in seeds if each not in DIVERGES]))
        with capsys.disabled():
            print(f"\nseeds up to {begin + AT_A_TIME - 1}: {tally.summary}", flush=True)
        if time.monotonic() > deadline:
            break
    with capsys.disabled():
        print(f"\n{tally}", flush=True)
    assert not tally.failures, str(tally)
    assert tally.agreements > 0.7 * tally.cases, str(tally)


def test_equal_seeds_draw_equal_cases_and_say_so():
    from grammar import case

    assert str(case(7)) == str(case(7)) != str(case(8))
    assert str(case(7)).startswith("grammar.case(7)  # M=")
