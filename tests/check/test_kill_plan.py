"""The plan of the kills of `lockstep chaos`."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.check.kill_plan import PlannedKill, plan_kills


@given(st.integers(1, 40), st.integers(1, 1000), st.integers(2, 16), st.integers(0, 2**63 - 1))
def test_kills_lie_within_the_training_in_the_order_of_their_moments(kills, steps, nprocs, seed):
    found = plan_kills(kills, steps, nprocs, seed)
    assert len(found) == kills
    assert found == sorted(found, key=lambda each: (each.step, each.part))
    for each in found:
        assert 0 <= each.step < steps
        assert 0 <= each.part < 1
        assert 0 <= each.rank < nprocs


def test_a_seed_names_the_same_kills_everywhere():
    """Seeds in reports of failures must stay valid."""
    assert [(each.step, each.rank) for each in plan_kills(4, 100, 4, 1)] == [
        (12, 3), (17, 0), (32, 3), (60, 1),
    ]  # fmt: skip
    assert plan_kills(20, 100, 4, 1) != plan_kills(20, 100, 4, 2)


def test_every_step_and_rank_can_be_hit():
    found = plan_kills(2000, 5, 3, seed=0)
    assert {each.step for each in found} == set(range(5))
    assert {each.rank for each in found} == set(range(3))
    assert min(each.part for each in found) < 0.01
    assert max(each.part for each in found) > 0.99
    assert isinstance(found[0], PlannedKill)
