"""Random loops of the frameworks from `tests/grammar`: equal on any number of ranks, or refused.

The modules of the grammar are imported within the tests: what a test module imports travels to the
ranks by value, and these are to be found there by name.
"""

import os
import time
from typing import Any

import pytest

FRAMEWORKS = ("lightning", "transformers", "accelerate")
SHORT = range(4)
LONG = range(1_000, 1_400)
AT_A_TIME = 25


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.usefixtures("forks")
def test_random_loops_are_equal_on_any_number_of_ranks(framework: str) -> None:
    from grammar.frameworks import compare

    failures, trained = compare(framework, SHORT)
    assert not failures, "\n".join(failures)
    assert trained > 0.4 * len(SHORT)


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.usefixtures("forks")
def test_many_random_loops_are_equal_on_any_number_of_ranks(framework: str, capsys: Any) -> None:
    """Goes through the cases until 300 fit or the time is over, and prints the counts."""
    from grammar import case
    from grammar.frameworks import compare, fits

    seeds = [seed for seed in LONG if fits(case(seed))][:300]
    deadline = time.monotonic() + float(os.environ.get("LOCKSTEP_SOAK_SECONDS", "60"))
    failures: list[str] = []
    total = trained = 0
    for begin in range(0, len(seeds), AT_A_TIME):
        part = seeds[begin : begin + AT_A_TIME]
        found, count = compare(framework, part)
        failures += found
        total = total + len(part)
        trained = trained + count
        if time.monotonic() > deadline:
            break
    with capsys.disabled():
        print(f"\n{framework}: {total} cases, {trained} were trained, {len(failures)} fail")
    assert not failures, "\n".join(failures)
    assert trained > 0.5 * total
