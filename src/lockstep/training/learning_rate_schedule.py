"""The learning-rate scheduler of an optimizer: when it steps, and how it continues."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.kernel.errors import UsageError
from lockstep.training.optimizer_config import OptimizerConfig

__all__ = ["SCHEDULED", "LearningRateSchedule"]

SCHEDULED = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"}
)
"""The options of parameter groups that schedulers add or change."""


class LearningRateSchedule:
    """The learning-rate scheduler of an optimizer, and when it steps.

    Attributes:
        optimizer: The optimizer.
        scheduler: The scheduler; None: the learning rate is constant.
        interval: "step", "epoch" or "manual".
        is_restored: Whether a loaded state replaces the scheduler's.
    """

    def __init__(self, config: OptimizerConfig, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.is_restored = config.restore_schedule
        try:
            self.scheduler = config.scheduler(optimizer) if config.scheduler else None
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the scheduler of the ls.OptimizerConfig failed: {error}; it is a function of the "
                "optimizer, such as partial(StepLR, step_size=10)"
            ) from error
        is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        self.interval = config.scheduler_interval or ("epoch" if is_plateau else "step")
        is_maximum = getattr(self.scheduler, "mode", "min") == "max"
        if is_plateau and (self.interval == "step" or (is_maximum and self.interval == "epoch")):
            raise UsageError(
                "ReduceLROnPlateau receives the mean training loss of each epoch: leave "
                'scheduler_interval="step" and mode="max" out, or write '
                'scheduler_interval="manual" and call trainer.scheduler.step(value) yourself'
            )
        if is_plateau and not self.is_restored:
            raise UsageError(
                "restore_schedule=False repeats the steps of a scheduler, and those of "
                "ReduceLROnPlateau depend on losses: set its attributes after the resume instead, "
                "such as trainer.scheduler.patience"
            )
        state = None if self.scheduler is None else self.scheduler.state_dict()
        self._begun = None if self.is_restored else (copy.deepcopy(state), self._options())

    def step(self, loss: float | None = None) -> None:
        """Step the scheduler, if there is one; `ReduceLROnPlateau` gets the loss."""
        if self.scheduler is None:
            return
        try:
            if isinstance(self.scheduler, ReduceLROnPlateau) and loss is not None:
                self.scheduler.step(loss)
            else:
                self.scheduler.step()
        except ValueError as error:  # of OneCycleLR
            raise UsageError(
                f"{type(self.scheduler).__name__} cannot take another step: {error}. Give it as "
                "many steps as the training has; a resumed run takes the scheduler from its "
                "checkpoint, unless you pass restore_schedule=False to ls.OptimizerConfig"
            ) from error

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a saved state, or repeat as many steps as it has taken."""
        if self._begun is None:
            if self.scheduler is not None and saved:
                self.scheduler.load_state_dict(dict(saved))
            return
        state, options = self._begun
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(copy.deepcopy(values))
        if self.scheduler is None:
            return
        self.scheduler.load_state_dict(copy.deepcopy(state or {}))
        # ChainedScheduler has no number of its own.
        steps = (saved.get("_schedulers") or [saved])[0] if "last_epoch" not in saved else saved
        steps = steps.get("last_epoch", 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(steps):
                self.step()

    def _options(self) -> list[dict[str, Any]]:
        """Return the options of the groups that schedulers change."""
        cycles = getattr(self.scheduler, "cycle_momentum", False)
        names = SCHEDULED if cycles else SCHEDULED - {"momentum", "betas"}
        return [
            {name: copy.deepcopy(group[name]) for name in names & group.keys()}
            for group in self.optimizer.param_groups
        ]
