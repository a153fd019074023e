"""The schedule: valid for any numbers, with the bubble and the memory of its paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline import schedule
from lockstep.pipeline.schedule import order_actions, simulate

RANKS = st.integers(1, 9)
MICROBATCHES = st.integers(1, 30)


def written(actions):
    """Return a rank's actions as text: "F0 B0"."""
    return " ".join(f"{action.kind[0].upper()}{action.microbatch}" for action in actions)


def test_the_order_of_the_actions() -> None:
    assert [written(order_actions(stage, 3, 4)) for stage in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(RANKS, MICROBATCHES)
def test_every_micro_batch_is_computed_in_order_and_few_are_held(ranks: int, m: int) -> None:
    for stage in range(ranks):
        actions = order_actions(stage, ranks, m)
        held = [0]
        for kind in ("forward", "backward"):
            assert [a.microbatch for a in actions if a.kind == kind] == list(range(m))
        for action in actions:
            held.append(held[-1] + (1 if action.kind == "forward" else -1))
        assert min(held) == held[-1] == 0
        assert max(held) == min(ranks - stage, m)


@given(RANKS, MICROBATCHES)
def test_the_bubble_and_no_deadlock(ranks: int, m: int) -> None:
    spans = simulate(ranks, m)
    assert len(spans) == 2 * ranks * m
    end = max(span.end for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    assert 1 - busy / (ranks * end) == pytest.approx((ranks - 1) / (m + ranks - 1))


@pytest.mark.parametrize(("ranks", "m"), [(0, 4), (2, 0)])
def test_what_cannot_be_scheduled_is_refused(ranks: int, m: int) -> None:
    with pytest.raises(LayoutError, match="at least one rank and one micro-batch"):
        simulate(ranks, m)


def test_the_drawing_at_the_top_of_the_module() -> None:
    spans = simulate(3, 4)
    for rank in range(3):
        row = ["."] * 18
        for span in spans:
            if span.rank == rank:
                mark = "" if span.action.kind == "forward" else "'"
                for at in range(round(span.begin), round(span.end)):
                    row[at] = f"{span.action.microbatch}{mark}"
        drawn = " ".join(f"{cell:2}" for cell in row).rstrip()
        assert f"    rank {rank}   {drawn}" in (schedule.__doc__ or "")
