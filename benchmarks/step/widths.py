"""The guarantee: what `lockstep.Trainer` makes of one global batch on any number of ranks.

27 samples in 8 micro-batches, on any ranks               two steps
1 rank   [0 1 2 3 4 5 6 7]
3 ranks  [0 1 2] [3 4 5] [6 7]                            the same digest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import lockstep
from benchmarks.step.answers import CHECKED, plain_digest, training_digest
from benchmarks.step.contenders import CONTENDERS, Case, Fixed

__all__ = ["Digests", "digests"]

SAMPLES = 27  # neither divides by 2, 3 and 4 alike
MICROBATCHES = 8


@dataclass
class Digests:
    """The digests of one contender and of plain PyTorch in one case, by number of ranks."""

    case: Case
    contender: str
    plain: str
    by_ranks: dict[int, str] = field(default_factory=dict)

    @property
    def are_equal(self) -> bool:
        """Whether there is one digest."""
        return {self.plain} >= set(self.by_ranks.values())


def digests(
    cases: Sequence[Case], contenders: Sequence[str], widths: Sequence[int], timeout: float
) -> list[Digests]:
    """Train every case with every bit-identical contender, on each number of ranks."""
    fixed = [Fixed(case.network, case.optimizer, SAMPLES, MICROBATCHES) for case in cases]
    guaranteed = [name for name in contenders if CONTENDERS[name].guaranteed]
    plain = lockstep.launch(plain_digest, (fixed,), timeout=timeout)[0]
    found = [
        Digests(case, name, digest)
        for case, digest in zip(fixed, plain, strict=True)
        for name in guaranteed
    ]
    for ranks in widths:
        told = lockstep.launch(train, (fixed, guaranteed), ranks, timeout=timeout)[0]
        for each, digest in zip(found, told, strict=True):
            each.by_ranks[ranks] = digest
    return found


def train(cases: Sequence[Case], contenders: Sequence[str]) -> list[str]:
    """Train in each contender, one after another, and return the digests."""
    ranks = lockstep.init(device="cpu").world_size
    found = []
    for case in cases:
        for name in contenders:
            training = CONTENDERS[name].make(case)
            for turn in range(CHECKED):
                training.step(case.batch(ranks, turn))
            found.append(training_digest(training))
    lockstep.shutdown()
    return found
