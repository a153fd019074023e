"""No false alarm: every step of the grammar's models is audited, and nothing is reported.

LOCKSTEP_SOAK_SECONDS=3600 python -m pytest -m stress tests/audit/test_audit_false_alarms.py
"""

from __future__ import annotations

import itertools
import os
import time
from functools import partial

import pytest

AT_A_TIME = 40
STEPS = 60
LAYOUTS = ((2, False), (2, True), (3, False), (1, False))
"""Numbers of ranks, and whether the model is sharded."""
ENOUGH = 20_000  # audited steps


def train(seeds, layout):
    from grammar.audited import train_audited  # ranks find it by its name

    return train_audited(seeds, layout, STEPS)


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_no_false_alarm(ranks, capsys):
    """Trains models until 20,000 steps were audited or the time is over, and prints the number."""
    from grammar.audited import find_seeds
    from grammar.layouts import Layout

    deadline = time.monotonic() + float(os.environ.get("LOCKSTEP_SOAK_SECONDS", "60"))
    first = 30_001
    audited = 0
    for world, sharded in itertools.cycle(LAYOUTS):
        layout = Layout(world, sharded=sharded)
        seeds = find_seeds(first, AT_A_TIME, layout)
        compared = ranks(partial(train, seeds, layout), world, timeout=900)
        assert set(compared) == {compared[0]}
        first = seeds[-1] + 1
        audited = audited + compared[0]
        with capsys.disabled():
            print(f"\nseeds up to {seeds[-1]}: {audited} audited steps", flush=True)
        if audited >= ENOUGH or time.monotonic() > deadline:
            break
    assert audited > AT_A_TIME * STEPS / 2
