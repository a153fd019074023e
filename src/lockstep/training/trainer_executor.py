"""The executors of a trainer: what a trainer needs of them beyond its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from lockstep.kernel.batch import Batch
from lockstep.kernel.parts import Executor
from lockstep.model.evaluation import EvaluationTask
from lockstep.pipeline.partition import Placement

__all__ = ["TrainerExecutor"]


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
