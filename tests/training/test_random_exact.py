"""Random loops with `ls.exact` from `tests/grammar`: they have the bits of plain PyTorch.

The modules of the grammar are imported within the tests: what a test module imports travels
to the ranks by value, and these are to be found there by name.
"""

import os
import time

import pytest

SHORT = (25, 23, 54, 153, 182, 230)
"""Each form of loop, with evaluations, resumes, shards, float16 and two models, in 3 launches."""
LONG = range(1_000, 1_300)
AT_A_TIME = 50


@pytest.mark.timeout(300)
def test_random_loops_have_the_bits_of_plain_pytorch():
    from grammar.comparison import compare

    tally = compare(SHORT, "exact")
    assert not tally.failures, str(tally)
    assert tally.agreements == len(SHORT), str(tally)


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_many_random_loops_have_the_bits_of_plain_pytorch(capsys):
    """Goes through the cases until they are done or the time is over, and prints the counts."""
    from grammar.comparison import Tally, compare

    deadline = time.monotonic() + float(os.environ.get("LOCKSTEP_SOAK_SECONDS", "120"))
    tally = Tally()
    for begin in range(LONG.start, LONG.stop, AT_A_TIME):
        tally.add(compare(range(begin, begin + AT_A_TIME), "exact"))
        if time.monotonic() > deadline:
            break
    with capsys.disabled():
        print(f"\n{tally}", flush=True)
    assert not tally.failures, str(tally)
    assert tally.agreements > 0.7 * tally.cases, str(tally)
