"""The optimizer, its parameter groups, its learning-rate scheduler, and the weight average."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.checksum import name_optimizer_tensors
from lockstep.errors import UsageError
from lockstep.model.description import Description, describe_object, describe_optimizer
from lockstep.training.sharded_optimizer import ShardedOptimizer

__all__ = [
    "Optimization",
    "OptimizerConfig",
    "OptimizerFactory",
    "ParameterGroups",
    "SchedulerFactory",
]

OptimizerFactory = Callable[..., Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
ParameterGroups = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""A function of a parameter's name and the parameter that returns its optimizer options."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer with parameter groups and a learning-rate scheduler.

    Attributes:
        factory: A function of the parameters, or of a list of parameter groups, that returns the
            optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. For `storage="shared"` the
            optimizer must update each element of a parameter independently; a custom optimizer
            declares this by the class attribute `lockstep_elementwise = True`.
        parameter_groups: A function of a parameter's name and the parameter that returns its
            optimizer options, such as `{"weight_decay": 0.0}`. Parameters with equal options form
            a group. None: one group.
        scheduler: A function of the optimizer that returns a learning-rate scheduler. None: no
            scheduler.
        scheduler_interval: When the scheduler steps: after every "step", after every "epoch" of
            `Trainer.batches`, or only when your code calls `trainer.scheduler.step()` ("manual").
            None: "epoch" for `ReduceLROnPlateau`, which then gets the mean training loss of the
            epoch, and "step" for all others.
    """

    factory: OptimizerFactory
    parameter_groups: ParameterGroups | None = None
    scheduler: SchedulerFactory | None = None
    scheduler_interval: Literal["step", "epoch", "manual"] | None = None


class Optimization:
    """The optimizer, the scheduler and the weight average of a trainer; equal on every rank.

    Args:
        module: The model.
        config: The optimizer with its groups and scheduler.
        ema_decay: The decay of the exponential moving average of the weights; None: no average.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, ema_decay: float | None) -> None:
        factory, interval = config.factory, config.scheduler_interval
        if isinstance(factory, Optimizer) or not callable(factory):
            raise UsageError(
                "pass a factory of the optimizer, such as partial(torch.optim.SGD, lr=0.1), not an "
                "optimizer object"
            )
        if interval not in ("step", "epoch", "manual", None):
            raise UsageError(
                f'scheduler_interval must be "step", "epoch" or "manual", not {interval!r}'
            )
        if ema_decay is not None and not 0 <= ema_decay < 1:
            raise UsageError(f"ema_decay={ema_decay}: expected a decay in [0, 1)")
        self.optimizer = factory(_grouped(module.named_parameters(), config.parameter_groups))
        if isinstance(self.optimizer, LBFGS):
            raise UsageError(
                "LBFGS computes the loss several times per step, which a trainer cannot repeat; "
                "choose an optimizer that steps once"
            )
        _check_fused(self.optimizer)
        self._guard = _StepGuard(id(self.optimizer))
        self.optimizer.register_step_pre_hook(self._guard)
        self.scheduler = config.scheduler(self.optimizer) if config.scheduler else None
        self.average = None if ema_decay is None else _make_average(module, ema_decay)
        is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        self.module, self._interval = module, interval or ("epoch" if is_plateau else "step")
        is_maximum = getattr(self.scheduler, "mode", "min") == "max"
        if is_plateau and (self._interval == "step" or (is_maximum and self._interval == "epoch")):
            raise UsageError(
                "ReduceLROnPlateau receives the mean training loss of each epoch: leave "
                'scheduler_interval="step" and mode="max" out, or write '
                'scheduler_interval="manual" and call trainer.scheduler.step(value) yourself'
            )
        self.sharded: ShardedOptimizer | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def options(self) -> dict[str, Any]:
        """Return the class of the optimizer and its default options, without the learning rate.

        The record has the learning rate of every step.
        """
        schedule = {} if self.scheduler is None else {"scheduler": type(self.scheduler).__name__}
        plain = {
            name: value
            for name, value in self.optimizer.defaults.items()
            if name != "lr" and isinstance(value, (bool, int, float, str, tuple))
        }
        return {"class": type(self.optimizer).__name__, **schedule, **plain}

    def describe(self) -> Description:
        """Describe the optimizer and the scheduler."""
        names: dict[torch.Tensor, str] = {
            each: name for name, each in self.module.named_parameters()
        }
        found = describe_optimizer("optimizer", self.optimizer, names)
        if self.scheduler is None:
            return found | {"scheduler": "None"}
        return found | describe_object("scheduler", self.scheduler)

    @property
    def stateful(self) -> Optimizer | ShardedOptimizer:
        """The object with the optimizer's state dict: the optimizer, or the sharded optimizer."""
        return self.sharded or self.optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in the order in which the state dict numbers them."""
        if self.sharded is not None:
            return self.sharded.parameters
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """Return the optimizer's tensors by name, such as "conv.weight/exp_avg"."""
        if self.sharded is not None:
            return self.sharded.tensors(names)
        return name_optimizer_tensors(self.optimizer, names)

    def local_state(self) -> dict[str, Any]:
        """Return the state of this rank's parameters, by names such as "conv.weight/exp_avg".

        The average of a parameter is named "conv.weight/average".
        """
        names: dict[torch.Tensor, str] = {
            each: name for name, each in self.module.named_parameters()
        }
        here = {name for each, name in names.items() if not each.is_meta}
        found = {
            name: value
            for name, value in self.tensors(names).items()
            if name.rpartition("/")[0] in here
        }
        if self.average is not None:
            found |= {
                f"{name}/average": parameter
                for name, parameter in self.average.module.named_parameters()
                if not parameter.is_meta
            }
        return found

    def step_shared(self, about: str) -> None:
        """Step the optimizer on parameters that all ranks share: a collective call.

        Args:
            about: The operation that the call is part of, for messages.
        """
        assert self.sharded is not None
        with self._guard.opened():
            self.sharded.step(about)

    def step(self) -> None:
        """Step the optimizer (unless parameters are shared), the average and the scheduler."""
        if self.sharded is None:
            with self._guard.opened():
                self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.module)
        if self.scheduler is not None and self._interval == "step":
            self.scheduler.step()

    def end_epoch(self, loss: float) -> None:
        """Step a scheduler of interval "epoch"; `ReduceLROnPlateau` gets the loss."""
        if self.scheduler is None or self._interval != "epoch":
            return
        with warnings.catch_warnings():
            # In a resumed run the optimizer may have stepped only before the state was saved.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer, the scheduler and the average."""
        return {
            "optimizer": self.stateful.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "average": self.average.state_dict() if self.average else None,
        }

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which parameters and state that ranks share may be written."""
        if self.sharded is None:
            return nullcontext()
        return self.sharded.loading()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, except parts that are None or missing here."""
        self.stateful.load_state_dict(state["optimizer"])
        if self.sharded is None:
            _restore_scalars(self.optimizer, state["optimizer"])
        if self.scheduler and state["scheduler"]:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.average and state["average"]:
            self.average.load_state_dict(state["average"])


