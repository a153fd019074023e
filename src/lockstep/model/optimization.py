"""Optimization: the optimizer, its parameter groups, the schedule, the average of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.errors import UsageError
from lockstep.model.description import Description, describe_object, describe_optimizer
from lockstep.model.digest import optimizer_tensors
from lockstep.model.sharded import Sharded

__all__ = ["Groups", "Optimization", "OptimizerFactory", "SchedulerFactory"]

OptimizerFactory = Callable[..., Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
Groups = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""Gives the options of a parameter, such as {"weight_decay": 0.0}; equal ones form a group."""


class Optimization:
    """What turns a gradient into new weights: the same element-wise work on every rank.

    Parameters:
        module: the model.
        optimizer: called with the parameters, or with a list of parameter groups.
        groups: options by name and parameter; None for one group.
        scheduler: called with the optimizer.
        each: whether the schedule moves after every "step" or every "epoch".
        decay: of the exponential moving average of the weights; None for no average.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        groups: Groups | None,
        scheduler: SchedulerFactory | None,
        each: Literal["step", "epoch"],
        decay: float | None,
    ) -> None:
        if isinstance(optimizer, Optimizer) or not callable(optimizer):
            raise UsageError(
                "the optimizer is given as a factory, such as "
                "partial(torch.optim.SGD, lr=0.1), not as an optimizer that exists already"
            )
        if each not in ("step", "epoch"):
            raise UsageError(f'scheduler_each is "step" or "epoch", not {each!r}')
        if decay is not None and not 0 <= decay < 1:
            raise UsageError(f"average={decay}: the decay of an average is from 0 to below 1")
        self.optimizer = optimizer(_grouped(module.named_parameters(), groups))
        if isinstance(self.optimizer, LBFGS):
            raise UsageError(
                "LBFGS computes the loss several times a step, which a trainer cannot repeat; "
                "choose an optimizer that steps once"
            )
        _check_fused(self.optimizer)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.average = (
            AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
            if decay is not None
            else None
        )
        self._module, self._each = module, each
        self.sharded: Sharded | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def describe(self, names: Mapping[torch.Tensor, str]) -> Description:
        """Describe the optimizer and the schedule; `names` are those of the parameters."""
        found = describe_optimizer("optimizer", self.optimizer, names)
        if self.scheduler is None:
            return found | {"scheduler": "None"}
        return found | describe_object("scheduler", self.scheduler)

    @property
    def keeper(self) -> Optimizer | Sharded:
        """What has the optimizer's state dict: the optimizer, or what holds its pieces together."""
        return self.sharded or self.optimizer

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """Name the optimizer's state after its parameters: "conv.weight/exp_avg" and so on."""
        if self.sharded is not None:
            return self.sharded.tensors(names)
        return optimizer_tensors(self.optimizer, names)

    def step(self, about: str) -> None:
        """Step the optimizer, the average, and a schedule that moves each step.

        `about` says what it is part of, where ranks step together.
        """
        if self.sharded is None:
            self.optimizer.step()
        else:
            self.sharded.step(about)
        if self.average is not None:
            self.average.update_parameters(self._module)
        if self.scheduler is not None and self._each == "step":
            self.scheduler.step()

    def end_epoch(self, loss: float) -> None:
        """Move a schedule that moves each epoch; one that watches a plateau gets the loss."""
        if self.scheduler is None or self._each != "epoch":
            return
        with warnings.catch_warnings():
            # The optimizer has stepped, if only before the state was saved that this goes on from.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all three."""
        return {
            "optimizer": self.keeper.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "average": self.average.state_dict() if self.average else None,
        }

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which what all ranks share may be written."""
        if self.sharded is None:
            return nullcontext()
        return self.sharded.versions.alone("loading a state")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; what either side lacks is left as it is."""
        self.keeper.load_state_dict(state["optimizer"])
        if self.sharded is None:
            _restore_scalars(self.optimizer, state["optimizer"])
        if self.scheduler and state["scheduler"]:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.average and state["average"]:
            self.average.load_state_dict(state["average"])


def _restore_scalars(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the scalars of a loaded state the dtype and value that they were saved with.

    torch converts all but "step" to the parameter's dtype, so NAdam's product of momenta and
    ASGD's averaging coefficients would be rounded for bfloat16 parameters.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                here = optimizer.state[parameter][key].device
                optimizer.state[parameter][key] = value.detach().clone().to(here)


def _check_fused(optimizer: Optimizer) -> None:
    """Raise UsageError for a fused SGD of 16-bit parameters on the CPU.

    Up to torch 2.13 it updates the last few elements of a tensor only, and its momentum is
    whatever was in memory (pytorch/pytorch#191763).
    """
    for group in optimizer.param_groups if type(optimizer) is SGD else ():
        for parameter in group["params"]:
            half = parameter.dtype in (torch.bfloat16, torch.float16)
            if group["fused"] and half and parameter.device.type != "cuda":
                raise UsageError(
                    "torch's SGD with fused=True does not update 16-bit parameters correctly on "
                    "the CPU (pytorch/pytorch#191763), and no two runs give the same bits: use "
                    "SGD without fused=True"
                )


def _grouped(
    parameters: Iterable[tuple[str, nn.Parameter]], groups: Groups | None
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the parameters, or groups of those with equal options in order of appearance."""
    if groups is None:
        return [parameter for _, parameter in parameters]
    found: list[dict[str, Any]] = []
    for name, parameter in parameters:
        options = dict(groups(name, parameter))
        for group in found:
            if {key: value for key, value in group.items() if key != "params"} == options:
                group["params"].append(parameter)
                break
        else:
            found.append({"params": [parameter], **options})
    return found
