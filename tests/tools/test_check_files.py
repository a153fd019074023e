"""Each problem of a file is named with its line; files without problems pass."""

import pytest

from tools.check_files import LARGEST, find_problems, main

MARKER = "<" * 7  # written in one piece, it would be found in this file


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.py", b"x = 1", "does not end with a newline"),
        ("a.py", b"x = 1\n\n", "ends with an empty line"),
        ("a.py", b"x = 1\ny = 2 \n", "has trailing whitespace in line 2"),
        ("a.md", f"one\n{MARKER} HEAD\n".encode(), "has a conflict marker in line 2"),
        ("a.bin", bytes(LARGEST + 1), f"has {LARGEST + 1:,} bytes, and may have {LARGEST:,}"),
    ],
)
def test_a_problem_is_named(tmp_path, capsys, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content)
    assert main([str(path)]) == 1
    assert capsys.readouterr().out == f"{path} {problem}\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.py", b"x = 1\n"), ("empty", b""), ("a.md", b"a line break  \n"), ("a.bin", b"\0 \n\n")],
)
def test_a_good_file_has_no_problem(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert not list(find_problems(path))
