"""Optimizers with their options, parameter groups, schedules, the average and the clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import lockstep as ls
from grammar.drawing import Draw, described


@dataclass(frozen=True)
class Chosen:
    """A function that returns whether a parameter has one of these names."""

    names: Collection[str]

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is chosen."""
        return name in self.names


class Several:
    """Optimizers of one model that step one after the other, as a script in plain PyTorch does."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = optimizers[0].param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all optimizers."""
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    def step(self) -> None:
        """Step every optimizer."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)


@dataclass(frozen=True)
class Optimization:
    """What turns a gradient into new weights, as it was drawn."""

    optimizer: partial[optim.Optimizer]
    groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None
    scheduler: partial[Any] | None = None
    scheduler_each: str = "step"
    clip_norm: float | None = None
    average: float | None = None
    first: partial[optim.Optimizer] | None = None
    """Another optimizer, of the parameters `chosen`, which steps before the one of the rest."""
    chosen: Chosen | None = None
    first_scheduler: partial[Any] | None = None
    is_hooked: bool = False
    """Whether a hook on the optimizer of the rest changes the gradients, knowing all of them."""

    def __str__(self) -> str:
        """Describe it."""
        parts = [described(self.optimizer)]
        parts += [f"groups={self.groups.__name__}"] if self.groups else []
        if self.scheduler:
            parts.append(f"{described(self.scheduler)} each {self.scheduler_each}")
        parts += [f"clip_norm={self.clip_norm}"] if self.clip_norm else []
        parts += [f"average={self.average}"] if self.average is not None else []
        parts += ["hooked"] if self.is_hooked else []
        if self.first and self.chosen:
            names = ", ".join(sorted(self.chosen.names))
            parts.append(f"first {described(self.first)} of {names}")
            parts += [described(self.first_scheduler)] if self.first_scheduler else []
        return ", ".join(parts)

    @property
    def is_elementwise(self) -> bool:
        """Whether pieces of a parameter can be stepped one by one."""
        return self.optimizer.func is not optim.Adafactor

    def for_sparse_gradients(self) -> Optimization:
        """Return the same with an optimizer that takes sparse gradients and dense ones."""
        return replace(self, optimizer=partial(optim.SGD, lr=0.05, momentum=0.9), groups=None)

    def options(self) -> dict[str, Any]:
        """Return the trainer's options."""
        config = ls.OptimizerConfig(self.make, self.groups, self.scheduler, self.scheduler_each)
        both: Any = config
        if self.first:
            first = ls.OptimizerConfig(
                self.first, scheduler=self.first_scheduler, parameters=self.chosen
            )
            both = [first, config]
        return {
            "optimizer": both,
            "max_grad_norm": self.clip_norm,
            "ema_decay": self.average,
        }

    def make(self, parameters: Any) -> optim.Optimizer:
        """Return the optimizer of the rest, with its hook."""
        made = self.optimizer(parameters)
        if self.is_hooked:
            made.register_step_pre_hook(average_over_parameters)
        return made

    def make_first(self, model: nn.Module) -> optim.Optimizer | None:
        """Return the other optimizer, if there is one."""
        if self.first is None or self.chosen is None:
            return None
        return self.first([p for n, p in model.named_parameters() if self.chosen(n, p)])

    def grouped(self, model: nn.Module) -> list[Any]:
        """Return the parameters of the rest, or groups of those whose options are equal."""
        named = [(n, p) for n, p in model.named_parameters() if not self._is_chosen(n, p)]
        if self.groups is None:
            return [parameter for _, parameter in named]
        found: list[dict[str, Any]] = []
        for name, parameter in named:
            options = dict(self.groups(name, parameter))
            same = [group for group in found if {**group, "params": 0} == {**options, "params": 0}]
            if same:
                same[0]["params"].append(parameter)
            else:
                found.append({"params": [parameter], **options})
        return found

    def _is_chosen(self, name: str, parameter: nn.Parameter) -> bool:
        return self.chosen is not None and self.chosen(name, parameter)


def average_over_parameters(optimizer: optim.Optimizer, arguments: object, options: object) -> None:
    """Divide the gradients by their number: a hook that knows all parameters."""
    present = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    for parameter in present:
        parameter.grad.mul_(1 / len(present))


def without_decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Exempt vectors from weight decay."""
    return {"weight_decay": 0.0} if parameter.dim() < 2 else {}


def slow_biases(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Give biases a learning rate of their own."""
    return {"lr": 0.003, "weight_decay": 0.0} if name.endswith("bias") else {"weight_decay": 0.02}


def with_rate_as_tensor(
    kind: Callable[..., optim.Optimizer], parameters: Any, lr: float, **options: Any
) -> optim.Optimizer:
    """Return an optimizer whose learning rate is a tensor of its own."""
    return kind(parameters, lr=torch.tensor(lr), **options)


