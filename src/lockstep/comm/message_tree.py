r"""The binomial tree along which ranks combine small messages, and what each of them sends.

    ranks 0 to 6         0                up: every rank combines its message with those of its
                       / | \               children, in the order of ranks, and sends the result
                      1  2  4             to its parent
                         |  | \           down: rank 0 has the combination of all, which goes
                         3  5  6          the same way back

Rank r heads the ranks from r up to r plus the lowest bit of r, a contiguous range. Its children
head adjacent ranges, so the combining function needs to be associative but not commutative. A rank
exchanges at most 2 log2(ranks) messages, and on average sends two and receives two.

`run_along_tree` yields what a rank sends and receives, and makes no call of torch, so a simulator
can run thousands of ranks in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "Conflict",
    "Exchange",
    "Packet",
    "Receive",
    "Send",
    "find_children",
    "find_parent",
    "run_along_tree",
]

LISTED_REMARKS = 8
"""The number of remarks that an error lists; a rank carries no more."""

Value = TypeVar("Value")


def find_parent(rank: int) -> int:
    """Return the parent of a rank other than 0."""
    return rank & (rank - 1)


def find_children(rank: int, ranks: int) -> list[int]:
    """Return the children of a rank, in rank order."""
    children, bit = [], 1
    while rank + bit < ranks and not rank & bit:
        children.append(rank + bit)
        bit *= 2
    return children


@dataclass(frozen=True)
class Send:
    """Send a message to a rank."""

    peer: int
    message: bytes


@dataclass(frozen=True)
class Receive:
    """Receive a message from a rank; the generator is sent its bytes."""

    peer: int


Exchange = Generator[Send | Receive, bytes | None, "Packet"]


@dataclass(frozen=True)
class Conflict:
    """The first rank whose activity differs from that of the lowest rank of a range."""

    rank: int
    about: str


@dataclass(frozen=True)
class Packet:
    """The messages of a contiguous range of ranks, combined.

    Attributes:
        about: The activity of the lowest rank.
        body: The combined messages; empty if the activities differ.
        conflict: The first rank with another activity; None if there is none.
        remarks: The first remarks, as (rank, text).
    """

    about: str
    body: bytes = b""
    conflict: Conflict | None = None
    remarks: Sequence[tuple[int, str]] = field(default_factory=tuple)

    def pack(self) -> bytes:
        """Return the bytes to send."""
        conflict = None if self.conflict is None else [self.conflict.rank, self.conflict.about]
        header = json.dumps([self.about, conflict, list(self.remarks)]).encode()
        return len(header).to_bytes(4, "little") + header + self.body

    @classmethod
    def unpack(cls, message: bytes) -> Packet:
        """Return the packet of the result of `pack`."""
        end = 4 + int.from_bytes(message[:4], "little")
        about, conflict, remarks = json.loads(message[4:end])
        first = None if conflict is None else Conflict(*conflict)
        return cls(about, message[end:], first, tuple((rank, text) for rank, text in remarks))


def run_along_tree(
    rank: int,
    ranks: int,
    packet: Packet,
    value: Value,
    merge: Callable[[Value, Value], Value],
    encode: Callable[[Value], bytes],
    decode: Callable[[bytes], Value],
) -> Exchange:
    """Yield what this rank sends and receives; return the combination of all ranks.

    Args:
        rank: This rank.
        ranks: The number of ranks.
        packet: The activity and the remarks of this rank; the body is not used.
        value: The value of this rank.
        merge: An associative function of the values of two adjacent ranges, the lower one first.
        encode: Returns the bytes of a value.
        decode: Returns the value of these bytes.
    """
    children = find_children(rank, ranks)
    conflict, remarks = packet.conflict, list(packet.remarks)
    for child in children:
        message = yield Receive(child)
        assert message is not None
        theirs = Packet.unpack(message)
        remarks += theirs.remarks
        if conflict is None and theirs.about != packet.about:
            conflict = Conflict(child, theirs.about)
        conflict = conflict or theirs.conflict
        if conflict is None:
            value = merge(value, decode(theirs.body))
    body = b"" if conflict is not None else encode(value)
    combined = Packet(packet.about, body, conflict, tuple(remarks[:LISTED_REMARKS]))
    if rank > 0:
        parent = find_parent(rank)
        yield Send(parent, combined.pack())
        message = yield Receive(parent)
        assert message is not None
        combined = Packet.unpack(message)
    else:
        message = combined.pack()
    for child in reversed(children):  # the largest range first
        yield Send(child, message)
    return combined
