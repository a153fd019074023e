"""The layouts in which `lockstep check` runs a script, in order.

1 rank                                        the reference
2, 3 ranks                                    on each backend
2 ranks                                       2 stages, 1F1B and interleaved
4 ranks                                       2 replicas of 2 stages, zero-bubble
2 ranks                                       shared parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Layout", "layouts"]


@dataclass(frozen=True)
class Layout:
    """A division of the training among ranks.

    Attributes:
        ranks: The number of processes.
        backend: The backend for CPU tensors; "" for the script's own choice.
        stages: Ranks per replica.
        schedule: The pipeline schedule. None: no stages.
        shared: Whether the ranks share one copy of the parameters.
    """

    ranks: int
    backend: str = ""
    stages: int = 1
    schedule: str | None = None
    shared: bool = False

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        return self.ranks // self.stages

    @property
    def stages_per_rank(self) -> int | None:
        """The number of stages per rank if the schedule has several, else None."""
        return 2 if self.schedule == "interleaved" else None

    def __str__(self) -> str:
        """Return the layout in words, such as "2 ranks, lockstep, 2 stages (1f1b)"."""
        words = [
            "1 rank" if self.ranks == 1 else f"{self.ranks} ranks",
            self.backend,
            f"{self.stages} stages ({self.schedule})" if self.stages > 1 else "",
            "shared" if self.shared else "",
        ]
        return ", ".join(word for word in words if word)


def layouts(backends: Sequence[str], ranks: Iterable[int]) -> list[Layout]:
    """Return the layouts to compare with the reference.

    Args:
        backends: The backends to use; stages and shared parameters use the first one.
        ranks: The numbers of ranks without pipeline stages; 1 rank runs on the first backend only.
    """
    plain = [
        Layout(n, backend)
        for number, backend in enumerate(backends)
        for n in ranks
        if n > 1 or not number
    ]
    return [
        *plain,
        Layout(2, backends[0], stages=2, schedule="1f1b"),
        Layout(2, backends[0], stages=2, schedule="interleaved"),
        Layout(4, backends[0], stages=2, schedule="zero-bubble"),
        Layout(2, backends[0], shared=True),
    ]
