"""The results of an evaluation with transformers' Trainer, in place of its DataLoader.

rank 0 of 2   computes batch 0   2   4      each rank then has the results of a round,
rank 1                       1   3          and its loop takes those of 0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from lockstep.integrations.evaluation_loader import ELSEWHERE, EvaluationLoader
from lockstep.integrations.microbatch_loader import exchange_values, find_gather, find_rank

__all__ = ["EvaluatedResults", "Results"]


class Results(NamedTuple):
    """The results of a batch in an evaluation.

    Attributes:
        size: The number of its samples.
        loss: The loss; None without labels.
        logits: The outputs.
        labels: The labels.
        inputs: The inputs, if metrics take them.
    """

    size: int
    loss: Any
    logits: Any
    labels: Any
    inputs: Any


class EvaluatedResults:
    """The results of the batches of an evaluation on every rank, in place of a DataLoader.

    Args:
        loader: Loads the batches of this rank, in turns with the others.
        compute: Computes the results of a batch.
        name: The name of the inputs that metrics take.
        state: Accelerate's state, which tells the metrics when the last batch has come.

    Attributes:
        dataset: The dataset.
        batch_size: The number of samples of a batch.
        results: The results of the batch that was yielded last.
        samples: The number of samples so far.
        end_of_dataloader: Whether the last batch was yielded.
        remainder: Not known, as for a DataLoader that nothing was added to.
    """

    def __init__(
        self,
        loader: EvaluationLoader,
        compute: Callable[[int, Any], Results],
        name: str,
        state: Any,
    ) -> None:
        self._loader = loader
        self._compute = compute
        self._name = name
        self._state = state
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.results = Results(0, None, None, None, None)
        self.samples = 0
        self.end_of_dataloader = False
        self.remainder = -1

    def __len__(self) -> int:
        """Return the number of batches on all ranks."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield a mapping for each batch, of which the Trainer's loop takes the inputs."""
        self._batches = iter(self._loader)
        rounds = self._compute_rounds()
        self._state._add_dataloader(self)
        try:
            current = next(rounds, None)
            while current is not None:
                following = next(rounds, None)
                for number, self.results in enumerate(current):
                    self.samples += self.results.size
                    is_last = number + 1 == len(current)
                    self.end_of_dataloader = following is None and is_last
                    inputs = self.results.inputs
                    yield {self._name: torch.empty(self.results.size) if inputs is None else inputs}
                current = following
        finally:
            self._state._remove_dataloader(self)

    def _compute_rounds(self) -> Iterator[list[Results]]:
        """Yield the results of as many batches as there are ranks, one of each."""
        gather = find_gather()
        for begin in count(0, find_rank()[1]):
            own: list[Results] = []
            number = begin
            for data in islice(self._batches, find_rank()[1]):
                if data is not ELSEWHERE:
                    own.append(self._compute(number, data))
                number += 1
            if number == begin:
                return
            if gather is None:
                yield own
                continue
            packed = [tuple(results) for results in own]
            everyone = exchange_values(gather, packed, "evaluating with")
            yield [Results(*values) for parts in everyone for values in parts]
