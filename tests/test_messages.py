"""Control characters that become visible."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm
from lockstep.messages import escape_control, log


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 漢字, 🙂 and \\x1b\n\tsecond line", None),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("one\rtwo\x00\x7f", "one\\rtwo\\x00\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb\u2066c\u2028d\ufeff", "a\\u202eb\\u2066c\\u2028d\\ufeff"),
        (b"\xff.jsonl".decode("utf-8", "surrogateescape"), "\\udcff.jsonl"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert escape_control(text) == (text if shown is None else shown)


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_left_prints_and_moves_nothing(text):
    found = escape_control(text)
    found.encode()
    assert all(char.isprintable() or char in "\n\t" or ord(char) > 0x9F for char in found)
    assert escape_control(found) == found


def test_say_shows_them(capsys):
    log("rank 0 is \x1b[31mred")
    assert capsys.readouterr().err == "lockstep: rank 0 is \\x1b[31mred\n"


def test_the_command_line_shows_them_in_an_error(tmp_path):
    command = [*warm.LOCKSTEP, "report", "\x1b[2J"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"there is no run at \\x1b[2J" in done.stderr


def test_say_writes_nothing_to_standard_output_if_standard_error_is_closed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    log("a sentence")
    assert capsys.readouterr().out == ""
