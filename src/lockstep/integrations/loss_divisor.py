"""The divisor of a micro-batch's loss, which no signature tells: found by calling the loss.

    called with 2 N items instead of N      half of the loss: it is divided by num_items_in_batch,
                                            and the losses of the micro-batches add up
    called with its halves                  the sum of their losses: these add up, too
                                            or their mean, weighted by labels or by samples

The loss of a batch is then the same mean over its micro-batches, as one process without gradient
accumulation computes it. The first batch decides, and later ones as long as labels and samples have
had the same proportions. All ranks decide from the results of all micro-batches, so that neither
their number nor their order matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from lockstep.data.consistency import GatherFn
from lockstep.data.microbatch import halve_samples
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.kernel.seeds import isolated
from lockstep.model.evaluation import evaluation_mode
from lockstep.model.generator_states import state_of_all

__all__ = ["LossDivisor", "count_first_dimension"]

ADDED = "added"
"""The kind of a loss of which the micro-batches' values add up to that of the batch."""

IGNORED = -100
"""The label that losses of transformers leave out."""

Compute = Callable[[Mapping[str, Any], Any], torch.Tensor]
"""A function (inputs, number of items in the batch) that returns the loss."""

Counts = Mapping[str, int]
"""The numbers that could divide the loss of a micro-batch, by name."""


def count_first_dimension(inputs: Any) -> int:
    """Return the number of samples of a micro-batch, the first dimension of its first tensor."""
    values: Iterable[Any] = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    return 1


