"""Losses, and the targets that they want."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from grammar import blocks as own
from grammar.drawing import Draw, built, described

IGNORED = -100


@dataclass(frozen=True)
class Loss:
    """A loss as it was drawn.

    `targets` is "classes", "soft" (a distribution), "real" or "binary". `ignore` is the class
    that stands for an ignored target, `left_out` whether a whole micro-batch may have only
    those. `tail` are blocks that a model needs before it. `counted` says that the user gives
    the weight of a micro-batch. `inside`: the model calls the loss and returns its value.
    """

    part: Any
    targets: str = "classes"
    ignore: int | None = None
    left_out: bool = False
    tail: tuple[Any, ...] = ()
    counted: bool = False
    inside: bool = False

    def __str__(self) -> str:
        """Describe the loss."""
        found = described(self.part)
        found += " inside the model" if self.inside else ""
        found += ", weight=count" if self.counted else ""
        return found + (", ignored targets" if self.ignore is not None else "")

    def build(self, dtype: torch.dtype) -> Any:
        """Return the loss function, or None where the model returns its loss."""
        if self.inside:
            return None
        function = self.part.func if isinstance(self.part, partial) else self.part
        if not isinstance(function, type):
            return self.part
        return built(self.part).to(dtype)

    @property
    def weight(self) -> Callable[[Any], float] | None:
        """The weight of a micro-batch, where the user gives one."""
        return count if self.counted else None

    def draw_targets(self, samples: int, classes: int, generator: torch.Generator) -> torch.Tensor:
        """Return targets of so many samples."""
        if self.targets == "classes":
            return torch.randint(0, classes, (samples,), generator=generator)
        found = torch.rand(samples, classes, generator=generator)
        if self.targets == "soft":
            return found / found.sum(dim=1, keepdim=True)
        return (found > 0.5).float() if self.targets == "binary" else found * 2 - 1


def count(part: Any) -> float:
    """Count the targets of a micro-batch that are not ignored."""
    return float((part[-1] != IGNORED).sum())


def draw_loss(draw: Draw, classes: int) -> Loss:
    """Draw a loss over so many classes, of which there are at least three."""
    if draw.chance(0.12):
        part, targets = draw.pick(
            (partial(nn.CrossEntropyLoss), "classes"), (partial(nn.SmoothL1Loss), "real")
        )
        return Loss(part, targets, inside=True)
    kind = draw.random()
    if kind < 0.45:
        return _classification(draw, classes)
    if kind < 0.6:
        reduction = draw.some(reduction="sum")
        return draw.pick(
            Loss(partial(nn.MSELoss, **reduction), "real"),
            Loss(partial(nn.L1Loss, **reduction), "real"),
            Loss(partial(nn.SmoothL1Loss, beta=0.3, **reduction), "real"),
            Loss(partial(nn.HuberLoss, delta=0.5, **reduction), "real"),
            Loss(partial(nn.BCEWithLogitsLoss, **reduction), "binary"),
            Loss(
                partial(nn.KLDivLoss, reduction=draw.pick("batchmean", "sum")), "soft",
                tail=(partial(nn.LogSoftmax, dim=1),),
            ),
        )  # fmt: skip
    return draw.pick(
        Loss(own.quartic),
        Loss(own.summed),
        Loss(partial(own.Noisy)),
        Loss(partial(own.Centred, classes)),
        Loss(partial(nn.MultiLabelSoftMarginLoss), "binary"),
        Loss(partial(nn.CrossEntropyLoss), "soft"),
        Loss(F.cross_entropy),
    )


def _classification(draw: Draw, classes: int) -> Loss:
    """Draw a loss over classes, with what changes the weight of a sample."""
    options: dict[str, Any] = draw.some(reduction="sum")
    ignore = draw.pick(None, None, 0, IGNORED)
    counted = ignore == IGNORED and not options and draw.chance(0.7)
    left_out = ignore == 0 or counted or bool(options)
    if ignore == 0:
        options["ignore_index"] = 0
    if draw.chance(0.25) and not counted:
        options["weight"] = torch.linspace(0.5, 1.5, classes)
        left_out = True
    if draw.chance(0.3):
        return Loss(
            partial(nn.NLLLoss, **options), "classes", ignore, left_out,
            (partial(nn.LogSoftmax, dim=1),), counted,
        )  # fmt: skip
    options |= draw.some(label_smoothing=0.1)
    return Loss(partial(nn.CrossEntropyLoss, **options), "classes", ignore, left_out, (), counted)
