"""Renderings of a timeline as text, as a picture and as lanes of a page."""

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.record.timeline import Timeline, TimelineSpan
from lockstep.tools.report.timeline_rendering import (
    HTML_WIDTH,
    MAX_LANES,
    layout_timelines,
    render_lines,
    text_legend,
    text_scale,
)

TWO = Timeline(
    "two",
    2,
    (
        TimelineSpan(0, "forward", 0, 1, 0, 0),
        TimelineSpan(0, "forward", 1, 2, 0, 1),
        TimelineSpan(0, "backward", 4, 6, 0, 0),
        TimelineSpan(1, "forward", 1, 2, 1, 0),
        TimelineSpan(1, "input", 2, 3, 1, 0),
        TimelineSpan(1, "weight", 3, 4, 1, 0),
    ),
)


def plain(timeline, room):
    return [line.plain for line in render_lines(timeline, text_scale([timeline], room))]


def test_text_is_readable_without_colors():
    assert plain(TWO, 100) == ["rank 0  0--1--      0=====", "rank 1     0--0<<0++"]
    assert text_legend(TWO) == [
        "0-- forward",
        "0== backward",
        "0<< gradient of the inputs",
        "0++ gradients of the weights",
    ]


def test_kinds_have_colors_on_a_color_terminal():
    console = Console(color_system="standard", force_terminal=True, no_color=False, width=80)
    with console.capture() as drawn:
        console.print(render_lines(TWO, 3)[0])
    assert "\033[37;44m0--" in drawn.get()


def test_timelines_below_each_other_have_one_scale():
    longer = Timeline("longer", 1, (TimelineSpan(0, "forward", 0, 40, 0, 0),))
    assert text_scale([TWO, longer], 48) == 1
    assert text_scale([TWO], 48) == 3


times = st.floats(0, 10)
spans = st.lists(st.tuples(st.integers(0, 2), times, times, st.integers(0, 200)), max_size=30)


@given(spans, st.integers(1, 200))
def test_no_line_is_wider_than_the_terminal(rows, room):
    """Even for overlapping spans and spans of length zero."""
    made = [TimelineSpan(rank, "forward", min(a, b), max(a, b), 0, j) for rank, a, b, j in rows]
    timeline = Timeline("any", 3, tuple(made))
    assert all(len(line) <= max(room, 9) + 1 for line in plain(timeline, room))


SPANS = (TimelineSpan(0, "forward", 0, 0.5, 0, 3), TimelineSpan(1, "zap", 0.5, 0.501, 1, 4))


def test_timelines_on_a_page_share_an_axis():
    longer = Timeline("longer", 1, (TimelineSpan(0, "forward", 0, 2.0, 0, 0),))
    short, long = layout_timelines([Timeline("short", 2, SPANS), longer])
    assert short.ticks == long.ticks
    assert short.lanes[0].spans[0].width * 4 == long.lanes[0].spans[0].width == HTML_WIDTH
    assert long.ticks[-1].label == "2 s"


def test_ranks_that_are_not_drawn_are_counted():
    many = tuple(TimelineSpan(rank, "compute", 0, 1) for rank in range(50))
    (one,) = layout_timelines([Timeline("many", 50, many)])
    assert (len(one.lanes), one.num_hidden) == (MAX_LANES, 50 - MAX_LANES)
