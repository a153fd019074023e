"""The timeline: who computed what, when; planned, or as it was.

    rank 0   ▓0▓1▓2▓3    ██0██▓4██1██▓5      one lane a rank, pieces of work in time
    rank 1      ▓0▓1▓2██0██▓3██1██▓4

Plain values. Where they come from (a simulation, a record) and where they are
drawn (terminal, picture, page, trace) is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

__all__ = ["KINDS", "Timeline", "Work", "shared"]

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradient of the inputs",
    "weight": "gradients of the weights",
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting",
    "data": "data",
    "reduce": "sum over the replicas",
    "update": "optimizer",
}
"""The kinds of work that are known, in words; others are shown by their own name."""


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work of one rank, from `begin` to `end` in the timeline's unit of time.

    `stage` and `microbatch` say of what, where it is of one. Before it the rank waited
    for `waited`, for what rank `source` sent it: `octets` bytes.
    """

    rank: int
    kind: str
    begin: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    waited: float = 0.0
    source: int | None = None
    octets: int = 0

    def moved(self, by: float) -> Work:
        """Return it `by` later."""
        return replace(self, begin=self.begin + by, end=self.end + by)

    @property
    def words(self) -> str:
        """What it is, as a phrase."""
        found = KINDS.get(self.kind, self.kind)
        found += "" if self.microbatch is None else f" of micro-batch {self.microbatch}"
        return found + ("" if self.stage is None else f" on stage {self.stage}")


@dataclass(frozen=True)
class Timeline:
    """The work of all ranks, each rank's in order; times begin at 0.

    `origin` is when that was, on the clock of the run; 0 where it is a plan.
    """

    title: str
    ranks: int
    works: tuple[Work, ...]
    origin: float = 0.0

    @property
    def length(self) -> float:
        """When the last work ends."""
        return max((work.end for work in self.works), default=0.0)

    @property
    def busy(self) -> list[float]:
        """How long each rank works."""
        found = [0.0] * self.ranks
        for work in self.works:
            if work.kind != "waiting":
                found[work.rank] += work.end - work.begin
        return found

    @property
    def bubble(self) -> float:
        """The share, 0 to 1, of all ranks' time in which a rank does nothing."""
        whole = self.length * self.ranks
        return max(0.0, 1 - math.fsum(self.busy) / whole) if whole > 0 else 0.0

    @property
    def balance(self) -> float:
        """The ranks' mean work over the most loaded one's: 1 where all work alike."""
        most = max(self.busy, default=0.0)
        return math.fsum(self.busy) / self.ranks / most if most > 0 else 1.0

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max((w.stage for w in self.works if w.stage is not None), default=-1)

    @property
    def kinds(self) -> list[str]:
        """The kinds of work that occur, the known ones in their order."""
        found = {work.kind for work in self.works}
        return [kind for kind in KINDS if kind in found] + sorted(found - KINDS.keys())

    def label(self, work: Work) -> str:
        """Return what is written on a piece: its micro-batch, and which of the rank's stages."""
        if work.microbatch is None:
            return ""
        chunk = (work.stage or 0) // self.width
        several = self.stages > self.width
        return f"{work.microbatch}{chr(ord('a') + chunk % 26)}" if several else f"{work.microbatch}"

    @property
    def width(self) -> int:
        """How many ranks a replica has: those that hold the first chunk of its stages."""
        holders = {work.rank for work in self.works if work.stage == 0}
        return max(1, self.ranks // len(holders)) if holders else 1

    def only(self, kinds: Collection[str]) -> Timeline:
        """Return the timeline of the work of some kinds, from its first piece on."""
        works = [work for work in self.works if work.kind in kinds]
        begin = min((work.begin for work in works), default=0.0)
        moved = tuple(work.moved(-begin) for work in works)
        return replace(self, works=moved, origin=self.origin + begin)


def shared(timelines: Sequence[Timeline]) -> float:
    """Return the length of the longest: what timelines side by side are drawn to."""
    return max((timeline.length for timeline in timelines), default=0.0)
