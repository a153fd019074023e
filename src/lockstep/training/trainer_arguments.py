"""The arguments of a trainer: compared on all ranks, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.model.across_ranks import verify_across_ranks
from lockstep.model.description import describe, describe_torch_settings
from lockstep.training.unsupported_modules import reject_unsupported_modules

__all__ = ["Storage", "check_arguments", "compare_arguments"]

Storage = Literal["replicated", "shared", "sharded", "hybrid"]


def compare_arguments(model: object, values: Mapping[str, Any]) -> dict[str, str]:
    """Compare the arguments, and the settings of the processes, on all ranks.

    Args:
        model: The model, which is compared once it is built.
        values: The arguments that must be equal, by the names that messages use.

    Returns:
        Their description, for checkpoints.

    Raises:
        UsageError: The model, or a module among the arguments, cannot be trained.
        DisagreementError: They differ; raised on every rank.
    """
    # Before the comparison, which would report an attribute of DistributedDataParallel: its rank.
    reject_unsupported_modules({**values, "model": model})
    description = describe_torch_settings()
    for name, value in values.items():
        description |= describe(name, value)
    about = "the arguments of a Trainer"
    advice = "give every rank the same arguments and settings"
    verify_across_ranks(about, description, advice)
    return description


def check_arguments(storage: str, stages: int, max_grad_norm: float | None) -> None:
    """Raise UsageError or LayoutError for options that cannot work."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(f"max_grad_norm={max_grad_norm}: expected a positive number")
    if storage not in get_args(Storage):
        raise UsageError(
            f'storage must be "replicated", "shared", "sharded" or "hybrid", not {storage!r}'
        )
    if storage != "replicated" and stages > 1:
        raise LayoutError(
            f'storage="{storage}" needs the whole model on every rank: train without pipeline=, or '
            'with storage="replicated"'
        )