def _make_average(module: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a module that averages the module's parameters exponentially.

    Parameters of integers and 8-bit floats are copied: they are frozen, and cannot be averaged in
    their dtype.
    """
    update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def average(averaged: Any, current: Any, count: Any) -> None:
        dtype = averaged[0].dtype
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
            update(averaged, current, count)
        else:
            for copy, parameter in zip(averaged, current, strict=True):
                copy.copy_(parameter)

    # A tensor that forward has computed and kept in an attribute, such as the weight of
    # torch.nn.utils.weight_norm, cannot be copied with its graph.
    computed = [
        (vars(part), name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    for attributes, name, value in computed:
        attributes[name] = value.detach()
    try:
        return AveragedModel(module, multi_avg_fn=average)
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


@dataclass
class _StepGuard:
    """An optimizer hook that refuses steps made by the script.

    It holds no reference, so that an optimizer is freed with its trainer.

    Attributes:
        optimizer: The `id` of the optimizer; its hooks may also be called for its copies.
        is_open: Whether the trainer is stepping the optimizer.
    """

    optimizer: int
    is_open: bool = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Permit steps in the body."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def __call__(self, optimizer: Optimizer, arguments: object, options: object) -> None:
        if id(optimizer) == self.optimizer and not self.is_open:
            raise UsageError(
                "trainer.step(batch) and trainer.manual_step() step the optimizer themselves, and "
                "trainer.optimizer.step() would step it once more with the same gradients: remove "
                "this call"
            )


def _restore_scalars(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the scalar tensors of a loaded state the dtype and value that they were saved with.

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

    Up to torch 2.13 it updates only the last few elements of a tensor, and leaves its momentum
    uninitialized (pytorch/pytorch#191763).
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
    parameters: Iterable[tuple[str, nn.Parameter]], groups: ParameterGroups | None
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the parameters, grouped by equal options if `groups` is given.

    Groups are in the order of their first parameters.
    """
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
