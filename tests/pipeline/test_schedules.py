"""Schedules: valid for any numbers, with the bubble and the memory of their papers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline import schedules
from lockstep.pipeline.schedules import (
    NAMES,
    Action,
    build_schedule,
    count_stages,
    get_dependencies,
    get_product,
    gpipe,
    interleaved,
    iterate_in_order,
    one_f_one_b,
    zero_bubble,
)
from lockstep.pipeline.simulation import simulate

RANKS = st.integers(1, 9)
MICROBATCHES = st.integers(1, 30)
CHUNKS = st.integers(1, 4)
EVERY = st.sampled_from(NAMES)


def written(actions):
    """Return a rank's actions as text: "F0 B0"."""
    return " ".join(f"{action.kind[0].upper()}{action.microbatch}" for action in actions)


def test_schedules_are_plain_data() -> None:
    assert [written(actions) for actions in gpipe(2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [written(actions) for actions in one_f_one_b(3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [written(actions) for actions in zero_bubble(3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def require_complete(schedule, microbatches: int) -> None:
    """Check that stages are on their ranks, and compute each micro-batch once in each direction."""
    ranks = len(schedule)
    assert all(action.stage % ranks == rank for rank, own in enumerate(schedule) for action in own)
    counts = Counter(action for _, action in iterate_in_order(schedule))  # without a deadlock
    for stage in range(count_stages(schedule)):
        for number in range(microbatches):
            forward, whole, *parts = (
                counts.pop(Action(kind, stage, number), 0)
                for kind in ("forward", "backward", "input", "weight")
            )
            assert (forward, whole, parts) in ((1, 1, [0, 0]), (1, 0, [1, 1]))
    assert not counts


@given(EVERY, RANKS, MICROBATCHES)
def test_every_schedule_is_complete(name: str, ranks: int, microbatches: int) -> None:
    require_complete(build_schedule(name, ranks, microbatches), microbatches)


@given(RANKS, MICROBATCHES, CHUNKS)
def test_interleaved_is_complete_for_any_chunks(
    ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    made_so = interleaved(ranks, microbatches, stages_per_rank)
    require_complete(made_so, microbatches)
    assert count_stages(made_so) == ranks * stages_per_rank


@given(RANKS, MICROBATCHES)
def test_the_bubble_of_gpipe_and_1f1b(ranks: int, microbatches: int) -> None:
    expected = (ranks - 1) / (microbatches + ranks - 1)
    assert simulate(gpipe(ranks, microbatches)).bubble == pytest.approx(expected)
    assert simulate(one_f_one_b(ranks, microbatches)).bubble == pytest.approx(expected)


@given(EVERY, RANKS, MICROBATCHES)
def test_backwards_come_in_the_order_of_the_microbatches(name: str, p: int, m: int) -> None:
    for actions in build_schedule(name, p, m):
        for stage in {action.stage for action in actions}:
            for kinds in (("backward", "input"), ("backward", "weight")):
                own = [a.microbatch for a in actions if a.stage == stage and a.kind in kinds]
                assert own == list(range(m))


@given(EVERY, RANKS, MICROBATCHES)
def test_what_an_action_needs_was_made_before(name: str, p: int, m: int) -> None:
    actions = build_schedule(name, p, m)
    ready = set()
    for _, action in iterate_in_order(actions):
        assert ready.issuperset(get_dependencies(action, count_stages(actions)))
        ready.add(get_product(action))


def test_the_first_stage_splits_no_backward() -> None:
    kinds = [{action.kind for action in actions} for actions in zero_bubble(3, 4)]
    assert kinds == [{"forward", "backward"}, *[{"forward", "input", "weight"}] * 2]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    first, second = one_f_one_b(2, 2)
    schedule = (tuple(sorted(first, key=lambda action: action.kind)), second)
    with pytest.raises(LayoutError, match="deadlocks: rank 0 waits at its action 0, the backward"):
        list(iterate_in_order(schedule))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("2f2b", 2, 4), "no schedule '2f2b'; choose from gpipe, 1f1b"),
        (("1f1b", 2, 4, 2), "stages_per_rank=2: only the schedule interleaved"),
        (("interleaved", 2, 4, 0), "stages_per_rank=0"),
        (("gpipe", 0, 4), "at least one rank"),
        (("zero-bubble", 2, 0), "one micro-batch"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, sentence) -> None:
    with pytest.raises(LayoutError, match=sentence):
        build_schedule(*arguments)


def test_the_drawing_at_the_top_of_the_module() -> None:
    found = simulate(one_f_one_b(3, 4))
    for rank in range(3):
        row = ["."] * round(found.makespan)
        for span in found.spans:
            if span.rank == rank:
                mark = "" if span.action.kind == "forward" else "'"
                for at in range(round(span.begin), round(span.end)):
                    row[at] = f"{span.action.microbatch}{mark}"
        drawn = " ".join(f"{cell:2}" for cell in row).rstrip()
        assert f"    rank {rank}   {drawn}" in (schedules.__doc__ or "")
