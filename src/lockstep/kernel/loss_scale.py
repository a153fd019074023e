"""Rule 6, the loss scale: it multiplies the losses of float16 autocast against underflow.

    backward    begins at loss x scale
    reduce      gradients are added along the tree, and then divided by the scale
    norm        finite: the optimizer steps              after 2,000 such steps, the scale doubles
                not finite: the step is skipped          the scale is halved

Scales are powers of two, so apart from float16 overflow and underflow they change no bit. The
norm is the same on every rank, so all of them skip the same steps. The defaults are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LossScale"]

FACTOR = 2.0
LARGEST = 2.0**127
"""The largest scale; twice that is infinite in float32."""


@dataclass
class LossScale:
    """The scale of the next step, and the count of steps until it grows.

    Attributes:
        value: The scale, a power of two.
        interval: The number of consecutive steps, not skipped, after which the scale doubles.
        finite_steps: The number of such steps so far.
    """

    value: float = 65536.0
    interval: int = 2000
    finite_steps: int = 0

    def scale(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Return a loss multiplied by its share and the scale; float16 becomes float32."""
        return (loss.float() if loss.dtype is torch.float16 else loss) * (share * self.value)

    @torch.no_grad()
    def unscale_(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale in place."""
        for gradient in gradients:
            gradient.mul_(1 / self.value)

    @property
    def can_decrease(self) -> bool:
        """Whether a smaller scale may help; at a scale of 1 the gradients themselves overflow."""
        return self.value > 1

    def update(self, is_skipped: bool) -> None:
        """Count a step, and halve or double the scale if it is due."""
        self.finite_steps = 0 if is_skipped else self.finite_steps + 1
        if is_skipped:
            self.value /= FACTOR
        elif self.finite_steps == self.interval:
            self.finite_steps = 0
            self.value = min(self.value * FACTOR, LARGEST)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.value = state["value"]
        self.finite_steps = state["finite_steps"]
