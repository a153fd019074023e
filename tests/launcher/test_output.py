"""The output of ranks: lines, what reaches the terminal, and a log on a full disk."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher.output import MAX_LINE, PROMPT_DELAY, REFRESH, LineSplitter, RankOutput


class Console(io.BytesIO):
    """A terminal that records what is written."""

    def isatty(self) -> bool:
        return True


def shown(text: bytes, log: Path | None = None) -> tuple[bytes, RankOutput]:
    console = Console()
    output = RankOutput(3, log, (console, None))
    os.write(output.streams[0].writing, text)
    os.write(output.streams[1].writing, b"to the log alone\n")
    output.close_writing_ends()
    output.close()
    return console.getvalue(), output


def test_prefixes_are_coloured_on_a_terminal_unless_no_color_is_set(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(b"line\n")[0] == b"\x1b[32m[3]\x1b[0m line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(b"line\n")[0] == b"[3] line\n"


def test_the_last_lines_are_kept_of_both_streams(monkeypatch):
    assert list(shown(b"one\ntwo")[1].last_lines) == [b"one", b"two", b"to the log alone"]


def test_what_was_written_before_a_hidden_traceback_is_shown():
    console = io.BytesIO()
    output = RankOutput(3, None, (None, console))
    traceback = b"Traceback (most recent call last):\n  File train.py\n"
    os.write(output.streams[1].writing, b"no checkpoint\n" + traceback)
    output.hide_stderr("lost the connection")
    os.write(output.streams[1].writing, b"RuntimeError\n")
    output.close_writing_ends()
    output.close()
    assert console.getvalue() == b"[3] no checkpoint\n[3] lost the connection\n"
    assert output.last_lines[-1] == b"RuntimeError"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_log_but_not_the_run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("lockstep.launcher.output.create_file", lambda path, flags: full)
    printed, output = shown(b"line\n", Path("rank-3.log"))
    assert printed == b"[3] line\n"
    assert output.log_error == (
        "rank-3.log is incomplete: writing to it failed: No space left on device"
    )


def test_a_process_that_holds_a_pipe_and_goes_on_writing_does_not_delay_the_end():
    output = RankOutput(3, None, (Console(), None))
    writer = threading.Thread(target=write_until_closed, args=(output.streams[0].writing,))
    writer.start()
    assert output.close()
    writer.join(30)
    assert not writer.is_alive()
    os.close(output.streams[1].writing)


def write_until_closed(descriptor: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        while True:
            os.write(descriptor, b"again\n" * 1000)
    os.close(descriptor)


@given(st.binary(max_size=400).map(lambda data: data.replace(b"\r", b".")), st.data())
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, data):
    lines = LineSplitter()
    whole = LineSplitter()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[lo:hi] for lo, hi in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [line for piece in pieces for line in lines.feed(piece, 0.0)] + lines.take_rest()
    assert found == whole.feed(text, 0.0) + whole.take_rest()
    assert b"\n".join(found) == text.removesuffix(b"\n")


def test_a_prompt_is_shown_after_a_delay_without_an_empty_line_at_its_end():
    lines = LineSplitter()
    assert lines.feed(b"name? ", 10.0) == []
    assert lines.take_overdue(10.0 + PROMPT_DELAY / 2) == []
    assert lines.take_overdue(10.0 + PROMPT_DELAY) == [b"name? "]
    assert lines.take_overdue(20.0) == []
    assert lines.feed(b"\n\nnext\n", 20.0) == [b"", b"next"]


def test_a_progress_bar_shows_its_last_state_at_intervals():
    lines = LineSplitter()
    shown = []
    for step in range(100):
        now = step * 0.1
        shown += lines.feed(f"{step}%\r".encode(), now) + lines.take_overdue(now)
    assert 9 <= len(shown) * REFRESH <= 11
    assert shown[-1] > shown[0]
    assert lines.feed(b"100%\n", 10.0) == [b"100%"]


def test_carriage_returns_before_a_newline_belong_to_it():
    assert LineSplitter().feed(b"a\r\nb\rc\r\r\n", 0.0) == [b"a", b"c"]


def test_a_line_without_an_end_comes_in_pieces():
    lines = LineSplitter()
    found = lines.feed(b"x" * (3 * MAX_LINE + 5), 0.0)
    assert [len(piece) for piece in found] == [MAX_LINE] * 3
    assert lines.take_rest() == [b"x" * 5]
