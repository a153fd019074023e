"""The shares of the micro-batches of a batch in its loss.

The shares follow rule 2 (`loss_weights.py`), and all ranks compute them alike. Weights are added in
the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.errors import LossError
from lockstep.kernel.loss_weights import compute_shares, is_sum, share_by_size
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.step_context import StepContext

__all__ = ["start_batch"]


def start_batch(
    step: StepContext, batch: Any, count_ignored: Callable[[Any], int] | None = None
) -> Batch:
    """Set the batch of a step, and compute the shares of its micro-batches.

    A collective call if micro-batches have weights.

    Args:
        step: The context of the step.
        batch: This rank's part of a batch, or a whole batch of tensors, which is split.
        count_ignored: Returns the number of targets of a micro-batch that the loss ignores.

    Returns:
        This rank's part of the batch, or what observers have selected from it.

    Raises:
        LossError: The weights of the micro-batches cannot be computed, or sum to 0.
    """
    parallel = step.parallel
    whole = parallel.split(batch)
    step.batch = whole
    for observer in step.observers:
        step.batch = observer.select(step.batch)
    step.samples = whole.size
    if is_sum(parallel.loss):
        step.shares = dict.fromkeys(range(whole.leaves), 1.0)
    elif parallel.loss_weight is not None:
        step.shares, step.samples = _compute_weighted_shares(step, whole)
    else:
        step.shares = share_by_size(whole.size, whole.leaves)
        # One look at a whole batch, instead of one per micro-batch.
        if count_ignored is not None and (isinstance(batch, Batch) or count_ignored(batch)):
            _warn_of_ignored_targets(step, whole, count_ignored)
    return step.batch


def _compute_weighted_shares(step: StepContext, batch: Batch) -> tuple[dict[int, float], int]:
    """Return the shares of all micro-batches that are computed, and the number of their samples."""
    parallel = step.parallel
    sizes = {index: len(span) for index, span in enumerate(split_evenly(batch.size, batch.leaves))}
    mine = {
        part.index: _weigh(step, part)
        for part in batch.microbatches
        if part.data is not None  # inner stages have no data
    }
    weights = _gather_weights(step, mine)
    if not sum(weights.values()) > 0:
        raise LossError(
            f"rank {parallel.rank}, step {step.number}: the weights of the batch's "
            f"{batch.leaves} micro-batches sum to {sum(weights.values())}; check whether the "
            "targets of all samples in the batch are ignored"
        )
    shares = compute_shares(weights)
    return shares, sum(sizes[index] for index in shares)


def _gather_weights(step: StepContext, mine: Mapping[int, float]) -> dict[int, float]:
    """Return the weights of all micro-batches, in order, on every rank."""
    text = ",".join(f"{index}:{weight.hex()}" for index, weight in mine.items())
    label = step.label
    messages = step.parallel.messages.gather(text.encode(), f"weighing {label.about}", label.remark)
    pairs = [
        pair.split(":") for message in messages for pair in message.decode().split(",") if pair
    ]
    return {int(index): float.fromhex(weight) for index, weight in pairs}


def _weigh(step: StepContext, microbatch: Microbatch) -> float:
    where = step.place(microbatch.index)
    try:
        return step.parallel.weigh(microbatch, where)
    except Exception as error:
        raise LossError(
            f"{where}: the weight of the micro-batch could not be "
            f"computed: {type(error).__name__}: {error}"
        ) from error


def _warn_of_ignored_targets(
    step: StepContext, batch: Batch, count_ignored: Callable[[Any], int]
) -> None:
    kind = ""
    advice = "lockstep.target_weight(loss) to the trainer"
    if step.parallel.loss is None:
        kind = " (labels of -100)"
        advice = (
            "lockstep.target_weight(torch.nn.CrossEntropyLoss()) to the trainer, with shift=1 "
            "in the call for a causal language model"
        )
    for part in batch.microbatches:
        if count_ignored(part.data):
            step.warn(
                step.place(part.index),
                f"the loss ignores some targets{kind}, so its mean is not a mean over samples, and "
                f"the gradient is not that of the whole batch; pass loss_weight={advice}",
                "ignored_targets",
            )
            return
