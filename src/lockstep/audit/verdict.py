"""The verdict on a micro-batch whose computations gave different bits, as pure functions.

Each computation has a vote, its bits (`judge`):

    rank 0  B A    rank 1  A A    rank 2  A    fault   one rank, or one core, has other results
    rank 0  A A    rank 1  B B                 split   as many computations on either side
    rank 0  A B    rank 1  C D                 state   no two agree, or several places are wrong

After more than one wrong result, the operators of two computations are compared as well. Votes and
operators together say what is to blame (`find_blame`, the table `BLAME`). It is the same for every
audit: of micro-batches on several ranks, and of calls on two cores of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = [
    "BLAME",
    "Blame",
    "Computation",
    "Evidence",
    "Verdict",
    "Votes",
    "describe_difference",
    "explain_processor",
    "explain_program",
    "find_blame",
    "join_names",
    "judge",
]

LISTED = 3
"""The number of changed attributes that a message names."""

ADVICE = (
    "register a buffer for what forward keeps, with a rule in lockstep_buffer_rules; draw from "
    "torch's default generator, which is seeded for each micro-batch; or pass audit=False to train "
    "with bits that depend on the layout"
)

Votes = Literal["fault", "split", "state"]
"""The vote of all computations by their bits. "fault": a rank or core has other results than all
others. "split": as many computations on either side. "state": neither."""

Evidence = Literal["program", "processor", "either", "none"]
"""The evidence of the first operator with another result.

"program": it had other inputs, arguments or random numbers, or was called by one side alone.
"processor": an operator of torch had the same ones. Those that are not deterministic are switched
off, so a processor has computed wrong. "either": another operator had the same inputs; it may draw
from a generator of its own. "none": no operator was found."""

Blame = Literal["program", "one", "two", "several"]
"""The cause: the program, the processor of one computation, one of two processors, or the
processors of all computations."""

BLAME: Mapping[Evidence, Mapping[Votes, Blame]] = {
    "program": {"fault": "program", "split": "program", "state": "program"},
    # Equal inputs and other results, for any votes. If no two results agree, as on a rank
    # whose cores are all wrong at random, there is none that is known to be right.
    "processor": {"fault": "one", "split": "two", "state": "several"},
    # A processor that is wrong differs from others that agree. Hidden state makes all differ.
    "either": {"fault": "one", "split": "two", "state": "program"},
    "none": {"fault": "one", "split": "two", "state": "program"},
}
"""The cause of several wrong results, by the operators and the votes."""


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
    """The votes of the computations.

    Attributes:
        votes: What they say.
        culprit: A computation with another result, on the rank or core that is wrong; None if it
            is not known.
        is_single: Whether only one computation had another result.
    """

    votes: Votes
    culprit: Computation | None = None
    is_single: bool = False


def judge(computations: Sequence[Computation]) -> Verdict:
    """Return the verdict on all computations of a micro-batch, two of which differ."""
    counts = Counter(computation.bits for computation in computations)
    (right, most), (_, second), *_ = counts.most_common()
    if most == 1:
        return Verdict("state")
    if most == second:
        return Verdict("split")
    wrong = [computation for computation in computations if computation.bits != right]
    # The computations of a rank alone are on two of its cores, those of several ranks anywhere.
    is_alone = len({(one.rank, one.host) for one in computations}) == 1
    places = {(one.rank, one.host, one.core if is_alone else None) for one in wrong}
    if len(places) > 1:
        return Verdict("state")
    return Verdict("fault", wrong[0], len(wrong) == 1)


def find_blame(votes: Votes, evidence: Evidence, *, is_dependent: bool = False) -> Blame:
    """Return what is to blame for several wrong results.

    Args:
        votes: What the bits of all computations say.
        evidence: What the operators of two of them say.
        is_dependent: Whether the results were seen to depend on what was computed before. Chance
            makes the results of a faulty processor look like that, too.
    """
    if is_dependent and evidence != "processor":
        votes = "state"
    return BLAME[evidence][votes]


def explain_processor(
    blame: Blame, place: str, verdict: Verdict, computations: Sequence[Computation], where: str
) -> str:
    """Return the sentence about processors that have computed wrong, without advice.

    Args:
        blame: Any but "program".
        place: The step and the micro-batch.
        verdict: The verdict.
        computations: The computations, two of which differ.
        where: The operator, from `describe_difference`.
    """
    if blame == "one":
        assert verdict.culprit is not None
        return f"{place}: {verdict.culprit.place} computed wrong results, again and again{where}"
    results = f"different results from the same inputs, again and again{where}"
    if blame == "two":
        first = computations[0]
        other = next(one for one in computations if one.bits != first.bits)
        return f"{place}: {first.place} and {other.place} compute {results}; one of them is faulty"
    return f"{place}: {_join_places(computations)} computed {results}"


def explain_program(where: str, evidence: Evidence, changed: Sequence[str]) -> str:
    """Return the sentence about a computation that depends on more than its inputs.

    Args:
        where: The operator, from `describe_difference`.
        evidence: What the operator says.
        changed: The names of what has changed in Python.
    """
    again = f"computed again with the same inputs, weights, buffers and seeds, it differs{where}"
    if evidence in ("processor", "either"):
        return (
            f"{again}, which got the same inputs every time, and returned other values: the "
            "operator is not deterministic, or this processor core is faulty"
        )
    cause = f"; {join_names(changed)} changed meanwhile" if changed else ""
    return (
        f"{again}{cause}. The bits of the training would depend on which rank computes which "
        f"micro-batch: {ADVICE}"
    )


def describe_difference(operator: str, module: str | None, source: str) -> str:
    """Return the operator that made the difference, its module and its line, for messages."""
    of_module = "" if module is None else f" of {module}"
    line = f" ({source})" if source else ""
    return f", first in {operator}{of_module}{line}"


def join_names(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others, for messages."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _join_places(computations: Sequence[Computation]) -> str:
    """Return the ranks of computations with their cores, for messages."""
    cores: dict[tuple[int, str], set[int]] = {}
    for one in computations:
        cores.setdefault((one.rank, one.host), set()).add(one.core)
    places = []
    for (rank, host), of_rank in sorted(cores.items()):
        known = [str(core) for core in sorted(of_rank) if core >= 0]
        which = "core" if len(known) == 1 else "cores"
        where = f"{which} {' and '.join(known)}" if known else "unknown cores"
        places.append(f"rank {rank} (host {host}, {where})")
    return " and ".join(places)
