"""The state from which training continues, in a form that every layout can load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.shards import Rows, split_shards
from lockstep.checksum import digest, name_optimizer_tensors
from lockstep.comm.collectives import all_reduce_messages
from lockstep.kernel.batch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.kernel.parts import Executor
from lockstep.kernel.step_context import Attempt
from lockstep.model.evaluation import EvaluationTask
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.gather_state import gather_model_state, gather_optimizer_state
from lockstep.pipeline.partition import Placement
from lockstep.sharded_tensors import gather_tensors, is_sharded, local_rows, read_version
from lockstep.training.history import History
from lockstep.training.module_settings import ModuleSettings
from lockstep.training.optimization import Optimization
from lockstep.training.optimizer_checks import require_state_of
from lockstep.training.storage.sharded_storage import shard_optimizer_state, shard_state

__all__ = ["TrainerExecutor", "TrainingPosition", "TrainingState", "begin_position"]

AVERAGED = "module."
"""The prefix that torch gives to the names of averaged weights."""


@dataclass
class TrainingPosition:
    """The position of a training.

    Attributes:
        attempt: The latest attempt at a step.
        seed: The trainer's seed.
        steps: The number of finished steps.
        epoch: The latest epoch that was begun, from 0.
        next_epoch: The epoch of the next iteration over batches that names no epoch.
        finished: The dataset, the epoch and the seed of the latest iteration that was completed.
    """

    attempt: Attempt
    seed: int
    steps: int = 0
    epoch: int = 0
    next_epoch: int = 0
    finished: tuple[Any, int, int] | None = None

    def begin_round(self) -> None:
        """Count attempts from the beginning of a round of an elastic run, as all ranks do."""
        self.attempt = Attempt(self.attempt.trainer, self.steps, -1)


_trainers = 0  # made so far, by this rank or by others of its worlds


def begin_position(seed: int, group: dist.ProcessGroup | None) -> TrainingPosition:
    """Number a trainer, the same on every rank, and return its position; a collective call."""
    global _trainers
    number = all_reduce_messages(
        _trainers, max, lambda value: str(value).encode(), int, "making a trainer", group
    )
    _trainers = number + 1
    return TrainingPosition(Attempt(number, step=0, number=-1), seed)


class TrainerExecutor(Executor, Protocol):
    """An executor that is prepared, evaluated and saved, too."""

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on stages; None while this rank has all of them."""

    @property
    def is_ready(self) -> bool:
        """Whether steps can be computed: false until the model is partitioned into stages."""

    def prepare(self, batch: Any) -> Any:
        """Prepare for the first step; return the part of the batch that this rank needs."""

    def evaluate(
        self, model: nn.Module | None, batches: Iterable[Batch], task: EvaluationTask
    ) -> Any:
        """Evaluate the model, or a copy of it with other weights; return the task's result."""


