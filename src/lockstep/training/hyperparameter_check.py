"""Settings that a program may change between steps, but not within one, compared in every step.

    trainer.optimizer.param_groups[0]["lr"] = 0.01       an option of the optimizer
    model[1].eval()                                      the mode of a module
    model[2].p = 0.5                                     a plain constant of a module of torch
    model[0].weight.requires_grad_(False)                a frozen parameter

A change on one rank alone would pass unnoticed: all ranks would get the same sums, but not those
of a single process. The status of every step therefore contains a hash of these settings. A change
between two micro-batches, such as `scheduler.step()` in the wrong loop, would happen as often as
a rank has micro-batches. So where the script computes them, the settings of all are compared:

    micro-batch 0           micro-batch 1           micro-batch 2
    backward: noted         backward: the same?     backward: the same?

Other attributes of modules may change while a rank computes its micro-batches. The audit finds
those that differ between ranks and have an effect, where a micro-batch can be computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_bytes
from lockstep.kernel.errors import DisagreementError
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.description import (
    PLAIN,
    describe_options,
    describe_value,
    find_difference,
    ignored_attributes,
)

__all__ = ["HyperparameterCheck"]


FIRST = 3
"""The number of steps of a process in which the state of the optimizer is compared, too."""

ADVICE = (
    "How many micro-batches a rank computes depends on the number of ranks, so make changes "
    "between two steps only: call scheduler.step() once per batch, after its last micro-batch"
)


# It has many attributes: the settings of each kind, and what was found of them.
class HyperparameterCheck(StepHook):
    """The hook that compares the settings of modules and an optimizer.

    Args:
        modules: The modules that a step calls, by the name that messages use.
        optimizer: The optimizer of the trainer.
        group: The group of the training's ranks.
        is_loop: Whether a step ends with a script's loop over its micro-batches, so that what the
            loop changes in its last micro-batch is seen, too.
    """

    name = "hyperparameters"

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        is_loop: bool = False,
    ) -> None:
        self._is_loop = is_loop
        self._optimizer = optimizer
        self._group = group
        self._step: StepContext | None = None  # whose micro-batches the script computes
        self._first = -1  # its first micro-batch on this rank, and the settings in it
        self._noted: list[Any] = []
        self._versions: list[int] = []  # of the optimizer's state
        self._modules: dict[str, nn.Module] = {}
        self._constants: dict[str, tuple[dict[str, Any], str]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for root, module in modules.items():
            for path, part in module.named_modules(prefix=root):
                name = f"{path} ({type(part).__name__})"
                self._modules[f"{name}.training"] = part
                for constant in _list_constants(part):
                    self._constants[f"{name}.{constant}"] = (vars(part), constant)
            for path, parameter in module.named_parameters(prefix=root):
                self._parameters[f"{path}.requires_grad"] = parameter

    def begin(self, step: StepContext, batch: Any) -> None:
        """Compare the micro-batches that the script computes."""
        if batch is None:
            step.backward_checks.append(self._check_microbatch)
            self._step = step
            self._first = -1

    def _check_microbatch(self, microbatch: int) -> None:
        """Note the settings in a rank's first micro-batch, and compare those in the others."""
        step = self._step
        assert step is not None
        if self._first < 0:
            self._first = microbatch
            self._noted = [*self._read(), *self._read_options()]
            self._versions = self._read_versions() if step.attempt.number < FIRST else []
            return
        self._compare(step, f"in micro-batch {microbatch}")

    def _compare(self, step: StepContext, place: str) -> None:
        """Refuse the step if the settings are others than in the rank's first micro-batch."""
        settings = [*self._read(), *self._read_options()]
        versions = self._read_versions() if step.attempt.number < FIRST else []
        if versions != self._versions:
            step.refuse(
                "optimizer.state was written between the micro-batches of a batch: it is another "
                f"{place} than in micro-batch {self._first}. {ADVICE}"
            )
        if settings == self._noted or step.refusal:
            return
        names = [*self._list_names(), *describe_options("optimizer", self._optimizer)]
        entries = zip_longest(names, self._noted, settings)
        name, before, after = next(entry for entry in entries if entry[1] != entry[2])
        step.refuse(
            f"{name} is {after} {place}, and was {before} in micro-batch "
            f"{self._first} of the same batch. {ADVICE}"
        )

    def status(self, step: StepContext) -> str:
        """Return a hash of the settings; "" if there is only one rank."""
        is_noted = self._is_loop and self._step is step and self._first >= 0 and not step.failure
        is_alone = dist.get_world_size(self._group) == 1
        if is_alone and not is_noted:
            return ""
        settings = [*self._read(), *self._read_options()]
        if is_noted and (settings != self._noted or step.attempt.number < FIRST):
            # With one micro-batch on each rank, no backward pass follows the change.
            self._compare(step, "after the last micro-batch")
        return "" if is_alone else xxhash.xxh3_64_hexdigest(repr(settings).encode())

    def merge(self, left: str | None, right: str | None) -> str | None:
        """Return the hash of two ranges of ranks; None if they differ."""
        return left if left == right else None

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Find the difference if the hashes differ.

        Raises:
            DisagreementError: Ranks differ in a setting. Raised on every rank, with the entry, the
                rank and both values.
        """
        if summary.failure is not None or summary.hooks[self.name] is not None:
            return
        entries = zip(self._list_names(), self._read(), strict=True)
        settings = {entry: str(value) for entry, value in entries}
        settings |= describe_options("optimizer", self._optimizer)
        message = json.dumps(settings).encode()
        messages = all_gather_bytes(
            message, f"comparing settings in step {step.number}", self._group
        )
        difference = find_difference([json.loads(message) for message in messages])
        if difference is not None:
            advice = "make every change between steps on all ranks"
            raise DisagreementError(difference.format_message(advice, f" in step {step.number}"))

    def _read_versions(self) -> list[int]:
        """Return the versions of the tensors in the optimizer's state."""
        return [
            value._version
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def _read_options(self) -> list[Any]:
        """Return the options of the optimizer's parameter groups."""
        return [
            value if type(value) in PLAIN else describe_value(value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]

    def _list_names(self) -> list[str]:
        """Return the names of what `_read` returns."""
        return [*self._modules, *self._constants, *self._parameters]

    def _read(self) -> list[Any]:
        """Return the modes and constants, and which parameters are trained."""
        modes = [module.training for module in self._modules.values()]
        constants = [attributes.get(name) for attributes, name in self._constants.values()]
        return [*modes, *constants, *(one.requires_grad for one in self._parameters.values())]


def _list_constants(module: nn.Module) -> list[str]:
    """Return the plain attributes of a module that classes of torch declare to be constants."""
    declared = {
        name
        for base in type(module).__mro__
        if base.__module__.startswith("torch.nn.")
        for name in vars(base).get("__constants__", ())
    }
    attributes = vars(module)
    plain = {name for name in declared if type(attributes.get(name, ...)) in PLAIN}
    return sorted(plain - ignored_attributes(module))
