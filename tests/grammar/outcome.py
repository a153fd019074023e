"""The outcome of a training: what must be the same bits in every layout."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Outcome:
    """Every step's loss with all its bits, and the digests after the last step.

    What is None was not asked for, or cannot be known before the last step.
    """

    losses: tuple[str, ...]
    model: str | None = None
    optimizer: str | None = None
    average: str | None = None
    evaluation: str | None = None
    learning_rate: str | None = None

    def differences(self, other: Outcome, begin: int) -> list[str]:
        """Say in what `other`, whose first step is `begin`, differs from this one."""
        losses = self.losses[begin : begin + len(other.losses)]
        if losses != other.losses:
            pairs = zip(losses, other.losses, strict=True)
            step, pair = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            return [f"the loss of step {begin + step} ({pair[0]} and {pair[1]})"]
        names = [field.name for field in fields(self) if field.name != "losses"]
        return [
            name
            for name in names
            if getattr(other, name) is not None and getattr(self, name) != getattr(other, name)
        ]
