"""The root of a backward pass: the loss of a micro-batch, multiplied by its share of the batch."""

from __future__ import annotations

import torch

from lockstep.kernel.loss_scale import LossScale

__all__ = ["LossRoot", "scale_loss"]


def scale_loss(loss: torch.Tensor, share: float, scale: LossScale | None) -> torch.Tensor:
    """Return the loss multiplied by its share of the batch and the loss scale."""
    return loss * share if scale is None else scale.scale(loss, share)


class LossRoot:
    """The gradient of the last loss, which the next one usually has too.

    Args:
        scale: The loss scale; None: there is none.
    """

    def __init__(self, scale: LossScale | None) -> None:
        self._scale = scale
        self._gradient: torch.Tensor | None = None
        self._share, self._version = 0.0, 0

    def find(self, loss: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensor at which backward begins, and its gradient (None for 1).

        The bits are the same as with `scale_loss`. Without a loss scale the share is the gradient,
        so the graph needs no multiplication.
        """
        if self._scale is not None or not loss.is_floating_point():
            return scale_loss(loss, share, self._scale), None
        known = self._gradient
        if (
            known is None
            or self._share != share
            or known._version != self._version  # a hook wrote to it
            or (known.shape, known.dtype, known.device) != (loss.shape, loss.dtype, loss.device)
        ):
            self._gradient = known = torch.full_like(loss, share)
            self._share, self._version = share, known._version
        return loss, known
