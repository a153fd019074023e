"""Settings that a program may change between steps, compared in every step.

    trainer.optimizer.param_groups[0]["lr"] = 0.01       an option of the optimizer
    model[1].eval()                                      the mode of a module
    model[0].weight.requires_grad_(False)                a frozen parameter

A change on one rank alone would pass unnoticed: all ranks would get the same sums, but not those
of a single process. The status of every step therefore contains a hash of these settings. Other
attributes of modules may change while a rank computes its micro-batches; the audit finds those
that differ between ranks and have an effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
)

__all__ = ["HyperparameterCheck"]


class HyperparameterCheck(StepHook):
    """The hook that compares the settings of modules and an optimizer.

    Args:
        modules: The modules that a step calls, by the name that messages use.
        optimizer: The optimizer of the trainer.
        group: The group of the training's ranks.
        is_elastic: Whether the number of ranks can change.

    Attributes:
        is_needed: Whether there are other ranks to compare with, at some time.
    """

    name = "hyperparameters"

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        is_elastic: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self.is_needed = is_elastic or dist.get_world_size(group) > 1
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for root, module in modules.items():
            for path, part in module.named_modules(prefix=root):
                self._modules[f"{path} ({type(part).__name__}).training"] = part
            for path, parameter in module.named_parameters(prefix=root):
                self._parameters[f"{path}.requires_grad"] = parameter

    def status(self, step: StepContext) -> str:
        """Return a hash of the settings; "" if there is only one rank."""
        if dist.get_world_size(self._group) == 1:
            return ""
        options = [
            value if type(value) in PLAIN else describe_value(value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        settings = repr([self._read(), options])
        return xxhash.xxh3_64_hexdigest(settings.encode())

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
        entries = zip([*self._modules, *self._parameters], self._read(), strict=True)
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

    def _read(self) -> list[Any]:
        """Return the modes, and which parameters are trained."""
        modes = [module.training for module in self._modules.values()]
        return modes + [parameter.requires_grad for parameter in self._parameters.values()]
