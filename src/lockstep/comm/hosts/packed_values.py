"""The values that ranks of a host add: nodes of a bucket, which they packed in shared memory.

Only the handler of a slice reads and writes it on its host, so no rank waits for another one before
the end. Which members are absent from which nodes is known of the ranks of this host; those of
other hosts send it in one small message per host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.comm.bucket import Bucket
from lockstep.comm.hosts.link import HostLink
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.reproducible_all_reduce import ABSENT, NEW

__all__ = ["PackedValues", "Presence"]


class PackedValues:
    """The nodes of a bucket, which every rank of the host has packed; chunks count from 0.

    Args:
        link: The link.
        rows: By rank of this host, its nodes as a matrix with a row per node; the sums replace the
            first row. All ranks have packed them.
        cuts: The bounds of the slices.
        is_scattered: Whether the owner of a slice keeps its result for itself.
        chunk: The number of elements of a chunk of a slice.
        presence: Which members are present.
    """

    def __init__(
        self,
        link: HostLink,
        rows: dict[int, torch.Tensor],
        cuts: Sequence[int],
        is_scattered: bool,
        chunk: int,
        presence: Presence,
    ) -> None:
        self._link, self._rows, self._cuts, self._chunk = link, rows, cuts, chunk
        self._presence = presence
        others = [rank for rank in rows if rank != link.rank]
        self._others = [] if is_scattered else [rows[rank][0] for rank in others]

    def read(self, rank: int, number: int, slice_: int, chunk: int) -> torch.Tensor:
        """Return the values of a node of a rank of this host."""
        lo, hi = self._span(slice_, chunk)
        return self._rows[rank][number, lo:hi]

    def result(self, slice_: int, chunk: int) -> torch.Tensor:
        """Return the memory for the result of a slice that this rank handles."""
        return self.read(self._link.rank, 0, slice_, chunk)

    def spread(self, slice_: int, chunk: int) -> None:
        """Write the result of a slice that this rank handles to the other ranks of the host."""
        lo, hi = self._span(slice_, chunk)
        for row in self._others:
            row[lo:hi].copy_(self.result(slice_, chunk))

    def end(self) -> None:
        """Wait until all handlers of the host have written their results."""
        self._link.barrier()

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], slice_: int, chunk: int
    ) -> list[tuple[slice, list[bool]]]:
        """Return the parts of a chunk of a slice, and which inputs are present in each.

        The whole chunk is one part if all members are present; otherwise each member is.

        Args:
            inputs: For each input, the (rank, number of the node) of the values that it combines.
            slice_: The slice.
            chunk: The chunk.

        Returns:
            Presence is a flag per input; an empty list means that all are present.
        """
        lo, hi = self._span(slice_, chunk)
        parts = self._presence.parts(inputs, lo, hi)
        return [(slice(begin - lo, end - lo), present) for begin, end, present in parts]

    def _span(self, slice_: int, chunk: int) -> tuple[int, int]:
        """Return the elements of the bucket in a chunk of a slice."""
        lo = self._cuts[slice_] + chunk * self._chunk
        return lo, max(lo, min(lo + self._chunk, self._cuts[slice_ + 1]))


class Presence:
    """Which members of a bucket have a value in which nodes; ranks exchange it between hosts.

    Args:
        link: The link, whose messages are used.
        hosts: The ranks of each host.
        counts: The number of nodes of each rank.
        bucket: The bucket.
        flags: The flags of the ranks of this host: a row of bytes per rank, with a flag per node
            and member, padded to the same length on all hosts.
        tag: The tag of the flags.
    """

    def __init__(
        self,
        link: HostLink,
        hosts: HostMap,
        counts: Sequence[int],
        bucket: Bucket,
        flags: torch.Tensor,
        tag: int,
    ) -> None:
        self._members, self._counts = bucket.members, counts
        self._flags: dict[tuple[int, int], bytes] = {}
        self._read(hosts.hosts[link.host], flags)
        self._receives: list[tuple[Any, Sequence[int], torch.Tensor]] = []
        self._sends = []
        for host, ranks in enumerate(hosts.hosts):
            if host == link.host:
                continue
            buffer = torch.empty(len(ranks), flags.shape[1], dtype=torch.uint8)
            work = link.receive(buffer.view(-1), hosts.partner(link.rank, host), tag)
            self._receives.append((work, ranks, buffer))
            for rank in ranks:
                if hosts.partner(rank, link.host) == link.rank:
                    self._sends.append(link.send(flags.view(-1), rank, tag))

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], lo: int, hi: int
    ) -> list[tuple[int, int, list[bool]]]:
        """Return (begin, end, presence of each input) of the parts of elements [lo, hi).

        An input that combines several nodes is present if one of them is. If all inputs have all
        members, the elements are one part.
        """
        if not all(key in self._flags for keys in inputs for key in keys):
            self._wait()
        rows = [[self._flags[key] for key in keys] for keys in inputs]
        if all(ABSENT not in flags for row in rows for flags in row):
            return [(lo, hi, [])]
        return [
            (begin, end, [any(flags[number] != ABSENT for flags in row) for row in rows])
            for number, member in enumerate(self._members)
            if (begin := max(lo, member.offset)) < (end := min(hi, member.offset + member.numel))
        ]

    def find_new(self) -> list[bool]:
        """Return for each member whether it is new in any node of any rank."""
        self._wait()
        rows = self._flags.values()
        return [any(row[member] == NEW for row in rows) for member in range(len(self._members))]

    def _wait(self) -> None:
        for work, ranks, buffer in self._receives:
            work.wait()
            self._read(ranks, buffer)
        for work in self._sends:
            work.wait()
        self._receives, self._sends = [], []

    def _read(self, ranks: Sequence[int], flags: torch.Tensor) -> None:
        width = len(self._members)
        for rank, row in zip(ranks, flags, strict=True):
            content = bytes(row.numpy())
            for number in range(self._counts[rank]):
                self._flags[rank, number] = content[number * width : (number + 1) * width]
