"""Lanes: readable as plain text, fitted to the room."""

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.record.timeline import Timeline, Work
from lockstep.report.lanes import draw, legend, scale_of

TWO = Timeline(
    "two",
    2,
    (
        Work(0, "forward", 0, 1, 0, 0),
        Work(0, "forward", 1, 2, 0, 1),
        Work(0, "backward", 4, 6, 0, 0),
        Work(1, "forward", 1, 2, 1, 0),
        Work(1, "input", 2, 3, 1, 0),
        Work(1, "weight", 3, 4, 1, 0),
    ),
)


def plain(timeline, room):
    return [line.plain for line in draw(timeline, scale_of([timeline], room))]


def test_lanes_read_without_colour():
    assert plain(TWO, 100) == ["rank 0  0--1--      0=====", "rank 1     0--0<<0++"]
    assert legend(TWO) == [
        "0-- forward",
        "0== backward",
        "0<< gradient of the inputs",
        "0++ gradients of the weights",
    ]


def test_kinds_have_colours_on_a_terminal_that_shows_them():
    console = Console(color_system="standard", force_terminal=True, no_color=False, width=80)
    with console.capture() as drawn:
        console.print(draw(TWO, 3)[0])
    assert "\033[37;44m0--" in drawn.get()


def test_narrow_lanes_lose_labels_before_places():
    wide = Timeline("wide", 1, (Work(0, "forward", 0, 1, 0, 10), Work(0, "backward", 1, 3, 0, 10)))
    assert plain(wide, 11) == ["rank 0  -10"]


def test_timelines_under_each_other_have_one_scale():
    longer = Timeline("longer", 1, (Work(0, "forward", 0, 40, 0, 0),))
    assert scale_of([TWO, longer], 48) == 1
    assert scale_of([TWO], 48) == 3


times = st.floats(0, 10)
works = st.lists(st.tuples(st.integers(0, 2), times, times, st.integers(0, 200)), max_size=30)


@given(works, st.integers(1, 200))
def test_no_line_is_wider_than_the_room(rows, room):
    """Whatever the record says: work that overlaps, work of no length."""
    made = [Work(rank, "forward", min(a, b), max(a, b), 0, j) for rank, a, b, j in rows]
    timeline = Timeline("any", 3, tuple(made))
    assert all(len(line) <= max(room, 9) + 1 for line in plain(timeline, room))
