"""Clipping: gradients scaled down to a norm, computed parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["clip"]


@torch.no_grad()
def clip(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> float:
    """Scale the gradients so that their 2-norm is at most `limit`; return the norm before.

    The norm of each parameter is taken in its own dtype; the squares are added
    exactly and rounded once to float64, so that the sum does not depend on which
    rank holds which parameter. Without a limit, or where the norm is not finite,
    nothing is scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients]
    norm = math.sqrt(math.fsum(each * each for each in norms))
    if limit is not None and limit < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(limit / norm)
    return norm
