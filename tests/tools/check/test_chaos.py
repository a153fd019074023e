"""The undisturbed run that `lockstep chaos` compares with, the plan of the kills, the verdict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.kernel.errors import UsageError
from lockstep.tools.check.chaos import ChaosResult, read_baseline
from lockstep.tools.check.killer import Kill, plan_kills


def test_the_baseline_is_a_run_that_came_to_its_end(tmp_path):
    baseline = read_baseline(records.write(tmp_path / "whole", records.whole()), 2.0)
    assert baseline.digest == records.END["digest"]
    assert (baseline.steps, baseline.step_seconds) == (20, pytest.approx(0.01))
    for name, lines in {
        "going": records.whole()[:-1],
        "failed": [*records.whole()[:-1], records.END | {"state": "failed"}],
        "empty": [records.HEADER, records.END],
    }.items():
        with pytest.raises(UsageError, match="has no digest of its weights to compare with"):
            read_baseline(records.write(tmp_path / name, lines), 2.0)


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


@pytest.mark.parametrize(
    "fields",
    [{"digest": "cd"}, {"digest": None}, {"planned": 2}, {"failure": "rank 0 failed: oops"}],
)
def test_a_run_passes_only_with_all_kills_and_the_same_bits(tmp_path, fields):
    baseline = read_baseline(records.write(tmp_path / "whole", records.whole()), 2.0)
    values = {
        "baseline": baseline, "folder": tmp_path / "b", "digest": baseline.digest, "planned": 1,
        "kills": [Kill(1, 1, 6)], "seconds_lost": [0.25, 0.5], "repeated": 3, "rounds": 2,
        "seconds": 3.0,
    }  # fmt: skip
    assert ChaosResult(**values).is_passed
    assert not ChaosResult(**values | fields).is_passed
    plain = ChaosResult(**values).plain()
    assert plain["repeated_microbatches"] == 3
    assert (plain["median_seconds_lost"], plain["max_seconds_lost"]) == (0.375, 0.5)
