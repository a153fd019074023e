"""Mixup (Zhang et al., 2018): trains on weighted means of two images and of their targets.

images   a b c d          share = Beta(alpha, alpha)
partners d a b c          mixed = share * images + (1 - share) * partners
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import one_hot
from torch.utils.data import default_collate

__all__ = ["Mixup"]


@dataclass(frozen=True)
class Mixup:
    """A collate function that mixes each image of a micro-batch with the previous one.

    The share is drawn once per micro-batch, from torch's global generator. The loader seeds this
    generator by the number of the micro-batch, and a micro-batch has the same images on any rank,
    so the layout changes no bit. An image that is alone in its micro-batch is not changed.

    Attributes:
        alpha: The parameter of the Beta distribution of the share, above 0.
        classes: The number of classes.
    """

    alpha: float
    classes: int

    def __call__(self, samples: list[Any]) -> list[torch.Tensor]:
        """Return mixed images, and targets of shape [samples, classes] as probabilities."""
        images, labels = default_collate(samples)
        share = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        targets = one_hot(labels, self.classes).to(images.dtype)
        return [_mix(images, share), _mix(targets, share)]


def _mix(values: torch.Tensor, share: float) -> torch.Tensor:
    partners = values.roll(1, 0)
    return values.mul_(share).add_(partners, alpha=1 - share)
