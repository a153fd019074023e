"""Deadlocks of messages: ranks that wait for each other in send and recv.

    rank 0 ── recv from rank 1 ──> rank 1 ── recv from rank 2 ──> rank 2 ── recv from rank 0 ──┐
      ^────────────────────────────────────────────────────────────────────────────────────────┘

A rank that waits in a message continues only when the rank at the other end makes the matching
call. In a cycle no rank can make another call, unless a message is already on its way: the caller
checks that nothing moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["find_deadlock"]

MESSAGE = re.compile(r"(recv from|send to) rank (\d+) (\(tag \d+\) of group [^,]*)")


def find_deadlock(operations: Mapping[int, str]) -> tuple[int, ...]:
    """Return ranks that wait for each other, in the order of the cycle; empty if there are none.

    Args:
        operations: The operation in which each waiting rank waits, as its activity page says.
    """
    messages = {rank: match for rank in operations if (match := MESSAGE.match(operations[rank]))}
    for first in sorted(messages):
        cycle = [first]
        while (peer := int(messages[cycle[-1]][2])) in messages and peer not in cycle:
            cycle.append(peer)
        if peer == first and not _match(messages[cycle[-1]], messages[first]):
            return tuple(cycle)
    return ()


def _match(one: re.Match[str], other: re.Match[str]) -> bool:
    """Return whether one of two ranks that wait for each other sends what the other receives."""
    return one[1] != other[1] and one[3] == other[3]
