"""The hook that refuses steps while tensors have no initial values.

A model on the meta device is initialized by `reset_parameters` of its modules. The tensors of
modules without this method are filled with NaN, until weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.kernel.errors import UsageError
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.sharded_tensors import local_part

__all__ = ["UninitializedCheck"]


class UninitializedCheck(StepHook):
    """The check that tensors have values.

    Args:
        tensors: Tensors that were filled with NaN, by name.
    """

    name = "uninitialized"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def status(self, step: StepContext) -> str:
        """Return the name of a tensor that contains NaN, or ""; look no more once none does."""
        self._tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if not tensor.is_meta and local_part(tensor).isnan().any()
        }
        return next(iter(self._tensors), "")

    def merge(self, left: str, right: str) -> str:
        """Return one of the names."""
        return left or right

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Refuse the step if there is one."""
        if name := summary.hooks[self.name]:
            raise UsageError(
                f"{name} was built on the meta device, and has no values, because its module has "
                "no method reset_parameters(): call ls.load_weights(trainer.module, path), or load "
                "a state dict or a checkpoint, before the first step"
            )
