"""Evaluation of a model over a dataset; the result is the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep.data.microbatch import halve_samples
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LossError, StoppedError, UsageError
from lockstep.kernel.exact_sum import PartialSums, compute_partial_sums, round_sum
from lockstep.kernel.loss_weights import is_sum
from lockstep.kernel.rng_scopes import find_scopes
from lockstep.kernel.seeds import isolated
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.forward import (
    DatasetMetric,
    Metric,
    call_model,
    compute_metrics,
    compute_results,
    find_inputs,
    has_loss,
    split_targets,
)
from lockstep.model.generator_states import state_of_all
from lockstep.model.loss_root import check_scalar
from lockstep.model.native_seeder import make_rng_scopes
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.predictions import GatheredSamples
from lockstep.model.static_shapes import StaticShapes
from lockstep.model.target_weights import is_classification, loss_name, target_weight

__all__ = [
    "Evaluation",
    "EvaluationTask",
    "Scoring",
    "evaluate",
    "evaluation_mode",
]

TOLERANCE = 1e-2
"""The largest relative difference between a mean and the mean of the means of two halves."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: mean loss and metrics over `samples` samples.

    `loss` is NaN if the model returns its loss, but none in evaluation mode. `ema` tells whether
    the averaged weights were evaluated.
    """

    loss: float
    metrics: dict[str, float]
    samples: int
    ema: bool = False


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode in the body, without gradients."""
    modes = {module: module.training for module in model.modules()}
    try:
        try:
            model.eval()
        except NotImplementedError as error:
            raise UsageError(
                "an exported model stays in the mode in which it was exported: evaluate the model "
                "that was exported, with these weights"
            ) from error
        with torch.no_grad(), StaticShapes(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class MicrobatchScores(NamedTuple):
    """The contribution of one micro-batch to an evaluation."""

    samples: int
    weight: float
    loss: float
    metrics: dict[str, float]


class EvaluationTask(Protocol):
    """The computation of an evaluation from the outputs of every micro-batch.

    Attributes:
        about: The call, for messages.
        parallel: The layout and the loss.
    """

    about: str
    parallel: ParallelContext

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches in the form that the executor expects."""

    def compute(self, outputs: Any, data: Any, where: str) -> Any:
        """Return the results of a micro-batch."""

    def add(self, number: int, microbatch: Microbatch, data: Any, result: Any, where: str) -> None:
        """Add the results of a micro-batch of the batch with this number."""

    def combine(self, failure: str = "") -> Any:
        """Combine the results of all ranks. A collective call."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: EvaluationTask,
    seed: int,
    names: Sequence[str] = (),
) -> Any:
    """Evaluate this rank's micro-batches, and combine the results of all ranks.

    Args:
        model: The model.
        batches: This rank's part of each batch.
        task: What is computed from the outputs, with the layout and the loss.
        seed: The seed of all random numbers.
        names: The names of the model's blocks.
    """
    parallel = task.parallel
    scopes = make_rng_scopes(find_scopes(model, names), model, seed, parallel.device)
    buffers = Buffers(parallel.modules_with(model))
    where = ""
    with evaluation_mode(model), scopes.seed_calls(), CollectiveCallGuard(lambda: where):
        for number, batch in enumerate(batches):
            for microbatch, is_own in parallel.take_turns(batch):
                # Negative steps, so that no training step has the same seeds.
                scopes.begin_microbatch(-1 - number, microbatch.index)
                data = parallel.move_to_device(microbatch.data)
                place = f"evaluation batch {number}, micro-batch {microbatch.index}"
                where = f"rank {parallel.rank}, {place}"
                # Modules may write buffers even in evaluation mode, so they get copies; so do those
                # that a metric calls.
                with buffers.preserve():
                    with parallel.autocast():
                        outputs = call_model(model, find_inputs(parallel.loss, data, where), where)
                        result = task.compute(outputs, data, where)
                    if is_own:
                        task.add(number, microbatch, data, result, where)
                where = ""
    return task.combine()


