"""Checks files before a commit: text must be well-formed, and files must be small.

    python dev/check_files.py FILE ...

A text must end with exactly one newline, and have neither trailing spaces nor conflict markers.
Markdown may have trailing spaces, because two of them are a line break. No file may be larger than
1 MiB: data and results belong elsewhere. Prints one line per problem; the exit status is 1 if there
is any. `make check` runs it on every tracked file.
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
    """Yield the problems of one file."""
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
