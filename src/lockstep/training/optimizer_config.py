"""The configuration of optimizers: which parameters each one updates, and how it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.call_checks import check_kinds, read_kinds
from lockstep.kernel.errors import UsageError

__all__ = [
    "OptimizerConfig",
    "OptimizerFactory",
    "ParameterGroups",
    "SchedulerFactory",
    "list_configs",
    "make_optimizers",
    "reject_broken_fused",
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
            optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. Where each rank updates a
            part of the parameters, the class of a custom optimizer declares what it treats by
            itself: `lockstep_elementwise = True` (each element; shared and sharded storage) or
            `lockstep_parameterwise = True` (each parameter; pipeline stages).
        parameter_groups: A function of a parameter's name and the parameter that returns its
            optimizer options, such as `{"weight_decay": 0.0}`. Parameters with equal options form
            a group. None: one group.
        scheduler: A function of the optimizer that returns a learning-rate scheduler. None: no
            scheduler.
        scheduler_interval: When the scheduler steps: after every "step", after every "epoch" of
            `Trainer.batches`, or only when your code calls `trainer.scheduler.step()` ("manual").
            None: "epoch" for `ReduceLROnPlateau`, which then gets the mean training loss of the
            epoch, and "step" for all others.
        parameters: A function of a parameter's name and the parameter that returns whether this
            optimizer updates it, for a trainer with several optimizers. None: all parameters, or
            for the last one of several those that no other updates.
        restore_schedule: Whether a loaded state restores the scheduler and the learning rates, so
            that the training continues with the same bits. False: the scheduler of this
            configuration is used, and repeats the steps of the saved one, for example to train
            longer with another horizon.
    """

    factory: OptimizerFactory
    parameter_groups: ParameterGroups | None = None
    scheduler: SchedulerFactory | None = None
    scheduler_interval: Literal["step", "epoch", "manual"] | None = None
    parameters: Callable[[str, nn.Parameter], bool] | None = None
    restore_schedule: bool = True

    def __post_init__(self) -> None:
        """Check the kinds of the values."""
        check_kinds("ls.OptimizerConfig", read_kinds(type(self).__annotations__), vars(self))
        if self.scheduler_interval not in ("step", "epoch", "manual", None):
            raise UsageError(
                'scheduler_interval must be "step", "epoch" or "manual", not '
                f"{self.scheduler_interval!r}"
            )


def list_configs(
    optimizer: OptimizerFactory | OptimizerConfig | Sequence[OptimizerConfig],
) -> list[OptimizerConfig]:
    """Return the configurations of the optimizers that a trainer gets."""
    if isinstance(optimizer, OptimizerConfig):
        return [optimizer]
    if not isinstance(optimizer, (list, tuple)):
        return [OptimizerConfig(cast("OptimizerFactory", optimizer))]
    for number, config in enumerate(optimizer):
        if not isinstance(config, OptimizerConfig):
            raise UsageError(
                f"optimizer[{number}] is of type {type(config).__name__}: of several optimizers, "
                "each is an ls.OptimizerConfig with a factory, and parameters= that chooses its "
                "parameters by name"
            )
    if not optimizer:
        raise UsageError("the list of optimizers is empty: pass at least one ls.OptimizerConfig")
    return list(optimizer)


def list_intervals(configs: Sequence[OptimizerConfig]) -> str:
    """Describe when the schedulers step."""
    return ", ".join(config.scheduler_interval or "step" for config in configs)


def make_optimizers(configs: Sequence[OptimizerConfig], module: nn.Module) -> tuple[Optimizer, ...]:
    """Return the optimizers of a module's parameters.

    Raises:
        UsageError: A configuration is invalid, or a parameter does not belong to one optimizer.
    """
    return tuple(
        _make_optimizer(config, named, module)
        for config, named in zip(configs, _divide(module, configs), strict=True)
    )


def _divide(
    module: nn.Module, configs: Sequence[OptimizerConfig]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the named parameters of each optimizer."""
    assigned: list[list[tuple[str, nn.Parameter]]] = [[] for _ in configs]
    for number, config in enumerate(configs[:-1]):
        if config.parameters is None:
            raise UsageError(
                f"optimizer {number} of {len(configs)} has no parameters=, a function of (name, "
                "parameter): only the last of several optimizers may take all that are left"
            )
    for name, parameter in module.named_parameters():
        try:
            takers = [
                number
                for number, config in enumerate(configs)
                if config.parameters is not None and config.parameters(name, parameter)
            ]
        except TypeError as error:
            raise UsageError(
                f"parameters= of an ls.OptimizerConfig failed for {name}: {error}; it takes a "
                "parameter's name and the parameter, and returns whether the optimizer updates it"
            ) from error
        if not takers and configs[-1].parameters is None:
            takers = [len(configs) - 1]
        if len(takers) > 1 or (not takers and parameter.requires_grad):
            who = " and ".join(f"optimizer {number}" for number in takers) or "no optimizer"
            raise UsageError(
                f"the parameter {name} is updated by {who}: let parameters= of exactly one "
                "ls.OptimizerConfig return True for it, or leave parameters= of the last one out"
            )
        for number in takers:
            assigned[number].append((name, parameter))
    for number, named in enumerate(assigned):
        if not named and len(configs) > 1:
            raise UsageError(
                f"parameters= of optimizer {number} of {len(configs)} returns True for no "
                "parameter of the model: remove this optimizer, or compare the names with those of "
                "model.named_parameters()"
            )
    return assigned


def _make_optimizer(
    config: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]], module: nn.Module
) -> Optimizer:
    """Call the factory of an optimizer, and check what it returns."""
    factory = config.factory
    if isinstance(factory, (Optimizer, nn.Module)) or not callable(factory):
        raise UsageError(
            "pass a factory of the optimizer, such as partial(torch.optim.SGD, lr=0.1), not an "
            f"object of type {type(factory).__name__}"
            + ("; the order is model, loss, optimizer" if isinstance(factory, nn.Module) else "")
        )
    parameters = _grouped(named, config.parameter_groups)
    if not parameters:
        raise UsageError("the model has no parameters to train")
    try:
        optimizer = factory(parameters)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the factory of the optimizer failed: {error}; it takes the parameters, such as "
            "partial(torch.optim.SGD, lr=0.1)"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "the factory of the optimizer returned an object of type "
            f"{type(optimizer).__name__}, not a torch.optim.Optimizer: for several optimizers pass "
            "a list of ls.OptimizerConfig, each with parameters="
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure and closure.default is inspect.Parameter.empty):
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times per step, which a trainer "
            "cannot repeat: choose an optimizer that steps once per gradient, such as "
            "torch.optim.AdamW, SGD or Rprop, or write the loop in plain PyTorch on one process"
        )
    reject_broken_fused(optimizer)
    known = set(module.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise UsageError(
                    f"param_groups[{number}] of {type(optimizer).__name__} has a tensor of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of the model: make the "
                    "optimizer of the parameters that its factory gets"
                )
    return optimizer


def reject_broken_fused(optimizer: Optimizer) -> None:
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
    grouped: list[dict[str, Any]] = []
    for name, parameter in parameters:
        try:
            options = dict(groups(name, parameter))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"parameter_groups failed for {name}: {error}; it takes a parameter's name and the "
                "parameter, and returns options, such as {'weight_decay': 0.0}, or {}"
            ) from error
        for group in grouped:
            if {key: value for key, value in group.items() if key != "params"} == options:
                group["params"].append(parameter)
                break
        else:
            grouped.append({"params": [parameter], **options})
    return grouped
