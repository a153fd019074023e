"""The optimizers, their parameter groups and learning-rate schedulers, and the weight average."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.checksum import name_optimizer_tensors
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.description import Description, describe, describe_optimizer
from lockstep.sharded_tensors import is_sharded, local_part, name_storage, read_version
from lockstep.training.combined_optimizer import CombinedOptimizer
from lockstep.training.learning_rate_schedule import LearningRateSchedule
from lockstep.training.optimizer_checks import (
    find_foreign_code,
    find_nested,
    load_whole_state,
    require_complete_state,
    require_parameterwise,
)
from lockstep.training.optimizer_config import OptimizerConfig, make_optimizers
from lockstep.training.storage.sharded_step import CUT_ADVICE, explain_cut, require_shardable
from lockstep.training.storage.shared_optimizer import SharedOptimizer

__all__ = ["Optimization", "OptimizerHookCheck", "copy_on_meta", "make_average"]


# It has many methods: steps, checkpoints, digests and audits each read another part of the state.
class Optimization:
    """The optimizers, schedulers and weight average of a training; equal on every rank.

    Args:
        module: The model.
        schedules: The optimizers with their schedulers.
        average: The average of the weights; None: there is none.
        is_combined: Whether optimizers may be added.

    Attributes:
        names: The names of the model's parameters.
        schedules: The argument.
        optimizers: The optimizers.
        optimizer: The optimizers as one.
    """

    def __init__(
        self,
        module: nn.Module,
        schedules: Sequence[LearningRateSchedule],
        average: AveragedModel | None,
        *,
        is_combined: bool = False,
    ) -> None:
        self.module = module
        self.average = average
        self.schedules = [*schedules]
        self.optimizers = tuple(schedule.optimizer for schedule in schedules)
        self.names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        self.optimizer = (
            self.optimizers[0]
            if len(schedules) == 1 and not is_combined
            else CombinedOptimizer(self.optimizers)
        )
        self._guard = _StepGuard({id(optimizer) for optimizer in self.optimizers})
        self._nested = [one for optimizer in self.optimizers for one in find_nested(optimizer)]
        # Each rank steps some parameters, or pieces of them, so hooks would see only these.
        self.is_split = False
        self._shards = 0
        self._trained: set[torch.Tensor] = set()  # the parameters that may be cut as they are
        self.shared: SharedOptimizer | None = None

    @classmethod
    def make(
        cls,
        module: nn.Module,
        configs: Sequence[OptimizerConfig],
        average: AveragedModel | None,
        device: torch.device,
    ) -> Optimization:
        """Make the optimizers and schedulers of a trainer, which steps them itself.

        Args:
            module: The model.
            configs: The optimizers with their groups and schedulers.
            average: The average of the weights; None: there is none.
            device: The device of the parameters.
        """
        optimizers = make_optimizers(configs, module)
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        sparse = sparse_weights(module.modules())
        for optimizer in optimizers:
            require_complete_state(optimizer, names, sparse, device)
        schedules = map(LearningRateSchedule, configs, optimizers)
        made = cls(module, list(schedules), average)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(made._guard)
        return made

    def add(self, schedule: LearningRateSchedule) -> None:
        """Add an optimizer of the script."""
        assert isinstance(self.optimizer, CombinedOptimizer)
        self._nested += find_nested(schedule.optimizer)
        self.schedules.append(schedule)
        self.optimizers = (*self.optimizers, schedule.optimizer)
        self.optimizer.members = self.optimizers

    @property
    def storage(self) -> str:
        """The storage of the parameters, as the argument of `Trainer` names it."""
        if self.shared is not None:
            return "shared"
        sharded: Any = next(filter(is_sharded, self.names), None)
        if sharded is None:
            return "replicated"
        return name_storage(sharded.device_mesh)

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group; NaN without optimizers."""
        if not self.optimizers:
            return math.nan
        return float(self.optimizers[0].param_groups[0]["lr"])

    def get_only_schedule(self, name: str) -> LearningRateSchedule:
        """Return the optimizer with its scheduler; UsageError if there are several.

        Args:
            name: The attribute of the trainer that is read, for the message.
        """
        if len(self.schedules) > 1:
            raise UsageError(
                f"this trainer has {len(self.schedules)} optimizers: write "
                f"trainer.{name}s[number] instead of trainer.{name}"
            )
        return self.schedules[0]

    def require_split(self, stages: int, is_shared: bool, shards: int = 0) -> None:
        """Raise LayoutError if the optimizers cannot step a part of the model on each rank.

        Args:
            stages: The number of stages.
            is_shared: Whether parameters are shared by the ranks.
            shards: The number of ranks over which each parameter is divided; 0: it is not.
        """
        self.is_split = stages > 1 or is_shared or shards > 0
        self._shards = shards
        for optimizer in self.optimizers if shards else ():
            require_shardable(optimizer, self.names, shards)
        if is_shared and len(self.optimizers) > 1:
            raise LayoutError(
                'storage="shared" steps one optimizer, and this trainer has '
                f'{len(self.optimizers)}: train with storage="replicated"'
            )
        if foreign := self.find_foreign_code():
            raise LayoutError(foreign)
        for optimizer in self.optimizers if stages > 1 else ():
            require_parameterwise(optimizer)

    def find_bad_cut(self) -> str:
        """Return a sentence about a parameter that is trained now, and whose shards are not exact.

        It was frozen when the trainer was made; "" if there is none.
        """
        if not self._shards:
            return ""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not parameter.requires_grad or parameter in self._trained:
                        continue
                    reason = explain_cut(optimizer, group, parameter, self._shards)
                    if reason:
                        return f"{self.names[parameter]} {reason}{CUT_ADVICE}"
                    self._trained.add(parameter)
        return ""

    def find_foreign_code(self) -> str:
        """Return a sentence about a hook or replaced step that this layout cannot run, or ""."""
        foreign = find_foreign_code(self._nested) if self.is_split else ""
        return foreign and (
            f"{foreign} would get only the parameters, or the slices of them, that this rank "
            "updates: clip with max_grad_norm= or exact.clip_grad_norm_(), change weights after "
            'the step, or train without stages, shards and storage="shared"; set its attribute '
            "lockstep_elementwise = True if it needs no other elements"
        )

    def options(self) -> dict[str, Any]:
        """Return the classes of the optimizers and their default options, without learning rates.

        The record has the learning rate of every step.
        """
        schedulers = [
            schedule.scheduler for schedule in self.schedules if schedule.scheduler is not None
        ]
        schedule = {"scheduler": ", ".join(type(scheduler).__name__ for scheduler in schedulers)}
        plain = {
            name if len(self.optimizers) == 1 else f"{number}.{name}": value
            for number, optimizer in enumerate(self.optimizers)
            for name, value in optimizer.defaults.items()
            if name != "lr" and isinstance(value, (bool, int, float, str, tuple))
        }
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return {"class": names, **(schedule if schedulers else {}), **plain}

    def describe(self) -> Description:
        """Describe the optimizers and the schedulers."""
        entries: Description = {}
        for number, schedule in enumerate(self.schedules):
            suffix = "" if len(self.schedules) == 1 else f"[{number}]"
            entries |= describe_optimizer(f"optimizer{suffix}", schedule.optimizer, self.names)
            entries |= describe(f"scheduler{suffix}", schedule.scheduler)
            entries[f"restore_schedule{suffix}"] = str(schedule.is_restored)
        return entries

    @property
    def stateful(self) -> Optimizer | SharedOptimizer:
        """The object with the optimizer's state dict: the optimizer, or the sharded optimizer."""
        return self.shared or self.optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in the order in which the state dict numbers them."""
        if self.shared is not None:
            return self.shared.parameters
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def find_name(self, stepped: torch.Tensor) -> str:
        """Return the name of a parameter of an optimizer, which may be a piece of it."""
        if self.shared is not None:
            stepped = self.shared.find_whole(stepped)
        return self.names[stepped]

    def tensors(self) -> dict[str, Any]:
        """Return the optimizer's tensors by name, such as "conv.weight/exp_avg"."""
        states = self.optimizer.state if self.shared is None else self.shared.states()
        # An optimizer of the script may have parameters of other models, too.
        own = {self.names[p]: state for p, state in states.items() if p in self.names}
        return name_optimizer_tensors(own)

    def local_state(self) -> dict[str, Any]:
        """Return the state of this rank's parameters, by names such as "conv.weight/exp_avg".

        The average of a parameter is named "conv.weight/average".
        """
        here = {name for parameter, name in self.names.items() if not parameter.is_meta}
        tensors = {
            name: value for name, value in self.tensors().items() if name.rpartition("/")[0] in here
        }
        return tensors | self._average_state()

    def describe_state(self) -> list[Any]:
        """Return values that change if a script writes to the state of an optimizer."""
        return [
            [(key, read_version(value)) for key, value in state.items() if torch.is_tensor(value)]
            for optimizer in self.optimizers
            for state in optimizer.state.values()
        ]

    def unshared_state(self) -> dict[str, Any]:
        """Return the part of `local_state` that other ranks have copies of."""
        return self.local_state() if self.shared is None else self._average_state()

    def _average_state(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        return {
            f"{name}/average": parameter
            for name, parameter in self.average.module.named_parameters()
            if not parameter.is_meta
        }

    def step_shared(self, about: str) -> None:
        """Step the optimizer on parameters that all ranks share: a collective call.

        Args:
            about: The operation that the call is part of, for messages.
        """
        assert self.shared is not None
        with self._guard.opened():
            self.shared.step(about)

    def step(self) -> None:
        """Step the optimizer (unless parameters are shared), the average and the scheduler."""
        if self.shared is None:
            self._guard.is_open = True
            try:
                self.optimizer.step()
            finally:
                self._guard.is_open = False
        if self.average is not None:
            self.average.update_parameters(self.module)
        for schedule in self.schedules:
            if schedule.scheduler is not None and schedule.interval == "step":
                schedule.step()

    def end_epoch(self, loss: float) -> None:
        """Step the schedulers of interval "epoch"; `ReduceLROnPlateau` gets the loss."""
        with warnings.catch_warnings():
            # In a resumed run the optimizer may have stepped only before the state was saved.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for schedule in self.schedules:
                if schedule.interval == "epoch":
                    schedule.step(loss)

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the state of the scheduler, or those of several; None without one."""
        states = [
            None if schedule.scheduler is None else schedule.scheduler.state_dict()
            for schedule in self.schedules
        ]
        if len(states) == 1 or not any(states):
            return states[0]
        return {"schedulers": states}

    def pair_schedules(
        self, saved: Mapping[str, Any] | None
    ) -> list[tuple[LearningRateSchedule, Mapping[str, Any]]]:
        """Return each schedule with its part of a `scheduler_state`, empty without a scheduler."""
        states = (saved or {}).get("schedulers") or [saved] * len(self.schedules)
        return [
            (schedule, part or {}) for schedule, part in zip(self.schedules, states, strict=True)
        ]

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which parameters and state that ranks share may be written."""
        if self.shared is None:
            return nullcontext()
        return self.shared.loading()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, except parts that are None or missing here."""
        if self.shared is None:
            load_whole_state(self.optimizer, state["optimizer"])
        else:
            self.shared.load_state_dict(state["optimizer"])
        for schedule, scheduler in self.pair_schedules(state["scheduler"]):
            schedule.load_state_dict(scheduler)
        if self.average and state["average"]:
            self.average.load_state_dict(state["average"])


def make_average(module: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a module that averages the module's parameters exponentially.

    Parameters of integers and 8-bit floats are copied: they are frozen, and cannot be averaged in
    their dtype.

    Raises:
        UsageError: The decay is not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise UsageError(f"ema_decay={decay}: expected a decay in [0, 1)")
    update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def average(averaged: Any, current: Any, count: Any) -> None:
        averaged = [*map(local_part, averaged)]
        current = [*map(local_part, current)]
        dtype = averaged[0].dtype  # of all: torch calls this for each device and dtype
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
            update(averaged, current, count)
        else:
            for copy, parameter in zip(averaged, current, strict=True):
                copy.copy_(parameter)

    with _without_graphs(module):
        return AveragedModel(module, multi_avg_fn=average)


def copy_on_meta(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Return a copy of a module whose parameters are on the meta device.

    Args:
        module: The module.
        copies: The copies of its parts, by their `id`, which are used again; gets those that are
            made.
    """
    empty = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        for parameter in module.parameters()
        if not is_sharded(parameter)  # otherwise its module has been copied
    }
    copies |= empty
    with _without_graphs(module):
        copied = copy.deepcopy(module, copies)
    for key in empty:  # once a parameter is sharded, another one may get its id
        del copies[key]
    return copied


