"""Text for the terminal: wrapping, and tables."""

import pytest

from lockstep.tools.report import terminal

NAMES = ["run", "state", "layout", "digest"]
ROWS = [["night", "done", "2 replicas, gloo", "abcd"], ["day", "died", "", ""]]


@pytest.fixture
def narrow(monkeypatch):
    def set_width(columns):
        monkeypatch.setattr(terminal, "terminal_width", lambda: columns)

    return set_width


def test_a_table_without_a_terminal_is_never_wrapped(capsys):
    terminal.print_table(NAMES, [["x" * 300, "done", "y" * 300, "z"]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["x" * 300, "done", "y" * 300, "z"]


def test_columns_are_aligned(capsys):
    terminal.print_table(NAMES, ROWS)
    head, rule, first, second = capsys.readouterr().out.splitlines()
    assert head.index("state") == first.index("done") == second.index("died")
    assert set(rule) == {"─"}


def test_numbers_are_aligned_to_the_right(capsys):
    terminal.print_table(["name", "seconds"], [["a", "1"], ["b", "23456.7"]], numbers=["seconds"])
    _, _, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" 1")
    assert len(first) == len(second)


def test_optional_columns_are_left_out_first(narrow, capsys):
    narrow(25)
    terminal.print_table(NAMES, ROWS, optional=("layout", "digest"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "digest"]
    assert max(map(len, lines)) <= 25


def test_cells_are_wrapped_in_a_narrow_terminal(narrow, capsys):
    narrow(32)
    terminal.print_table(NAMES, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 32
    assert lines[0].split() == NAMES
    assert "replicas," in " ".join(lines)


def test_sentences_are_wrapped_between_words(narrow):
    narrow(20)
    assert terminal.wrap("one two three four five six") == ["one two three four", "five six"]
    assert terminal.wrap("b c", "    ", "a   ") == ["a   b c"]
