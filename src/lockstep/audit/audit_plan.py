"""The plan of the audit: which micro-batch is repeated in an audited step, and where.

    step            0   1   2   5   10   20   50   100   200 ...
    turn            0   1   2   3    4    5    6     7     8
    owner           0   1   2   0    1    2    0     1     2       with three replicas
    repeated by     1   2   0   2    0    1    1     2     0

The plan is a function of the step and of the assignment of micro-batches, so all ranks know it.

The ranks of a sharded model gather its parameters together. So while one micro-batch is repeated,
every other rank repeats that of the rank at the same distance, and all of a turn are audited:

    turn            0 | 1 | 2 | 3        repeated by     1 | 2 | 3 | 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["AuditPlan", "plan_audit"]


@dataclass(frozen=True)
class AuditPlan:
    """The audit of one step.

    Attributes:
        microbatch: The micro-batch that is computed again.
        owner: The replica that computes it in any case.
        repeater: The replica that computes it again; the owner if there is no other one.
        witness: The replica that computes it, too, if the results of the others differ; the
            repeater if there is no third one.
    """

    microbatch: int
    owner: int
    repeater: int
    witness: int

    def rotate(self, spans: Sequence[range]) -> list[AuditPlan]:
        """Return the plans of the micro-batches that all replicas compute at the same time."""
        position = spans[self.owner].index(self.microbatch)
        plans = []
        for shift in range(len(spans)):
            owner, repeater, witness = (
                (replica + shift) % len(spans)
                for replica in (self.owner, self.repeater, self.witness)
            )
            plans.append(AuditPlan(spans[owner][position], owner, repeater, witness))
        return plans


def plan_audit(turn: int, spans: Sequence[range], *, alone: bool = False) -> AuditPlan:
    """Return the plan of one audited step.

    Owners, micro-batches and repeaters take turns. The first micro-batch that a rank ever computes
    is not chosen if it has others: a program may compute its first one in another way, such as to
    fill a cache.

    Args:
        turn: The number of audited steps before this one.
        spans: The micro-batches of each replica, at least one of which has some.
        alone: Whether the owner must repeat the micro-batch itself.
    """
    owners = [replica for replica, span in enumerate(spans) if span]
    owner = owners[turn % len(owners)]
    lap = turn // len(owners)
    span = spans[owner]
    others = len(spans) - 1
    repeater = witness = owner
    if others and not alone:
        repeater = (owner + 1 + lap % others) % len(spans)
        witness = (owner + 1 + (lap + 1) % others) % len(spans)
    return AuditPlan(span[(lap + 1) % len(span)], owner, repeater, witness)