@contextmanager
def _without_graphs(module: nn.Module) -> Iterator[None]:
    """Detach what forward has computed and kept in attributes, while the body copies a module.

    Such tensors, like the weight of `torch.nn.utils.weight_norm`, cannot be copied with a graph.
    """
    computed = [
        (vars(part), name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    for attributes, name, value in computed:
        attributes[name] = value.detach()
    try:
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


class OptimizerHookCheck(StepHook):
    """The hook that refuses what an optimizer cannot do with a part of the parameters.

    These are hooks that would get only this part, and parameters whose shards are not exact.
    """

    name = "optimizer"

    def __init__(self, optimization: Optimization) -> None:
        self._optimization = optimization

    def status(self, step: StepContext) -> None:
        """Refuse the step if an optimizer has such a hook or parameter now."""
        if step.is_stopped:
            return
        reason = self._optimization.find_foreign_code() or self._optimization.find_bad_cut()
        if reason:
            step.refuse(reason)


@dataclass
class _StepGuard:
    """An optimizer hook that refuses steps made by the script.

    It holds no reference, so that an optimizer is freed with its trainer.

    Attributes:
        optimizers: The `id` of each optimizer; its hooks may also be called for its copies.
        is_open: Whether the trainer is stepping the optimizers.
    """

    optimizers: Collection[int]
    lockstep_elementwise = True
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
        if id(optimizer) in self.optimizers and not self.is_open:
            raise UsageError(
                "trainer.step(batch) and trainer.manual_step() step the optimizer themselves, and "
                "trainer.optimizer.step() would step it once more with the same gradients: remove "
                "this call"
            )
