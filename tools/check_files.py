"""Checks files before a commit: text ends with one newline, and no file is large.

    python tools/check_files.py FILE ...

A text must end with exactly one newline, have no trailing spaces (Markdown may: two of them
are a line break) and no conflict markers. No file may have more than 1 MiB: data and results
belong elsewhere. Prints one line per problem; the exit status is 1 if there is any. `make check`
runs it on every tracked file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LARGEST = 1 << 20  # bytes
MARKER = re.compile(rb"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
TRAILING = re.compile(rb"[ \t]+$", re.MULTILINE)


def find_problems(path: Path) -> Iterator[str]:
    """Yield what is wrong with one file."""
    if path.is_symlink() or not path.is_file():
        return
    content = path.read_bytes()
    if len(content) > LARGEST:
        yield f"has {len(content):,} bytes, and may have {LARGEST:,}"
    if b"\0" in content or not content:
        return
    if not content.endswith(b"\n"):
        yield "does not end with a newline"
    elif content.endswith(b"\n\n"):
        yield "ends with an empty line"
    patterns = {"a conflict marker": MARKER}
    if path.suffix not in (".md", ".svg", ".ipynb"):
        patterns["trailing whitespace"] = TRAILING
    for name, pattern in patterns.items():
        if found := pattern.search(content):
            line = content.count(b"\n", 0, found.start()) + 1
            yield f"has {name} in line {line}"


def main(paths: list[str]) -> int:
    """Print the problems of all files; return the exit status."""
    problems = [f"{path} {problem}" for path in paths for problem in find_problems(Path(path))]
    print("".join(f"{problem}\n" for problem in problems), end="")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
