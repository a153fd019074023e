"""The outputs of a model for all samples of a dataset, in their order, on every rank.

rank 0    outputs of micro-batches 0, 1   ──┐ gathered, sorted by batch and micro-batch,
rank 1    outputs of micro-batches 2, 3   ──┘ joined along dimension 0
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lockstep.data.microbatch import join_samples, map_tensors
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.errors import StoppedError, UsageError
from lockstep.model.parallel_context import ParallelContext

__all__ = ["GatheredSamples", "Predictions"]


class GatheredSamples:
    """Values with one row per sample, of the micro-batches of all ranks."""

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel
        self._rows: list[tuple[int, Microbatch]] = []

    def add(self, number: int, microbatch: Microbatch, values: Sequence[Any]) -> None:
        """Add values of a micro-batch of the batch with this number, as copies on the CPU."""
        kept = [map_tensors(_keep, value) for value in values]
        self._rows.append((number, replace(microbatch, data=kept)))

    def combine(self, failure: str = "") -> list[Any]:
        """Return the values of all samples, in their order. A collective call.

        Args:
            failure: The reason why the evaluation failed on this rank; "" if it did not.

        Raises:
            StoppedError: The evaluation failed on a rank. Raised on every rank.
            UsageError: The values do not fit together.
        """
        message = pickle.dumps((failure, self._rows))
        said = self._parallel.messages.gather(message, "gathering outputs")
        gathered = list(map(pickle.loads, said))
        for failure, _ in gathered:
            if failure:
                raise StoppedError(f"rank {self._parallel.rank} stopped because {failure}")
        rows = [row for _, rows in gathered for row in rows]
        ordered = [row for _, row in sorted(rows, key=lambda row: (row[0], row[1].index))]
        sizes = [row.size for row in ordered]
        return [_join(parts, sizes) for parts in zip(*(row.data for row in ordered), strict=True)]


class Predictions:
    """The task of an evaluation that returns the outputs of the model.

    Args:
        parallel: The layout and the loss.
        has_targets: Whether the last entry of a sample with several is its targets, which the model
            does not get, though there is no loss.
    """

    about = "a prediction"

    def __init__(self, parallel: ParallelContext, *, has_targets: bool = False) -> None:
        self.parallel = parallel
        self._has_targets = has_targets
        self._outputs = GatheredSamples(parallel)

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches with what the model takes, and with targets if there is a loss."""
        if self.parallel.loss is not None:
            return map(partial(_change, _label), batches)
        return map(partial(_change, _leave_targets), batches) if self._has_targets else batches

    def compute(self, outputs: Any, data: Any, where: str) -> Any:
        """Return the outputs."""
        return outputs

    def add(self, number: int, microbatch: Microbatch, data: Any, result: Any, where: str) -> None:
        """Add the outputs of a micro-batch of the batch with this number."""
        self._outputs.add(number, microbatch, [result])

    def combine(self, failure: str = "") -> Any:
        """Return the outputs for all samples. A collective call."""
        return self._outputs.combine(failure)[0]


def _change(change: Callable[[Any], Any], batch: Batch) -> Batch:
    """Return a batch whose micro-batches have changed data."""
    parts = (replace(part, data=change(part.data)) for part in batch.microbatches)
    return replace(batch, microbatches=tuple(parts))


def _label(data: Any) -> Any:
    """Return the data of a micro-batch as (inputs, ..., targets), with None for no targets."""
    if not isinstance(data, (tuple, list)):
        return data, None
    return data if len(data) > 1 else (*data, None)


def _leave_targets(data: Any) -> Any:
    """Return the data of a micro-batch without its targets."""
    return data[:-1] if isinstance(data, (tuple, list)) and len(data) > 1 else data


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU that shares no memory; a number becomes a row."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy if copy.dim() else copy.unsqueeze(0)


def _join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the values of micro-batches of these sizes."""
    if all(_is_list_of_samples(*pair) for pair in zip(parts, sizes, strict=True)):
        return [sample for part in parts for sample in part]
    try:
        return join_samples(*parts)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            "the outputs of the micro-batches cannot be joined "
            f"({(str(error).splitlines() or [''])[0]}): let the model return tensors whose shapes "
            "differ in dimension 0 only, such as sequences that are padded to one length, or a "
            "list with one mapping per sample; for a metric, pass ls.DatasetMetric(select=) a "
            "function that selects such values"
        ) from error


def _is_list_of_samples(value: Any, size: int) -> bool:
    """Return whether a value has one mapping per sample, as the outputs of a detector have."""
    is_list = isinstance(value, (list, tuple)) and len(value) == size
    return is_list and all(isinstance(sample, Mapping) for sample in value)
