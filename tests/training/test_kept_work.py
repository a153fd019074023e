"""What the ranks have computed of a step when one is lost is kept: nothing is computed twice."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, split, total
from lockstep.training.kept_work import LeavesShare, assign_rest, hold_nodes
from training.elastic_training import Training, train


def written(low: int, high: int) -> str:
    """Write a node out by the definition."""
    if high - low == 1:
        return str(low)
    middle = split(low, high)
    return f"({written(low, middle)}+{written(middle, high)})"


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_the_rest_is_divided_evenly_and_ends_in_the_same_tree(
    leaves: int, ranks: int, data: st.DataObject
) -> None:
    owned = split_evenly(leaves, ranks)
    computed = [[*own[: data.draw(st.integers(0, len(own)))]] for own in owned]
    lost = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    kept = [own for rank, own in enumerate(computed) if rank not in lost]
    rest = assign_rest(kept, leaves)
    everything = [leaf for own in [*kept, *rest] for leaf in own]
    assert sorted(everything) == list(range(leaves))
    assert max(map(len, rest)) - min(map(len, rest)) <= 1

    held: dict[tuple[int, int], str] = {}
    for own, more in zip(kept, rest, strict=True):
        sums = TreeAccumulator[str](leaves, lambda left, right: f"({left}+{right})")
        for leaf in [*own, *more]:
            sums.put((leaf, leaf + 1), str(leaf))
        assert sorted(sums.nodes) == hold_nodes([*own, *more], leaves)
        held |= sums.nodes
    assert total(held, leaves, lambda left, right: f"({left}+{right})") == written(0, leaves)


@given(st.integers(1, 100), st.integers(1, 8), st.data())
def test_a_share_of_leaves_has_their_samples(samples: int, microbatches: int, data: Any) -> None:
    cuts = split_evenly(samples, min(samples, microbatches))
    leaves = tuple(sorted(data.draw(st.sets(st.integers(0, len(cuts) - 1)))))
    share = LeavesShare(microbatches, ((0,),), 0, leaves=leaves)
    assert share.pieces(samples) == tuple((leaf, cuts[leaf]) for leaf in leaves)


STEPS = 24
# The loss of a rank in its first micro-batch, in the middle of its share, in a backward, in the
# exchange, with all gradients added, before the barrier; and of two ranks at once.
PLAN: list[Any] = [
    ["forward", [0], 0],
    ["forward", [2], 1],
    ["backward", [1], 2],
    ["gathered", [1], 1],
    ["merged", [2], 0],
    ["prepared", [0], 0],
    ["forward", [0, 1], 1],
]


def require_computed_once(training: Training) -> None:
    """Check that processes that were not killed have computed no micro-batch twice."""
    counts = Counter(each for computed in training.computed.values() for each in computed)
    assert sum(counts.values()) > 0
    assert {each: count for each, count in counts.items() if count > 1} == {}
    assert [line["repeated_microbatches"] for line in training.rounds] == [0] * len(training.rounds)
    assert sum(len(line["lost"]) for line in training.rounds) >= len(PLAN)


@pytest.mark.parametrize("form", ["step", "nested"])
@pytest.mark.timeout(240)
def test_no_microbatch_is_computed_twice(tmp_path, monkeypatch, form) -> None:
    monkeypatch.setenv("LOCKSTEP_PORTABLE", "0")  # no trial of joint passes computes them again
    disturbed = train(tmp_path / "run", PLAN, steps=STEPS, form=form, audit="0")
    undisturbed = train(tmp_path / "undisturbed", [], steps=STEPS, form=form, audit="0")
    assert disturbed.digests == undisturbed.digests
    assert disturbed.losses == undisturbed.losses
    assert disturbed.evaluations == undisturbed.evaluations
    assert "in new processes" not in disturbed.output
    require_computed_once(disturbed)


@pytest.mark.timeout(240)
def test_a_rank_that_joins_gets_the_registered_objects_without_checkpoints(tmp_path) -> None:
    """The moving average of the weights began again on the rank that had joined."""
    plan: list[Any] = [["backward", [1], 2], ["callback", [0], 0]]
    disturbed = train(tmp_path / "run", plan, steps=8, form="unsaved", audit="0")
    undisturbed = train(tmp_path / "undisturbed", [], steps=8, form="unsaved", audit="0")
    assert len([line for line in disturbed.rounds if line["lost"]]) == len(plan)
    assert disturbed.digests == undisturbed.digests
    assert disturbed.losses == undisturbed.losses


@pytest.mark.timeout(240)
def test_a_body_that_is_repeated_says_how_many_microbatches_it_repeats(tmp_path) -> None:
    plan: list[Any] = [["backward", [1], 1]]
    disturbed = train(tmp_path / "run", plan, steps=8, form="attempts", audit="0")
    (line,) = [line for line in disturbed.rounds if line["lost"]]
    assert 2 <= line["repeated_microbatches"] <= 3
    counts = Counter(each for computed in disturbed.computed.values() for each in computed)
    assert max(counts.values()) == 2
