"""Evaluation of a model over a dataset; the result is the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LossError, StoppedError, UsageError
from lockstep.kernel.exact_sum import (
    PartialSums,
    compute_partial_sums,
    merge_partial_sums,
    round_sum,
)
from lockstep.kernel.loss_weights import is_sum
from lockstep.kernel.rng_scopes import find_scopes
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.forward import Metric, forward
from lockstep.model.loss_root import check_scalar
from lockstep.model.native_seeder import make_rng_scopes
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.static_shapes import static_shapes

__all__ = [
    "Evaluation",
    "MicrobatchScores",
    "combine_scores",
    "evaluate",
    "evaluation_mode",
    "score_microbatch",
]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: mean loss and mean metrics over `samples` samples."""

    loss: float
    metrics: dict[str, float]
    samples: int


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode in the body, without gradients."""
    modes = {module: module.training for module in model.modules()}
    try:
        _begin_evaluation(model)
        with torch.no_grad(), static_shapes(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _begin_evaluation(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:
        raise UsageError(
            "an exported model stays in the mode in which it was exported: evaluate the model "
            "that was exported, with these weights"
        ) from error


class MicrobatchScores(NamedTuple):
    """The contribution of one micro-batch to an evaluation."""

    samples: int
    weight: float
    loss: float
    metrics: dict[str, float]


class EvaluationSums(NamedTuple):
    """The sums over the micro-batches of a contiguous range of ranks, without rounding.

    Attributes:
        failure: The reason why the evaluation failed on the first such rank; "" for none.
        samples: The number of samples.
        weight: The sum of the weights.
        loss: The sum of the losses times their weights.
        metrics: The sum of the values times the samples, by the name of the metric.
    """

    failure: str
    samples: int
    weight: PartialSums
    loss: PartialSums
    metrics: dict[str, PartialSums]

    @classmethod
    def of(cls, rows: Sequence[MicrobatchScores], failure: str = "") -> EvaluationSums:
        """Return the sums of one rank."""
        names = rows[0].metrics if rows else ()
        return cls(
            failure,
            sum(row.samples for row in rows),
            compute_partial_sums(row.weight for row in rows),
            compute_partial_sums(row.weight * row.loss for row in rows),
            {
                name: compute_partial_sums(row.samples * row.metrics[name] for row in rows)
                for name in names
            },
        )

    def merge(self, other: EvaluationSums) -> EvaluationSums:
        """Return the sums of this range of ranks and the following one."""
        metrics = dict(self.metrics)
        for name, value in other.metrics.items():
            metrics[name] = merge_partial_sums(metrics.get(name, []), value)
        return EvaluationSums(
            self.failure or other.failure,
            self.samples + other.samples,
            merge_partial_sums(self.weight, other.weight),
            merge_partial_sums(self.loss, other.loss),
            metrics,
        )

    def pack(self) -> bytes:
        """Return the bytes to send."""
        return json.dumps(self).encode()

    @classmethod
    def unpack(cls, message: bytes) -> EvaluationSums:
        """Return the sums from the result of `pack`."""
        return cls(*json.loads(message))


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    parallel: ParallelContext,
    metrics: Mapping[str, Metric],
    seed: int,
    names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate this rank's micro-batches, and combine the results of all ranks.

    The loss is the mean over all samples: weighted if there is a weight function, and the sum
    for a loss with `reduction="sum"`. Sums are exact, so the layout changes no bit.

    Args:
        model: The model.
        batches: This rank's part of each batch.
        parallel: The layout and the loss.
        metrics: Functions of (outputs, targets) by name.
        seed: The seed of all random numbers.
        names: The names of the model's blocks.
    """
    rows: list[MicrobatchScores] = []
    scopes = make_rng_scopes(find_scopes(model, names), model, seed, parallel.device)
    buffers = Buffers(parallel.modules_with(model))
    where = ""
    with evaluation_mode(model), scopes.seed_calls(), CollectiveCallGuard(lambda: where):
        for number, batch in enumerate(batches):
            for microbatch in batch.microbatches:
                # Negative steps, so that no training step has the same seeds.
                scopes.begin_microbatch(-1 - number, microbatch.index)
                data = parallel.move_to_device(microbatch.data)
                where = f"rank {parallel.rank}, evaluation batch {number}, {microbatch.index}"
                # Modules may write buffers even in evaluation mode, so they get copies.
                with buffers.preserve(), parallel.autocast():
                    loss, values = forward(model, parallel.loss, metrics, data, where)
                rows.append(score_microbatch(parallel, microbatch, loss, values, where))
                where = ""
    return combine_scores(rows, parallel)


def score_microbatch(
    parallel: ParallelContext,
    microbatch: Microbatch,
    loss: Any,
    metrics: Mapping[str, Any],
    where: str,
) -> MicrobatchScores:
    """Return the contribution of one micro-batch."""
    check_scalar(loss, where)
    weight = _weight(parallel, microbatch.size, microbatch.data)
    numbers = {name: float(value) for name, value in metrics.items()}
    return MicrobatchScores(microbatch.size, weight, float(loss) if weight else 0.0, numbers)


def combine_scores(
    rows: Sequence[MicrobatchScores], parallel: ParallelContext, failure: str = ""
) -> Evaluation:
    """Combine the scores of all ranks. A collective call.

    Args:
        rows: The scores of this rank's micro-batches.
        parallel: The layout and the loss.
        failure: The reason why the evaluation failed on this rank; "" if it did not.

    Raises:
        StoppedError: The evaluation failed on a rank. Raised on every rank.
        LossError: The weights of all samples sum to 0.
    """
    total = parallel.messages.reduce(
        EvaluationSums.of(rows, failure),
        EvaluationSums.merge,
        EvaluationSums.pack,
        EvaluationSums.unpack,
        "evaluating",
    )
    if total.failure:
        raise StoppedError(f"rank {parallel.rank} stopped because {total.failure}")
    loss, whole, samples = round_sum(total.loss), round_sum(total.weight), total.samples
    if whole == 0:
        raise LossError(
            f"the weights of the {samples} samples add up to 0, so their loss has no mean: check "
            "whether all targets are ignored"
        )
    return Evaluation(
        loss=loss if is_sum(parallel.loss) else loss / whole,
        metrics={name: round_sum(sums) / samples for name, sums in total.metrics.items()},
        samples=samples,
    )


def _weight(parallel: ParallelContext, size: int, data: Any) -> float:
    if is_sum(parallel.loss):
        return 1.0
    weight: Callable[[Any], float] | None = parallel.loss_weight
    return float(size) if weight is None else float(weight(data))
