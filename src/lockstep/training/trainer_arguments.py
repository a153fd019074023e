"""The arguments of a trainer: compared on all ranks, and checked.

compare    all ranks, with the settings of their processes; a difference is an error on every rank
check      options that cannot work together
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from lockstep.audit.audit_config import AuditConfig
from lockstep.checkpoint.save_schedule import CheckpointConfig
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.model.across_ranks import verify_across_ranks
from lockstep.model.deferred_init import BlockLike
from lockstep.model.description import describe, describe_environment
from lockstep.model.forward import Metric
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.training.optimizer_config import OptimizerConfig
from lockstep.training.trainer_hooks import TrainerHooks
from lockstep.training.unsupported_modules import reject_unsupported_modules

__all__ = ["Model", "Storage", "TrainerArguments"]

Model = nn.Module | Sequence[BlockLike]
Storage = Literal["replicated", "shared", "sharded", "hybrid"]


@dataclass(frozen=True)
class TrainerArguments:
    """The arguments of a `Trainer` on which its results depend, apart from the model.

    Attributes:
        audit: The settings of the audit; None: no step is audited.

    The others have the names and meanings of the arguments of `Trainer`.
    """

    loss: Callable[..., Any] | None
    optimizers: Sequence[OptimizerConfig]
    microbatches: int
    seed: int
    loss_weight: WeightFunction | None
    metrics: Mapping[str, Metric] | None
    max_grad_norm: float | None
    ema_decay: float | None
    autocast_dtype: torch.dtype | None
    activation_checkpointing: bool
    extra_modules: Sequence[nn.Module]
    pipeline: PipelineConfig
    storage: Storage
    checkpoint: CheckpointConfig | None
    audit: AuditConfig | None

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of a host share one copy of the parameters."""
        return self.storage == "shared"

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are divided over all ranks, or over those of a host."""
        return self.storage in ("sharded", "hybrid")

    def compare(self, model: Model) -> dict[str, str]:
        """Compare the arguments, and the settings of the processes, on all ranks.

        Returns:
            Their description, for checkpoints.

        Raises:
            UsageError: The model, or a module among the arguments, cannot be trained.
            DisagreementError: They differ; raised on every rank.
        """
        compared = self._values()
        # Before the comparison, which would report an attribute of DistributedDataParallel: its
        # rank.
        reject_unsupported_modules(compared | {"model": model})
        description = describe_environment()
        for name, value in compared.items():
            description |= describe(name, value)
        verify_across_ranks(
            "the arguments of a Trainer",
            description,
            "give every rank the same arguments and settings",
        )
        return description

    def _values(self) -> dict[str, Any]:
        """Return the values to compare, by the names that messages use."""
        values = dict(vars(self))
        values |= {
            "checkpoint": None if self.checkpoint is None else list(self.checkpoint.stateful),
            "audit": self.audit and repr(self.audit),
            "scheduler_interval": ", ".join(
                config.scheduler_interval or "step" for config in self.optimizers
            ),
            **{f"pipeline.{name}": value for name, value in vars(self.pipeline).items()},
        }
        del values["optimizers"], values["pipeline"]  # optimizers are compared once they are made
        return values

    def check(self) -> None:
        """Raise UsageError or LayoutError for options that cannot work."""
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UsageError(f"max_grad_norm={self.max_grad_norm}: expected a positive number")
        if self.storage not in get_args(Storage):
            raise UsageError(
                'storage must be "replicated", "shared", "sharded" or "hybrid", not '
                f"{self.storage!r}"
            )
        if self.storage != "replicated" and self.pipeline.stages > 1:
            raise LayoutError(
                f'storage="{self.storage}" needs the whole model on every rank: train without '
                'pipeline=, or with storage="replicated"'
            )

    def in_session(self, session: TrainerHooks, model: Model) -> TrainerArguments:
        """Return the arguments with the layout that a session gives to a trainer of `model`."""
        pipeline, is_shared = session.options(model, self.pipeline)
        return replace(self, pipeline=pipeline, storage="shared" if is_shared else "replicated")