# It has many methods: each part of the state is read for checkpoints, digests and ranks that
# join, and is loaded from each of them.
class TrainingState:
    """The state of a training: weights, buffers, their average, optimizer state, and position.

    With stages a rank holds a part of each. Every method that returns a whole state or a digest
    must then be called on every rank.

    Args:
        module: The model, without the compiler's wrapper.
        optimization: The optimizers, the schedulers and the average of the weights.
        parallel: The layout, the loss and the arithmetic.
        executor: The executor of the micro-batches.
        history: The history, which has the sums of the current epoch.
        position: The position of the training.

    Attributes:
        module, optimization, parallel, executor, history, position: The arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        optimization: Optimization,
        parallel: ParallelContext,
        executor: TrainerExecutor,
        history: History,
        position: TrainingPosition,
    ) -> None:
        self.module = module
        self.optimization = optimization
        self.parallel = parallel
        self.executor = executor
        self.history = history
        self.position = position
        self._names = optimization.names
        average = optimization.average
        parts = {"model": module} | parallel.other_modules() | {"loss": parallel.loss}
        parts |= {} if average is None else {"ema_model": average.module}
        self._settings = ModuleSettings(parts, parallel.device)

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on stages; None while this rank has all of them."""
        return self.executor.placement

    @property
    def part(self) -> tuple[int, int] | None:
        """The number of this rank's part of the state, and the number of parts.

        None if the model is not partitioned yet, and another rank saves all of it.
        """
        if self.parallel.is_sharded:
            return self.parallel.part
        position, stages = self.parallel.part
        if self.placement is None:
            return (0, 1) if position == 0 else None
        return position, stages

    def model_state(self, *, ema: bool = False) -> dict[str, Any]:
        """Return the state dict of the model, or of the averaged weights."""
        state = self.collect_model(ema)
        whole: dict[str, Any] = gather_tensors(state)
        return whole

    def collect_model(self, ema: bool = False) -> dict[str, Any]:
        """Return the state dict with sharded tensors, which are not gathered yet."""
        module = self.select_module(ema)
        self._require_whole()
        state: dict[str, Any] = module.state_dict()
        if self.placement is None:
            return state
        return gather_model_state(state, self._source, self.parallel.device)

    def select_module(self, ema: bool = True) -> nn.Module:
        """Return the model, or the one with averaged weights; UsageError if there is no average."""
        if not ema:
            return self.module
        if self.optimization.average is None:
            raise UsageError(
                "there is no average of the weights: pass ema_decay=0.999 to the trainer"
            )
        return self.optimization.average.module

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state dict of the optimizer."""
        self._require_whole()
        optimizer = self.optimization.optimizer
        if self.placement is None:
            whole: dict[str, Any] = gather_tensors(self.optimization.stateful.state_dict())
            return whole
        return gather_optimizer_state(optimizer, self._names, self._source, self.parallel.device)

    def ema_state(self) -> dict[str, Any] | None:
        """Return the state dict of the average, with its number of updates; None without one."""
        average = self.optimization.average
        if average is None:
            return None
        return {"n_averaged": average.n_averaged} | {
            AVERAGED + name: value for name, value in self.model_state(ema=True).items()
        }

    def buffer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that training continues from and that `model_state` does not have.

        Returns:
            Tensors by name: under "model" and "average" the non-persistent buffers, under "loss"
            and "extra_modules[i]" all buffers of the loss and of each extra module, and their
            parameters that are not the model's.
        """
        buffers = self._unsaved_buffers()
        if self.placement is None:
            return buffers
        for group in ("model", "average"):
            buffers[group] = gather_model_state(buffers[group], self._source, self.parallel.device)
        # Only the ranks of the last stage compute the loss and write its buffers.
        last = len(self.placement.partition.ranges) - 1
        source = last % self.parallel.stages
        if not self._has_last_stage:
            buffers["loss"] = {name: buffer.to("meta") for name, buffer in buffers["loss"].items()}
        buffers["loss"] = gather_model_state(
            buffers["loss"], lambda name: source, self.parallel.device
        )
        return buffers

    def digest(self) -> str:
        """Return the SHA-256 over parameters and buffers."""
        return digest(self.collect_model())

    def optimizer_digest(self) -> str:
        """Return the SHA-256 over the optimizer's state."""
        self._require_whole()
        if self.placement is None:
            return digest(self.optimization.tensors())
        order = self._order()
        states = self.optimizer_state()["state"]
        return digest(name_optimizer_tensors({order[n]: state for n, state in states.items()}))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, which any layout can load."""
        return {
            "model": self.model_state(),
            "buffers": self.buffer_state(),
            "optimizer": self.optimizer_state(),
            "scheduler": self.optimization.scheduler_state(),
            "average": self.ema_state(),
            "module_settings": self._settings.state_dict(),
            **self.position_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, in this or another layout.

        Raises:
            UsageError: It was saved with another seed or number of micro-batches.
        """
        self.require_same_bits(state, "state")
        self._load_tensors(state)
        self.load_settings(state)
        self.load_position(state)
        self.position.next_epoch = state["epoch"] + (not self.history.is_inside_epoch)

    def require_same_bits(self, saved: Mapping[str, Any], what: str) -> None:
        """Raise UsageError if a state was saved with another seed or number of micro-batches.

        Args:
            saved: The state.
            what: What was saved, for the message.
        """
        here = self.position_state()
        for name in ("seed", "microbatches"):
            if saved[name] != here[name]:
                raise UsageError(
                    f"the {what} was saved with {name}={saved[name]}, this trainer has "
                    f"{name}={here[name]}; resuming would give different bits"
                )

    def load_settings(self, state: Mapping[str, Any]) -> None:
        """Restore what the script had changed in the modules, once it is where the state was saved.

        Raises:
            UsageError: A setting that cannot be restored has another value.
        """
        if "module_settings" in state:  # older states have none
            self._settings.load_state_dict(state["module_settings"])

    def position_state(self) -> dict[str, Any]:
        """Return the position of the training as plain values, the same on every rank."""
        scale = self.parallel.loss_scale
        return {
            "history": self.history.state_dict(),
            "steps": self.position.steps,
            "epoch": self.position.epoch,
            "seed": self.position.seed,
            "microbatches": self.parallel.microbatches,
            "loss_scale": scale.state_dict() if scale is not None else None,
        }

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load a position that `position_state` returned; older states lack some entries."""
        self.history.load_state_dict(state.get("history") or {"open": state["open_epoch"]})
        position = self.position
        steps = state["steps"]
        position.steps = steps
        position.epoch = state["epoch"]
        position.attempt = Attempt(position.attempt.trainer, steps, steps - 1)
        scale = self.parallel.loss_scale
        saved = state.get("loss_scale")
        if scale is not None and saved is not None:
            scale.load_state_dict(saved)

    def local_state(self) -> dict[str, Any]:
        """Return this rank's part of the state, for a checkpoint; not a collective call.

        With stages, these are the tensors that the rank owns, and of sharded tensors its shards;
        otherwise all tensors. The keys of
        the optimizer's state are parameter names, and averaged weights have the names of the
        model's weights.
        """
        self._require_whole()
        packed = self.optimization.stateful.state_dict()
        order = self._order()
        groups = [
            {**group, "params": [order[index] for index in group["params"]]}
            for group in packed["param_groups"]
        ]
        average = self.optimization.average
        buffers = self._unsaved_buffers()
        for group in ("model", "average"):
            buffers[group] = self._owned(buffers[group])
        if self.placement is not None and not self._has_last_stage:
            buffers["loss"] = {}
        return {
            "model": split_shards(self._owned(self.module.state_dict())),
            "optimizer": split_shards(
                self._owned({order[i]: state for i, state in packed["state"].items()})
            ),
            "parameter_groups": groups,
            "scheduler": self.optimization.scheduler_state(),
            "ema": split_shards(self._owned(average.module.state_dict())) if average else None,
            "ema_updates": average.n_averaged if average else None,
            "buffers": buffers,
            "module_settings": self._settings.state_dict(),
        }

    def publish_edits(self) -> None:
        """Make what the script has changed in shared state visible to all ranks.

        Call it on every rank before the state is read; a collective call if there are changes.
        """
        if (shared := self.optimization.shared) is not None:
            shared.publish_edits()

    @property
    def has_edits(self) -> bool:
        """Whether the script has changed shared state since the last step or `publish_edits`."""
        shared = self.optimization.shared
        return shared is not None and shared.has_edits

    def is_whole(self) -> bool:
        """Return whether shared parameters and optimizer state are complete, of a single step."""
        shared = self.optimization.shared
        return shared is None or (shared.shared.is_whole() and not self.has_edits)

    def _require_whole(self) -> None:
        if (shared := self.optimization.shared) is not None:
            shared.shared.require_whole()

    def describe_changes(self) -> list[Any]:
        """Return values that change if a script writes to weights, state or settings."""
        groups = self.optimization.optimizer.param_groups
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        others = [
            parameter for module in self.parallel.extra_modules for parameter in module.parameters()
        ]
        versions = [read_version(tensor) for tensor in (*self._names, *others)]
        state = self.optimization.describe_state()
        return [repr(options), versions, state, self._settings.describe()]

    def find_rows(self) -> Rows:
        """Return which rows of each sharded parameter `load_local` needs."""
        sharded = ((name, one) for one, name in self._names.items() if is_sharded(one))
        return {name: (one.shape, local_rows(one)) for name, one in sharded}

    def find_other_parameters(self, state: Mapping[str, Any]) -> set[str]:
        """Return the parameters that only the optimizer has, or only that of a `local_state`."""
        saved = {name for group in state["parameter_groups"] for name in group["params"]}
        return saved ^ set(self._order())

    def load_local(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from the merged `local_state` of all ranks."""
        average = None
        if state["ema"] is not None:
            average = {AVERAGED + name: value for name, value in state["ema"].items()}
            average["n_averaged"] = state["ema_updates"]
        numbers = {name: number for number, name in enumerate(self._order())}
        saved = [name for group in state["parameter_groups"] for name in group["params"]]
        if other := self.find_other_parameters(state):
            raise UsageError(
                f"the optimizer has {len(numbers)} parameters, and {len(saved)} in the state, such "
                f"as {min(other)}: add parameter groups where the interrupted run did, outside of "
                "loops over batches, or begin with all of them, and give those that are trained "
                "later a learning rate of 0"
            )
        optimizer = {
            "state": {numbers[name]: entries for name, entries in state["optimizer"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in state["parameter_groups"]
            ],
        }
        self._load_tensors({**state, "optimizer": optimizer, "average": average})

    def _order(self) -> list[str]:
        """Return the names of the parameters, in the optimizer's order."""
        return [self._names[parameter] for parameter in self.optimization.parameters]

    def _owned(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state, by parameter and buffer name, that this rank owns."""
        placement = self.placement
        if placement is None:
            return dict(state)
        return {
            name: value
            for name, value in state.items()
            if name not in placement.stages_by_name or placement.is_owned(name)
        }

    @property
    def _has_last_stage(self) -> bool:
        assert self.placement is not None
        return len(self.placement.partition.ranges) - 1 in self.placement.stages

    def _load_tensors(self, state: Mapping[str, Any]) -> None:
        """Load the tensors that this rank holds from whole states."""
        require_state_of(self.optimization.optimizers, state["optimizer"])
        average = state["average"] and self._held(state["average"], AVERAGED)
        if average is not None and self.optimization.average is not None:
            average = shard_state(average, self.optimization.average.state_dict())
        optimizer = shard_optimizer_state(state["optimizer"], self.optimization.parameters)
        with self.optimization.loading():
            model = shard_state(self._held(state["model"], ""), self.module.state_dict())
            try:
                self.module.load_state_dict(model)
            except RuntimeError as error:
                given = " ".join(f"{error}".split())
                raise UsageError(f"the state is not one of this model: {given}") from error
            self.optimization.load_state_dict({**state, "optimizer": optimizer, "average": average})
        self._load_buffers(state.get("buffers", {}))  # older states have none

    def _unsaved_buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's tensors of `buffer_state`."""
        average = self.optimization.average
        return {
            "model": _non_persistent_buffers(self.module),
            "average": _non_persistent_buffers(average.module) if average else {},
            "loss": {},
        } | {
            group: dict(module.named_buffers())
            | {
                name: parameter.detach()
                for name, parameter in module.named_parameters()
                if parameter not in self._names
            }
            for group, module in self.parallel.other_modules().items()
        }

    @torch.no_grad()
    def _load_buffers(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Copy saved buffers into those of the same names; the others keep their values."""
        for group, buffers in self._unsaved_buffers().items():
            for name, buffer in buffers.items():
                value = saved.get(group, {}).get(name)
                if value is None or buffer.is_meta:
                    continue
                if value.shape != buffer.shape:
                    raise UsageError(
                        f"the parameter or buffer {name} of {group} has shape "
                        f"{tuple(buffer.shape)}, and {tuple(value.shape)} in the state: load a "
                        "state of the same modules"
                    )
                buffer.copy_(value)

    def _source(self, name: str) -> int:
        assert self.placement is not None
        return self.placement.find_owner(name)

    def _held(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        """Return a state in which tensors that this rank does not hold are on the meta device."""
        placement = self.placement
        if placement is None:
            return state
        return {
            name: value.to("meta")
            if isinstance(value, torch.Tensor)
            and name.removeprefix(prefix) in placement.stages_by_name
            and not placement.is_local(name.removeprefix(prefix))
            else value
            for name, value in state.items()
        }


def _non_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the module's state dict leaves out, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name in part._non_persistent_buffers_set
    }
