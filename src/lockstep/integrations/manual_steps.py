"""Manual optimization in Lightning: the steps of a batch, after all of its micro-batches.

    training_step                        for each micro-batch
    self.manual_backward(loss)           noted; the sum of the losses has one backward at the end
    opt.step(), sch.step(), clipping     noted; made in this order after the last micro-batch
    opt.zero_grad()                      tells which losses a step takes; gradients are those of one
                                         batch

All micro-batches are computed with the same weights. A loss must reach no parameters whose
optimizer does not take it: an optimizer is toggled while the loss of another one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lockstep.kernel.errors import UsageError
from lockstep.model.held_parameters import find_leaves

__all__ = ["ManualSteps"]


class ManualSteps:
    """The calls that `training_step` makes by hand in one micro-batch.

    Args:
        module: The module.

    Attributes:
        names: What it has called, which must be the same in each micro-batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._optimizers: list[Any] = module.trainer.strategy._lightning_optimizers
        self._losses: list[torch.Tensor] = []
        self._taken: dict[int, list[int]] = {}  # the losses since zero_grad, by optimizer
        self._steps: dict[int, list[int]] = {}  # the losses that a step takes, by optimizer
        self._calls: list[Callable[[], Any]] = []
        self.names: list[str] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Note in the body what is called, instead of doing it."""
        patched: list[tuple[Any, str]] = []

        def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
            setattr(owner, name, replacement)
            patched.append((owner, name))

        for number, optimizer in enumerate(self._optimizers):
            patch(optimizer, "step", partial(self._note_step, number, optimizer.step))
            patch(optimizer, "zero_grad", partial(self._note_zero_grad, number))
        for number, config in enumerate(self._module.trainer.lr_scheduler_configs):
            name = f"scheduler {number}"
            step = config.scheduler.step
            patch(config.scheduler, "step", partial(self._note, name, step))
        clip = self._module.clip_gradients
        patch(self._module, "clip_gradients", partial(self._note, "clipping", clip))
        try:
            yield
        finally:
            for owner, name in patched:
                delattr(owner, name)

    def add(self, loss: torch.Tensor) -> None:
        """Note a loss for backward."""
        for taken in self._taken.values():
            taken.append(len(self._losses))
        self._losses.append(loss)

    def _note(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.names.append(name)
        self._calls.append(partial(call, *args, **kwargs))

    def _note_zero_grad(self, number: int, *_: Any, **__: Any) -> None:
        self._taken[number] = []

    def _note_step(
        self, number: int, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> None:
        if number not in self._taken:
            # Before the first zero_grad, the losses from the beginning count.
            self._taken[number] = [*range(len(self._losses))]
        if closure is not None:
            closure()
        if number in self._steps:
            raise UsageError(
                f"ExactStrategy: training_step calls step() of optimizer {number} twice, but a "
                "batch has one gradient: use one step per batch and optimizer"
            )
        self._steps[number] = [*self._taken[number]]
        self._note(f"step {number}", step, **kwargs)

    def add_losses(self) -> torch.Tensor:
        """Return the sum of the losses; UsageError if steps take different parts of it."""
        if not self._losses:
            raise UsageError(
                "ExactStrategy: training_step has called manual_backward for no loss; call it in "
                "each micro-batch"
            )
        for number, optimizer in enumerate(self._optimizers):
            groups = optimizer.param_groups
            own = {id(parameter) for group in groups for parameter in group["params"]}
            for position, loss in enumerate(self._losses):
                reached = {id(leaf) for leaf in find_leaves(loss)}
                if position not in self._steps.get(number, ()) and own & reached:
                    raise UsageError(
                        f"ExactStrategy: loss {position} of training_step reaches parameters of "
                        f"optimizer {number}, whose step does not take it: call "
                        "self.toggle_optimizer(opt) before the loss of another optimizer is "
                        "computed, and self.untoggle_optimizer(opt) after its manual_backward"
                    )
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum()

    def make(self) -> None:
        """Make the steps, in the order in which they were called."""
        for call in self._calls:
            call()