class LossDivisor:
    """Finds the share of each micro-batch's loss in the loss of the batch.

    Args:
        owner: The class that trains, for messages.
        compute: The loss.
        model: The model, which the loss calls.
        shifts_labels: Whether the model predicts the label at the next position.
        is_known: Whether a loss that cannot be examined is a mean over the labels, as those of
            transformers are.
        declared: Whether losses add up (True) or are means over the samples (False), if the user
            has said so.
        tolerance: The largest relative difference of equal losses.
    """

    def __init__(
        self,
        owner: str,
        compute: Compute,
        model: nn.Module,
        *,
        shifts_labels: bool,
        is_known: bool,
        declared: bool | None,
        tolerance: float,
    ) -> None:
        self._owner = owner
        self._compute = compute
        self._model = model
        self._is_known = is_known
        self._tolerance = tolerance
        kinds = ["labels", "samples", "predictions"]
        if shifts_labels:
            kinds = ["predictions", "labels", "samples"]
        self._kinds = kinds if declared is None else [ADDED] if declared else ["samples"]
        self._is_settled = declared is not None
        self._has_begun = False

    def find_shares(
        self, microbatches: Sequence[Any], items: Any, gather: GatherFn | None
    ) -> list[float | None]:
        """Return the share of each micro-batch of this rank; None for that of its samples.

        All ranks call this with their parts of the same batch, before the step begins.

        Args:
            microbatches: The inputs of the model.
            items: The number of items in the batch, which the framework passes to the loss; None
                if it passes none.
            gather: A function that exchanges messages with all ranks; None on one rank.

        Raises:
            UsageError: The loss is neither a mean of a known kind nor a sum.
        """
        own = [self._count(inputs) for inputs in microbatches]
        if self._kinds == [ADDED]:
            return [1.0 for _ in own]
        if self._kinds == ["samples"] and self._is_settled:
            return [None for _ in own]
        whole: list[Counts] = _exchange(own, gather)
        if not self._is_settled:
            differ = len({*map(tuple, self._shares_of_kinds(whole))}) > 1
            if differ or not self._has_begun:
                findings = [self._examine(inputs, items) for inputs in microbatches]
                self._decide(_exchange(findings, gather), differ)
            self._has_begun = True
        (kind, *_) = [kind for kind in self._kinds if kind == ADDED or kind in whole[0]]
        if kind == ADDED:
            return [1.0 for _ in own]
        if kind == "samples":
            return [None for _ in own]
        total = sum(counts[kind] for counts in whole)
        # The mean over no labels is not a number, as on one process.
        return [counts[kind] / total if total else math.nan for counts in own]

    # --- counting -----------------------------------------------------------------------------

    def _count(self, inputs: Any) -> dict[str, int]:
        counts = {"samples": count_first_dimension(inputs)}
        given = inputs if isinstance(inputs, Mapping) else {}
        labels = given.get("labels")
        shifted = given.get("shift_labels")
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            counts["labels"] = int(labels.ne(IGNORED).sum())
            if shifted is not None:
                counts["predictions"] = int(shifted.ne(IGNORED).sum())
            elif labels.dim() > 1:
                counts["predictions"] = int(labels[..., 1:].ne(IGNORED).sum())
        return counts

    def _shares_of_kinds(self, whole: Sequence[Counts]) -> Iterator[list[Fraction]]:
        for kind in self._kinds:
            if kind in whole[0]:
                total = max(1, sum(counts[kind] for counts in whole))
                yield [Fraction(counts[kind], total) for counts in whole]

    # --- examining ----------------------------------------------------------------------------

    def _examine(self, inputs: Any, items: Any) -> list[str] | None:
        """Return the kinds that the loss of a micro-batch may have; None if this is unknown."""
        try:
            kinds = None if items is None else self._examine_items(inputs, items)
            return self._examine_halves(inputs, items) if kinds is None else kinds
        except Exception:
            return None  # the training shows whether the loss raises it there, too

    def _examine_items(self, inputs: Any, items: Any) -> list[str] | None:
        with self._undisturbed():
            self._model.train()
            with isolated(self._device, everything=True):
                once = self._call(inputs, items)
            twice = self._call(inputs, 2 * items)  # with the same random numbers
        if not (math.isfinite(once) and once) or self._are_close(once, twice):
            return None
        return [ADDED] if self._are_close(once / 2, twice) else []

    def _examine_halves(self, inputs: Any, items: Any) -> list[str] | None:
        size = count_first_dimension(inputs)
        if size < 2:
            return None
        halves = halve_samples(dict(inputs), size)
        with self._undisturbed(), evaluation_mode(self._model):
            before = state_of_all(self._device)
            whole, *losses, again = [self._call(part, items) for part in (inputs, *halves, inputs)]
            is_random = state_of_all(self._device) != before
            if is_random or not math.isfinite(whole) or whole != again:
                return None  # the audit names what else a result depends on
        counts = [self._count(half) for half in halves]
        kinds = [ADDED] if self._are_close(whole, sum(losses)) else []
        for kind in self._kinds:
            if all(kind in count for count in counts):
                weights = [count[kind] for count in counts]
                # A half without labels has no mean.
                sums = [w * loss for w, loss in zip(weights, losses, strict=True) if w]
                if sums and self._are_close(whole, sum(sums) / sum(weights)):
                    kinds.append(kind)
        return kinds

    def _call(self, inputs: Any, items: Any) -> float:
        with torch.no_grad():
            return float(self._compute(dict(inputs), items))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore the modes, the buffers and the generators after the body."""
        modes = {module: module.training for module in self._model.modules()}
        try:
            with isolated(self._device, everything=True), Buffers({"": self._model}).preserve():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _are_close(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._tolerance * max(abs(one), abs(other))

    # --- deciding -----------------------------------------------------------------------------

    def _decide(self, findings: Iterable[list[str] | None], differ: bool) -> None:
        """Keep the kinds that fit all micro-batches of the batch.

        Args:
            findings: The kinds that fit each of them.
            differ: Whether the kinds have different shares in this batch.
        """
        known = [{*kinds} for kinds in findings if kinds is not None]
        fitting = [kind for kind in (*self._kinds, ADDED) if all(kind in kinds for kinds in known)]
        if not known and differ and not self._is_known:
            raise UsageError(
                f"{self._owner} cannot find out what the loss of a micro-batch divides by, because "
                f"its micro-batches cannot be halved: {self._remedy}"
            )
        if known and not fitting:
            raise UsageError(
                f"{self._owner}: the loss of a micro-batch is neither a mean over its samples or "
                "labels nor divided by num_items_in_batch alone, so the loss of the batch does not "
                f"follow from those of its micro-batches: {self._remedy}"
            )
        if known:
            self._kinds = list(dict.fromkeys(fitting))
        self._is_settled = differ or self._kinds == [ADDED]

    @property
    def _remedy(self) -> str:
        return (
            f"divide the loss by num_items_in_batch, or set loss_is_scaled_for_ga in your subclass "
            f"of {self._owner}, to True if the losses of the micro-batches add up, or to False if "
            "they are means over their samples"
        )


def _exchange(values: list[Any], gather: GatherFn | None) -> list[Any]:
    """Return the values of all ranks in one list."""
    if gather is None:
        return values
    messages = gather(json.dumps(values).encode(), "weighting the loss of")
    return [value for message in messages for value in json.loads(message)]
