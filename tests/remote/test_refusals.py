"""Refusals: one line at once, then one for all that came since."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.remote.refusals import INTERVAL, Refusals


def test_the_first_is_reported_at_once_and_the_others_together():
    refusals = Refusals()
    assert refusals.due() is None
    refusals.note("10.0.0.1", "it holds another key")
    assert refusals.due() <= 0.0
    first = refusals.report(100.0)
    assert first == "a connection from 10.0.0.1 was refused: it holds another key"
    assert refusals.due() is None
    for _ in range(1999):
        refusals.note("10.0.0.2", "it hung up")
    refusals.note("10.0.0.3", "it holds another key")
    assert refusals.due() == 100.0 + INTERVAL
    assert refusals.report(110.0) == (
        "2,000 connections were refused, the last one from 10.0.0.3: "
        "it hung up (1,999); it holds another key (1)"
    )


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=300))
def test_every_refusal_is_counted_and_lines_are_rare(gaps):
    refusals, now, lines = Refusals(), 0.0, []
    for gap in gaps:
        now += gap
        refusals.note("10.0.0.1", "it hung up")
        if refusals.due() <= now:
            lines.append(refusals.report(now))
    if refusals.due() is not None:
        lines.append(refusals.report(now))
    assert len(lines) <= 2 + now / INTERVAL
    counts = [1 if line.startswith("a ") else int(line.split()[0]) for line in lines]
    assert sum(counts) == len(gaps)
