"""What a rank exchanges and records on simulated ranks: flat, or with the logarithm."""

import math

import pytest

from benchmarks import growth
from lockstep.comm.collectives import FRAME

FEW, MANY = 128, 1024


@pytest.fixture(scope="module")
def figures():
    return {ranks: growth.measure(ranks) for ranks in (FEW, MANY)}


def require_logarithmic(ranks, row, exchanges):
    """Check messages and bytes: at most two per level of the tree, and two on average."""
    levels = math.ceil(math.log2(ranks))
    assert row["messages_max"] <= exchanges * 2 * levels
    assert row["bytes_max"] <= row["messages_max"] * FRAME
    assert row["messages_mean"] <= exchanges * 4


@pytest.mark.parametrize(("name", "exchanges"), [("step", 2), ("evaluation", 1), ("comparison", 1)])
def test_messages_and_bytes_of_a_rank(figures, name, exchanges):
    for ranks, found in figures.items():
        require_logarithmic(ranks, found[name], exchanges)


def test_the_record_and_the_summary_do_not_grow(figures):
    few, many = figures[FEW], figures[MANY]
    assert abs(many["record_bytes"] - few["record_bytes"]) < 100
    assert abs(many["summary_bytes"] - few["summary_bytes"]) < 200


def test_a_rank_makes_the_same_requests_at_the_store_on_any_number_of_ranks(figures):
    counts = {found["store"]["median"][0] for found in figures.values()}
    assert len(counts) == 1
    assert counts.pop() < 10
    for ranks, found in figures.items():
        assert found["store"]["busiest"][0] <= ranks + 20


@pytest.mark.stress
def test_8192_ranks():
    found = growth.measure(8192)
    require_logarithmic(8192, found["step"], 2)
    assert found["record_bytes"] < 1000
    assert found["summary_bytes"] < FRAME
