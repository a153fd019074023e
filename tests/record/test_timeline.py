"""The timeline: its figures, from work written by hand."""

import pytest

from lockstep.record.timeline import Timeline, Work, shared


def by_hand(*rows, ranks=2):
    """Return a timeline of (rank, kind, begin, end, stage, micro-batch)."""
    return Timeline("by hand", ranks, tuple(Work(*row) for row in rows))


TWO = by_hand(
    (0, "forward", 0, 1, 0, 0),
    (1, "forward", 1, 2, 1, 0),
    (1, "backward", 2, 4, 1, 0),
    (0, "backward", 4, 5, 0, 0),
)


def test_length_bubble_and_balance():
    assert TWO.length == 5
    assert TWO.busy == [2, 3]
    assert TWO.bubble == pytest.approx(1 - 5 / 10)
    assert TWO.balance == pytest.approx(2.5 / 3)


def test_waiting_is_no_work():
    waits = by_hand((0, "compute", 0, 2), (1, "compute", 0, 1), (1, "waiting", 1, 2))
    assert waits.busy == [2, 1]
    assert waits.bubble == pytest.approx(0.25)


def test_nothing_has_no_length():
    nothing = by_hand(ranks=0)
    assert (nothing.length, nothing.bubble, nothing.balance) == (0, 0, 1)
    assert shared([nothing, TWO]) == 5


def test_labels_tell_the_stages_of_a_rank_apart():
    several = by_hand((0, "forward", 0, 1, 0, 3), (1, "forward", 1, 2, 1, 3), (0, "x", 2, 3, 2, 3))
    assert [several.label(work) for work in several.works] == ["3a", "3a", "3b"]
    assert TWO.label(TWO.works[0]) == "0"
    assert TWO.label(Work(0, "update", 0, 1)) == ""


def test_replicas_share_their_stages():
    replicas = by_hand(
        *((rank, "forward", 0, 1, rank % 2, rank // 2) for rank in range(4)), ranks=4
    )
    assert (replicas.stages, replicas.width) == (2, 2)
    assert replicas.label(replicas.works[3]) == "1"


def test_some_kinds_alone_begin_with_their_first_piece():
    alone = TWO.only(["backward"])
    assert [(work.begin, work.end) for work in alone.works] == [(0, 2), (2, 3)]
    assert (alone.origin, alone.length) == (2, 3)
    assert TWO.only([]).works == ()


def test_kinds_come_in_their_order_and_unknown_ones_last():
    mixed = by_hand((0, "zap", 0, 1), (0, "update", 1, 2), (0, "forward", 2, 3))
    assert mixed.kinds == ["forward", "update", "zap"]


def test_work_in_words():
    assert (
        Work(0, "input", 0, 1, 2, 3).words == "gradient of the inputs of micro-batch 3 on stage 2"
    )
    assert Work(0, "update", 0, 1).words == "optimizer"
