"""What the frameworks share: equally many micro-batches per rank, and a DataLoader of them."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lockstep.data.microbatch_sampler import MicrobatchSampler
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.training.exact import Exact

__all__ = ["KNOWN", "count_accumulation_steps", "make_sampler", "replace_sampler"]

KNOWN = (RandomSampler, SequentialSampler, DistributedSampler)
"""The samplers whose order is a permutation, or that of the dataset."""

KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""The options of a DataLoader that do not decide which samples it yields."""


def count_accumulation_steps(owner: str, microbatches: int, ranks: int, given: int) -> int:
    """Return the number of micro-batches of every rank.

    Args:
        owner: The class that accumulates gradients, for messages.
        microbatches: The number of micro-batches of a batch.
        ranks: The number of ranks.
        given: The number of accumulation steps in the framework's own settings.

    Raises:
        LayoutError: The ranks cannot have equally many micro-batches.
        UsageError: The framework's settings contradict `microbatches`.
    """
    steps, rest = divmod(microbatches, ranks)
    if rest or not steps:
        raise LayoutError(
            f"{owner} needs equally many micro-batches on every rank, but microbatches="
            f"{microbatches} is not a multiple of {ranks} ranks: choose another number of either"
        )
    if given not in (1, steps):
        raise UsageError(
            f"{owner} accumulates the gradients of {microbatches} micro-batches, {steps} on each "
            f"of {ranks} ranks, but {given} accumulation steps are set: leave that setting out"
        )
    return steps


def make_sampler(
    owner: str,
    handle: Exact,
    loader: DataLoader[Any],
    microbatches: int,
    seed: int,
    known: tuple[type, ...] = KNOWN,
) -> MicrobatchSampler:
    """Return a sampler of this rank's micro-batches, in the order that a DataLoader asks for.

    Args:
        owner: The class that replaces the sampler, for messages.
        handle: The handle of the model.
        loader: The DataLoader, whose batches have the size of a micro-batch.
        microbatches: The number of micro-batches of a batch.
        seed: The random seed of the order.
        known: The samplers that can be replaced.

    Raises:
        UsageError: The order cannot be kept.
    """
    given: Any = loader.batch_sampler
    batches = getattr(given, "batch_sampler", given)  # without the part of a rank
    sampler = getattr(batches, "sampler", None)
    is_subset = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(cast(Any, loader.dataset))
    )
    if type(batches) is not BatchSampler or type(sampler) not in known or is_subset:
        name = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise UsageError(
            f"{owner} decides the order of the training samples, and cannot follow {name}: pass a "
            "map-style dataset, batch_size and shuffle"
        )
    return handle.sampler(
        loader.dataset,
        batch_size=batches.batch_size * microbatches,
        shuffle=getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)),
        seed=seed,
        drop_last=batches.drop_last,
    )


def replace_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a DataLoader with the same options and another batch sampler."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    return DataLoader(loader.dataset, batch_sampler=sampler, **options)
