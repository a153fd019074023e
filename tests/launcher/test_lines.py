"""A rank's bytes in lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher.lines import LONGEST, PATIENCE, REFRESH, Lines


@given(st.binary(max_size=400).map(lambda data: data.replace(b"\r", b".")), st.data())
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, data):
    lines, whole = Lines(), Lines()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[lo:hi] for lo, hi in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [line for piece in pieces for line in lines.feed(piece, 0.0)] + lines.rest()
    assert found == whole.feed(text, 0.0) + whole.rest()
    assert b"\n".join(found) == text.removesuffix(b"\n")


def test_an_unfinished_line_is_shown_after_a_moment_and_its_end_is_no_empty_line():
    lines = Lines()
    assert lines.feed(b"name? ", 10.0) == []
    assert lines.due(10.0 + PATIENCE / 2) == []
    assert lines.due(10.0 + PATIENCE) == [b"name? "]
    assert lines.due(20.0) == []
    assert lines.feed(b"\n\nnext\n", 20.0) == [b"", b"next"]


def test_a_progress_bar_is_shown_once_a_while_in_its_last_state():
    lines, shown = Lines(), []
    for step in range(100):
        now = step * 0.1
        shown += lines.feed(f"{step}%\r".encode(), now) + lines.due(now)
    assert 9 <= len(shown) * REFRESH <= 11
    assert shown[-1] > shown[0]
    assert lines.feed(b"100%\n", 10.0) == [b"100%"]


def test_carriage_returns_before_a_newline_belong_to_it():
    assert Lines().feed(b"a\r\nb\rc\r\r\n", 0.0) == [b"a", b"c"]


def test_a_line_without_an_end_comes_in_pieces():
    lines = Lines()
    found = lines.feed(b"x" * (3 * LONGEST + 5), 0.0)
    assert [len(piece) for piece in found] == [LONGEST] * 3
    assert lines.rest() == [b"x" * 5]
