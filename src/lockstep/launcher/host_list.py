"""Slurm's host lists: "gpu[01-02,07],login" stands for gpu01, gpu02, gpu07 and login."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from lockstep.kernel.errors import LaunchEnvironmentError

__all__ = ["expand_host_list"]

# A comma inside brackets separates numbers, one outside separates names.
SEPARATOR = re.compile(r",(?![^\[\]]*\])")
NAME = re.compile(r"(?:[^\[\],\s]+|\[[\d,-]+\])+")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
MAX_RANGE = 65_536  # hosts: the most that Slurm supports


def expand_host_list(text: str) -> Iterator[str]:
    """Return the host names that a list stands for, in order, one by one.

    Numbers keep the width that the first of a range has, and a name may contain several
    ranges: "a[1-2]b[09-10]" gives a1b09, a1b10, a2b09 and a2b10.

    Args:
        text: The list, as in SLURM_STEP_NODELIST.

    Raises:
        LaunchEnvironmentError: The text is not such a list.
    """
    for name in SEPARATOR.split(text):
        if not NAME.fullmatch(name):
            raise LaunchEnvironmentError(
                f"{text!r} is not a list of hosts as Slurm writes it, such as gpu[01-04,07]"
            )
        # The groups at odd places are the contents of brackets.
        parts = re.split(r"\[([^\]]*)\]", name)
        choices = [
            list(_expand_ranges(part, text)) if index % 2 else [part]
            for index, part in enumerate(parts)
        ]
        yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = RANGE.fullmatch(each)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= last - first < MAX_RANGE:
            raise LaunchEnvironmentError(
                f"{text!r} has the range {each!r}, which is not two numbers in ascending order, "
                f"less than {MAX_RANGE:,} apart"
            )
        for number in range(first, last + 1):
            yield f"{number:0{len(match[1])}}"
