"""What a script has around its loop: the same code in plain PyTorch and with `ls.exact`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from grammar.exact import Loop
from grammar.plain import change_model, hook_late
from lockstep.kernel import spec

__all__ = ["Critic", "Script", "described", "losses_of_critic"]

CRITIC = 3
"""The width of a second model."""


class Script:
    """The optimizers, schedules, scaler and average of a script, and its update of the weights."""

    def __init__(self, drawn: Loop, model: nn.Module) -> None:
        optimization = drawn.case.optimization
        self.drawn = drawn
        self.model = model
        rest = optimization.make(optimization.grouped(model))
        first = optimization.make_first(model)
        self.rest = rest
        self.optimizers = [rest] if first is None else [first, rest]
        self.every_step: list[Any] = []
        self.every_epoch: list[Any] = []
        if optimization.scheduler:
            of_each = optimization.scheduler_each == "step"
            (self.every_step if of_each else self.every_epoch).append(optimization.scheduler(rest))
        if first is not None and optimization.first_scheduler:
            self.every_step.append(optimization.first_scheduler(first))
        self.scaler = None
        if drawn.case.precision is torch.float16:
            self.scaler = torch.amp.GradScaler("cpu")
        self.average = None
        if optimization.average is not None:
            average = get_ema_multi_avg_fn(optimization.average)
            self.average = AveragedModel(model, multi_avg_fn=average)
        self.steps = 0

    @property
    def schedulers(self) -> list[Any]:
        """All schedulers."""
        return [*self.every_step, *self.every_epoch]

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones(())))

    def autocast(self) -> Any:
        """Return the context of the forward."""
        precision = self.drawn.case.precision
        cache = self.drawn.has_cache
        return torch.autocast("cpu", precision, precision is not None, cache_enabled=cache)

    def update(self, clip_exactly: Callable[[float], float]) -> None:
        """Update the weights, with the gradients of the whole batch in `.grad`."""
        scaler = self.scaler
        largest = self.drawn.case.optimization.clip_norm
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        if largest is not None and self.drawn.clips_by_torch:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        elif largest is not None:
            clip_exactly(largest)
        for optimizer in self.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        is_skipped = False
        if scaler is not None:
            before = scaler.get_scale()
            scaler.update()
            is_skipped = scaler.get_scale() < before
        if not is_skipped:
            if self.average is not None:
                self.average.update_parameters(self.model)
            for scheduler in self.every_step:
                scheduler.step()
        self.steps += 1
        if self.steps == 1:
            hook_late(self.drawn.case, self.model)
            change_model(self.drawn.case, self.model)

    def end_epoch(self, loss: float) -> None:
        """Step the schedules of epochs, after an epoch whose last loss is given."""
        for scheduler in self.every_epoch:
            is_plateau = isinstance(scheduler, ReduceLROnPlateau)
            scheduler.step(loss) if is_plateau else scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint has in addition to the model and the optimizers."""
        named = {"scaler": self.scaler, "average": self.average}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def rate(self) -> str:
        """The learning rate."""
        return float(self.rest.param_groups[0]["lr"]).hex()


class Critic:
    """A second model, trained on noise beside each batch."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(CRITIC, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.5)

    def update(self) -> None:
        """Step and delete the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def losses_of_critic(model: Any, part: Any) -> Iterator[torch.Tensor]:
    """Yield the loss of the second model."""
    yield model(torch.randn(spec.length(part), CRITIC)).square().mean()


def described(found: list[float]) -> str:
    """Return what is compared of a step, with all bits."""
    return " ".join(float(value).hex() for value in found)
