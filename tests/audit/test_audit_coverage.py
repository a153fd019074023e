"""After how many steps the audit finds a fault: the formula of the page, and a simulation of it."""

from __future__ import annotations

import math
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.audit_plan import plan_audit
from lockstep.data.assignment import assign_microbatches, on_one_host

PAGE = Path(__file__).parents[2] / "docs/concepts/audit.md"
MICROBATCHES = 8
TRIALS = 4000


def formula(frequency, ranks, every):
    """Return the number of steps after which a fault is found with a probability of 95%."""
    computations = math.log(0.05) / math.log(1 - frequency) if frequency < 1 else 1
    return every * ranks / 2 * computations


def simulate(frequency, ranks, every, microbatches=MICROBATCHES):
    """Return the steps after which faults were found, of one faulty rank after another.

    Each computation of the faulty rank in an audit is wrong with the frequency.
    """
    spans = assign_microbatches(microbatches, on_one_host(ranks))
    longest = int(8 * formula(frequency, ranks, every)) + 100 * every
    steps = [step for step in range(longest) if AuditConfig(every).is_audited(step)]
    plans = [plan_audit(turn, spans) for turn in range(len(steps))]
    generator = np.random.default_rng(0)
    found = []
    for rank in range(ranks):
        checked = [
            step
            for step, plan in zip(steps, plans, strict=True)
            for replica in (plan.owner, plan.repeater)
            if replica == rank
        ]
        computations = generator.geometric(frequency, TRIALS // ranks) - 1
        found.append(np.array(checked)[computations])
    return np.concatenate(found)


@pytest.mark.parametrize("every", [100, 10])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("frequency", [1, 0.1, 0.01])
def test_the_formula_is_what_a_simulation_finds(frequency, ranks, every):
    found = simulate(frequency, ranks, every)
    expected = formula(frequency, ranks, every)
    extra = 6 * every  # the audited steps at the beginning are earlier than their share
    assert expected * 0.95 - extra <= np.quantile(found, 0.95) <= expected * 1.05
    if frequency < 0.1:  # as many wrong results are lost before, however seldom they are
        lost = found.mean() * frequency * MICROBATCHES / ranks
        assert lost == pytest.approx(every * MICROBATCHES / 2, rel=0.1)


def test_the_table_of_the_page():
    rows = re.findall(r"^\| ([\d.,]+) ((?:\| [\d,]+ ){4})\|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for frequency, cells in rows:
        shown = [int(cell.replace(",", "")) for cell in re.findall(r"[\d,]+", cells)]
        places = [(ranks, every) for every in (100, 10) for ranks in (2, 8)]
        exact = [formula(float(frequency), *place) for place in places]
        assert shown == [round(steps, 1 - int(math.log10(steps))) for steps in exact]


def test_every_rank_and_micro_batch_has_its_turn():
    spans = assign_microbatches(MICROBATCHES, on_one_host(3))
    plans = [plan_audit(turn, spans) for turn in range(3 * 3 * 2)]
    assert {plan.microbatch for plan in plans} == set(range(MICROBATCHES))
    pairs = {(plan.owner, plan.repeater) for plan in plans}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    audited = (step for step in range(1000) if AuditConfig(100).is_audited(step))
    assert list(islice(audited, 10)) == [0, 1, 2, 5, 10, 20, 50, 100, 200, 300]
