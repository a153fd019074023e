"""Groups of micro-batches: nodes of the tree, without a deadlock, of a size that pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.tree import nodes_of
from lockstep.pipeline.grouping import (
    MOST_KINDS,
    ROUNDS,
    GroupSizeTuner,
    count_in_flight,
    divide_into_groups,
    find_schedule,
)
from lockstep.pipeline.p2p import GroupSize
from lockstep.pipeline.schedules import (
    NAMES,
    Action,
    build_schedule,
    count_stages,
    get_dependencies,
    get_product,
)

SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.sets(st.integers(0, 40)), SIZES)
def test_groups_are_nodes_of_micro_batches_that_are_all_there(indices, size):
    indices = sorted(indices)
    groups = divide_into_groups(indices, size)
    assert [at for group in groups for at in group] == [*range(len(indices))]
    for group in groups:
        lo = indices[group.start]
        hi = indices[group.stop - 1] + 1
        assert hi - lo == len(group) <= size
        assert nodes_of(range(lo, hi), max(41, hi)) == [(lo, hi)]


@pytest.mark.parametrize(
    ("indices", "size", "lengths"),
    [
        (range(8), 4, [4, 4]),
        (range(6), 4, [4, 2]),
        (range(3, 9), 4, [1, 4, 1]),
        ([0, 1, 3, 4, 5], 2, [2, 1, 2]),
        (range(5), 1, [1] * 5),
    ],
)
def test_groups_are_as_large_as_they_may_be(indices, size, lengths):
    assert [len(group) for group in divide_into_groups([*indices], size)] == lengths


@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 20),
    SIZES,
    st.randoms(use_true_random=False),
)
def test_no_rank_waits_forever_if_some_stages_compute_groups_at_once(name, ranks, m, size, random):
    """A stage sends the results of a joint pass after its end, of single ones one by one."""
    groups = divide_into_groups(range(m), size)
    schedule = build_schedule(find_schedule(name, size), ranks, len(groups))
    stages = count_stages(schedule)
    turns = []
    for actions in schedule:
        own = []
        for action in actions:
            members = [Action(action.kind, action.stage, at) for at in groups[action.microbatch]]
            own += [members] if random.random() < 0.5 else [[one] for one in members]
        turns.append(own)
    done = set()
    moved = True
    while moved:
        moved = False
        for own in turns:
            while own and done.issuperset(
                product for one in own[0] for product in get_dependencies(one, stages)
            ):
                done |= {get_product(one) for one in own.pop(0)}
                moved = True
    assert not any(turns)


def test_weight_gradients_of_groups_are_not_postponed():
    assert find_schedule("zero-bubble", 2) == "1f1b"
    assert find_schedule("zero-bubble", 1) == "zero-bubble"
    assert find_schedule("interleaved", 4) == "interleaved"


@pytest.mark.parametrize(
    ("name", "held"), [("gpipe", [8, 8]), ("1f1b", [2, 1]), ("zero-bubble", [2, 2])]
)
def test_a_schedule_says_how_much_a_stage_holds(name, held):
    schedule = build_schedule(name, 2, 8)
    assert [count_in_flight(schedule[stage], stage) for stage in (0, 1)] == held


ALL = GroupSize(8, 8)


def tuned(seconds, limits=ALL, microbatches=8):
    """Return the sizes of many steps, each of which takes the time of its size."""
    tuner = GroupSizeTuner()
    tuner.limits = limits
    sizes = []
    for _ in range(5 * ROUNDS):
        size = tuner.choose(microbatches, 32)
        tuner.note(microbatches, 32, size, seconds[size])
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 5.0, 2: 4.0, 4: 3.0}, 4),
        ({1: 5.0, 2: 4.0, 4: 4.5}, 2),
        ({1: 5.0, 2: 4.99, 4: 6.0}, 1),  # less than the tolerance
    ],
)
def test_the_fastest_size_is_taken_after_some_steps_with_each(seconds, best):
    sizes = tuned(seconds)
    assert sorted(sizes[: 3 * ROUNDS]) == sorted([*seconds] * ROUNDS)
    assert set(sizes[3 * ROUNDS :]) == {best}


@pytest.mark.parametrize(
    ("limits", "microbatches", "sizes"),
    [
        (GroupSize(), 8, {1}),
        (GroupSize(8, 1), 8, {1}),  # no stage gains
        (GroupSize(1, 8), 8, {1}),  # a stage has no memory
        (ALL, 3, {1}),  # there would be a single group
        (GroupSize(8, 2), 8, {1, 2}),
        (ALL, 16, {1, 2, 4, 8}),
    ],
)
def test_only_sizes_that_may_gain_are_timed(limits, microbatches, sizes):
    seconds = dict.fromkeys((1, 2, 4, 8), 1.0)
    assert set(tuned(seconds, limits, microbatches)) == sizes


def test_a_fixed_size_is_taken_where_it_is_allowed():
    tuner = GroupSizeTuner()
    tuner.fixed = 4
    assert tuner.choose(8, 32) == 1
    tuner.limits = ALL
    assert [tuner.choose(microbatches, 32) for microbatches in (8, 6)] == [4, 1]


def test_a_slow_step_decides_nothing():
    tuner = GroupSizeTuner()
    tuner.limits = GroupSize(2, 2)
    for number in range(2 * ROUNDS):
        size = tuner.choose(8, 32)
        tuner.note(8, 32, size, 100.0 if number < 4 else 1.0 / size)
    assert tuner.choose(8, 32) == 2


def test_few_kinds_of_batches_are_timed():
    tuner = GroupSizeTuner()
    tuner.limits = GroupSize(2, 2)
    for samples in range(3 * MOST_KINDS):
        for _ in range(2):
            tuner.note(8, samples, tuner.choose(8, samples), 1.0)
    assert tuner.choose(8, 3 * MOST_KINDS) == 1
    assert len(tuner._times) == MOST_KINDS