def draw_optimization(draw: Draw, steps: int, epochs: int, complex_model: bool) -> Optimization:
    """Draw an optimizer for so many steps, and what goes with it."""
    optimizer = _optimizer(draw, complex_model)
    momentum = {"momentum", "betas"} & optimizer.keywords.keys()
    each = draw.pick("step", "step", "epoch") if epochs else "step"
    scheduler = None
    if draw.chance(0.35):
        scheduler = _scheduler(draw, steps, each, bool(momentum))
    takes_decay = optimizer.func not in (optim.Rprop,)
    groups = draw.pick(without_decay, slow_biases) if takes_decay and draw.chance(0.25) else None
    return Optimization(
        optimizer,
        groups,
        scheduler,
        each if scheduler else "step",
        draw.pick(0.05, 0.5, 5.0) if draw.chance(0.3) else None,
        draw.pick(0.0, 0.5, 0.99) if draw.chance(0.25) else None,
    )


def draw_additions(draw: Draw, drawn: Optimization, model: nn.Module) -> Optimization:
    """Draw a hook on the optimizer, and a second optimizer for some parameters of the model."""
    drawn = replace(drawn, is_hooked=draw.chance(0.06))
    layers = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(each.weight) for each in layers if each.sparse}
    named = dict(model.named_parameters())
    matrices = {name for name, each in named.items() if each.dim() == 2 and not each.is_complex()}
    halves = {name for number, name in enumerate(named) if number % 2}
    if sparse:
        kind = optim.SparseAdam
        names = {n for n, each in named.items() if id(each) in sparse}
        likely = 0.5
    elif draw.chance(0.5):
        kind = optim.Muon
        names = matrices
        likely = 0.15
    else:
        kind = optim.AdamW
        names = halves
        likely = 0.15
    if not draw.chance(likely) or not names or len(names) == len(named):
        return drawn
    scheduler = draw.pick(None, partial(schedules.ExponentialLR, gamma=0.9))
    return replace(
        drawn, first=partial(kind, lr=0.01), chosen=Chosen(names), first_scheduler=scheduler
    )


def _optimizer(draw: Draw, complex_model: bool) -> partial[Any]:
    """Draw an optimizer and its options."""
    how: dict[str, Any] = draw.pick({}, {}, {"foreach": True}, {"foreach": False})
    fused: dict[str, Any] = how if complex_model else draw.pick(how, {"fused": True})
    decay = draw.some(weight_decay=0.01, maximize=True)
    kind = draw.randrange(12)
    if kind < 3:
        options = draw.some(momentum=0.9, dampening=0.1) if draw.chance(0.5) else {
            "momentum": 0.9, "nesterov": True
        }  # fmt: skip
        return partial(optim.SGD, lr=0.05, **options, **decay, **fused)
    if kind < 6:
        options = draw.some(amsgrad=True, betas=(0.8, 0.95))
        adam = draw.pick(optim.Adam, optim.AdamW)
        if draw.chance(0.1) and not how and fused is how:
            return partial(with_rate_as_tensor, adam, lr=0.01, **options, **decay)
        return partial(adam, lr=0.01, **options, **decay, **fused)
    if kind == 6:
        options = draw.some(lr_decay=0.1, initial_accumulator_value=0.1)
        return partial(optim.Adagrad, lr=0.05, **options, **decay, **fused)
    if kind == 7:
        options = draw.some(momentum=0.9, centered=True)
        return partial(optim.RMSprop, lr=0.005, **options, **decay, **how)
    if kind == 8:
        return partial(optim.Adadelta, lr=0.5, **decay, **how)
    if kind == 9:
        return partial(
            optim.NAdam, lr=0.01, **draw.some(decoupled_weight_decay=True), **decay, **how
        )
    if kind == 10:
        return partial(
            optim.RAdam, lr=0.01, **draw.some(decoupled_weight_decay=True), **decay, **how
        )
    rare = [
        partial(optim.Adamax, lr=0.01, **decay, **how),
        partial(optim.ASGD, lr=0.05, **decay, **how),
        partial(optim.Rprop, lr=0.01, **how),
    ]
    if not complex_model:
        rare.append(partial(optim.Adafactor, lr=0.01))
    return draw.choice(rare)


def _scheduler(draw: Draw, steps: int, each: str, has_momentum: bool) -> partial[Any]:
    """Draw a schedule of the learning rate."""
    kinds = [
        partial(schedules.StepLR, step_size=2, gamma=0.5),
        partial(schedules.ExponentialLR, gamma=0.9),
        partial(schedules.CosineAnnealingLR, T_max=5),
        partial(schedules.CosineAnnealingWarmRestarts, T_0=2),
        partial(schedules.LinearLR, start_factor=0.3, total_iters=4),
        partial(schedules.LambdaLR, lr_lambda=inverse),
        partial(schedules.PolynomialLR, total_iters=6, power=2.0),
    ]
    if has_momentum:
        kinds.append(partial(schedules.OneCycleLR, max_lr=0.05, total_steps=steps + 2))
    if each == "epoch":
        kinds += [partial(schedules.ReduceLROnPlateau, patience=0, threshold=10.0)] * 3
    return draw.choice(kinds)


def inverse(number: int) -> float:
    """Return the factor of a learning rate that decays with the inverse of the time."""
    return 1 / (1 + number)