class Scoring:
    """The loss and the metrics of an evaluation.

    The loss is the mean over all samples: weighted if there is a weight function, and the sum
    for a loss with `reduction="sum"`. Sums are exact, so the layout changes no bit.

    Args:
        parallel: The layout and the loss.
        metrics: The metrics by name.
        ema: Whether the averaged weights are evaluated.

    Attributes:
        warnings: Sentences about metrics that are no means, on the rank of the first micro-batch.
    """

    about = "an evaluation"

    def __init__(
        self, parallel: ParallelContext, metrics: Mapping[str, Metric], ema: bool = False
    ) -> None:
        self.parallel = parallel
        loss = parallel.loss
        self._weigh = parallel.loss_weight
        if self._weigh is None and is_classification(loss):
            self._weigh = target_weight(loss)  # also for targets of -100, which training points out
        self._ema = ema
        self._metrics = {k: m for k, m in metrics.items() if not isinstance(m, DatasetMetric)}
        self._of_dataset = {k: m for k, m in metrics.items() if isinstance(m, DatasetMetric)}
        self._rows: list[MicrobatchScores] = []
        self._kept = GatheredSamples(parallel)
        self.warnings: list[str] = []

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches unchanged."""
        return batches

    def compute(self, outputs: Any, data: Any, where: str) -> tuple[Any, dict[str, Any], Any]:
        """Return the loss, the metrics and the outputs."""
        loss = self.parallel.loss
        metrics = self._metrics
        if loss is None and (metrics or self._of_dataset) and not has_loss(outputs, where):
            missing = torch.tensor(math.nan)
            return missing, compute_metrics(metrics, outputs, data, where), outputs
        return *compute_results(loss, metrics, outputs, data, where), outputs

    def add(self, number: int, microbatch: Microbatch, data: Any, result: Any, where: str) -> None:
        """Add the results of a micro-batch of the batch with this number."""
        loss, metrics, outputs = result
        check_scalar(loss, where)
        weight = self._find_weight(microbatch)
        numbers = {name: float(value) for name, value in metrics.items()}
        scores = MicrobatchScores(microbatch.size, weight, float(loss) if weight else 0.0, numbers)
        self._rows.append(scores)
        targets = data if self.parallel.loss is None else split_targets(data, where)[1]
        if self._of_dataset:
            pairs = [metric.select(outputs, targets) for metric in self._of_dataset.values()]
            self._kept.add(number, microbatch, [value for pair in pairs for value in pair])
        if number == 0 and microbatch.index == 0 and microbatch.size > 1:
            whole = outputs, targets
            for name, value in numbers.items():
                advice = (
                    f"pass ls.DatasetMetric({name}), which gets all outputs and targets of the "
                    "dataset at once"
                )
                metric = self._metrics[name]
                self._check_mean(f"metric {name}", metric, value, microbatch.size, whole, advice)
            loss_of = self.parallel.loss
            if loss_of is not None and self._weigh is None and not is_sum(loss_of):
                about = f"loss {loss_name(loss_of)}"
                advice = "pass loss_weight=, a function of a micro-batch that returns its divisor"
                self._check_mean(about, loss_of, float(loss), microbatch.size, whole, advice)

    def _find_weight(self, microbatch: Microbatch) -> float:
        """Return what the loss of a micro-batch is multiplied by in the mean."""
        if is_sum(self.parallel.loss):
            return 1.0
        return float(microbatch.size if self._weigh is None else self._weigh(microbatch.data))

    def _check_mean(
        self, about: str, function: Metric, value: float, size: int, whole: Any, advice: str
    ) -> None:
        """Warn if a function of outputs and targets is not the mean of its values for two halves.

        One that draws random numbers, such as the noise of a generator, is not compared: its halves
        would have other ones.
        """
        first = (size + 1) // 2 / size
        # Errors are those of data that are not one row per sample.
        with suppress(Exception), self._as_in_compute():
            before = state_of_all(self.parallel.device)
            one, two = (float(function(*half)) for half in halve_samples(whole, size))
            if state_of_all(self.parallel.device) != before:
                return
            mean = first * one + (1 - first) * two
            if not abs(value - mean) <= TOLERANCE * max(abs(one), abs(two)):
                self.warnings.append(
                    f"the {about} is not a mean over the samples: it is {value:.4g} for {size} "
                    f"samples, and the mean of those of their halves is {mean:.4g}; {advice}"
                )

    @contextmanager
    def _as_in_compute(self) -> Iterator[None]:
        """Compute as for the results, and leave the generators as they are."""
        parallel = self.parallel
        with torch.no_grad(), parallel.autocast(), isolated(parallel.device, everything=True):
            yield

    def combine(self, failure: str = "") -> Evaluation:
        """Combine the scores of all ranks. A collective call.

        Args:
            failure: The reason why the evaluation failed on this rank; "" if it did not.

        Raises:
            StoppedError: The evaluation failed on a rank. Raised on every rank.
            LossError: The weights of all samples sum to 0.
        """
        parallel = self.parallel
        rows = self._rows
        mine: list[PartialSums] = [
            compute_partial_sums(row.weight for row in rows),
            compute_partial_sums(row.weight * row.loss for row in rows),
            *(
                compute_partial_sums(row.samples * row.metrics[name] for row in rows)
                for name in self._metrics
            ),
        ]
        message = json.dumps([failure, sum(row.samples for row in rows), mine]).encode()
        failures, counts, sums = zip(
            *map(json.loads, parallel.messages.gather(message, "evaluating")), strict=True
        )
        if stopped := next(filter(None, failures), None):
            raise StoppedError(f"rank {parallel.rank} stopped because {stopped}")
        samples = sum(counts)
        whole, loss, *totals = (
            round_sum(chain.from_iterable(parts)) for parts in zip(*sums, strict=True)
        )
        if whole == 0:
            raise LossError(
                f"the weights of the {samples} samples add up to 0, so their loss has no mean: "
                "check whether all targets are ignored"
            )
        metrics = {name: total / samples for name, total in zip(self._metrics, totals, strict=True)}
        if self._of_dataset:
            kept = iter(self._kept.combine())
            for name, metric in self._of_dataset.items():
                metrics[name] = metric(next(kept), next(kept))
        return Evaluation(
            loss=loss if is_sum(parallel.loss) else loss / whole,
            metrics=metrics,
            samples=samples,
            ema=self._ema,
        )
