"""Draws: what a stage has to know of the random numbers that other stages drew before it.

    forward     block 0 ──> block 1 ──> block 2 ──> loss     each under a key of its own
    backward    block 0 <── block 1 <── block 2 <── loss     one stream: torch's generators go
                                                             on from where the loss left them

In one process a backward draws (in hooks, in autograd functions) from the generators as
the loss and the later blocks left them. Stages hand the state on with the gradients, where
it is not simply the one that was seeded for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_DRAWS", "Draws"]


@dataclass(frozen=True)
class Draws:
    """What has been drawn for a micro-batch so far.

    Attributes:
        call: Number of the last call of the model's first unit, part of the loss's key.
        others: Whether blocks have drawn from Python's or numpy's generators.
        state: State of torch's generators, in backward; None where nothing has been drawn
            since they were seeded for the loss.
    """

    call: int = 0
    others: bool = False
    state: bytes | None = None


NO_DRAWS = Draws()
