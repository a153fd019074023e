"""Tracks: where a page draws what."""

from lockstep.record.timeline import Timeline, Work
from lockstep.report.track import LANES, WIDTH, tracks

WORKS = (Work(0, "forward", 0, 0.5, 0, 3), Work(1, "zap", 0.5, 0.501, 1, 4))


def test_timelines_share_an_axis():
    longer = Timeline("longer", 1, (Work(0, "forward", 0, 2.0, 0, 0),))
    short, long = tracks([Timeline("short", 2, WORKS), longer])
    assert short.ticks == long.ticks
    assert short.lanes[0].bars[0].width * 4 == long.lanes[0].bars[0].width == WIDTH
    assert long.ticks[-1].label == "2 s"


def test_narrow_pieces_have_no_label_but_a_place():
    one, _ = tracks([Timeline("one", 2, WORKS), Timeline("", 1, (Work(0, "forward", 0, 1),))])
    (wide,), (narrow,) = (lane.bars for lane in one.lanes)
    assert (wide.label, wide.middle) == ("3", 25)
    assert (narrow.label, narrow.kind) == ("", "other")
    assert narrow.width >= 1
    assert wide.words == "rank 0: forward of micro-batch 3 on stage 0, 500 ms"


def test_ranks_beyond_the_page_are_counted():
    many = tuple(Work(rank, "compute", 0, 1) for rank in range(50))
    (one,) = tracks([Timeline("many", 50, many)])
    assert (len(one.lanes), one.hidden) == (LANES, 50 - LANES)
