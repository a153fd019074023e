"""The verdict on a micro-batch whose computations gave different bits, as a pure function.

owner      A A    repeater  B B              everyone else computed B, or A:
owner      B A    repeater  A A    a fault   one rank, or one core, was wrong
owner      A B    repeater  C D    state     no two computations agree
owner      A A    repeater  B B    split     as many on either side: see the operators
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Computation", "Verdict", "explain_split", "judge"]


class Computation(NamedTuple):
    """One computation of a micro-batch.

    Attributes:
        rank: The rank that computed it.
        host: The name of its host.
        core: The processor core, -1 if unknown.
        bits: A hash of the results.
        is_repeated: Whether the rank computed it in addition to its own micro-batches.
    """

    rank: int
    host: str
    core: int
    bits: str
    is_repeated: bool

    @property
    def place(self) -> str:
        """The rank, the host and the core, for messages."""
        core = "an unknown core" if self.core < 0 else f"core {self.core}"
        return f"rank {self.rank} (host {self.host}, {core})"

    def describe_fault(self, step: int, microbatch: int | None, message: str) -> dict[str, Any]:
        """Return the fields of a finding about a result that is wrong."""
        return {
            "step": step,
            "rank": self.rank,
            "host": self.host,
            "core": self.core,
            "microbatch": microbatch,
            "module": None,
            "operator": None,
            "corrected": False,
            "message": message,
        }


@dataclass(frozen=True)
class Verdict:
    """The explanation of different results.

    Attributes:
        kind: "fault": a rank or core computed wrong. "state": the computation depends on something
            else than its inputs. "split": it is one of these.
        culprit: A computation with another result, on the rank or core that is wrong; None if it
            is not known.
        is_single: Whether only one computation had another result.
    """

    kind: Literal["fault", "state", "split"]
    culprit: Computation | None = None
    is_single: bool = False


def explain_split(place: str, computations: Sequence[Computation], where: str, end: str) -> str:
    """Return the sentence about two results of which it is unknown which one is wrong."""
    one, *others = computations
    two = next(other for other in others if other.bits != one.bits)
    return (
        f"{place}: {one.place} and {two.place} compute different results from the same inputs, "
        f"again and again{where}; one of them is faulty{end}"
    )


def judge(computations: Sequence[Computation]) -> Verdict:
    """Return the verdict on all computations of a micro-batch, two of which differ."""
    counts = Counter(computation.bits for computation in computations)
    (right, most), (_, second), *_ = counts.most_common()
    if most == 1:
        return Verdict("state")
    if most == second:
        return Verdict("split")
    wrong = [computation for computation in computations if computation.bits != right]
    is_alone = len({(one.rank, one.host) for one in computations}) == 1
    if len({(one.rank, one.host, is_alone and one.core) for one in wrong}) > 1:
        return Verdict("state")
    return Verdict("fault", wrong[0], len(wrong) == 1)
