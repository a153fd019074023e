"""Data: global batches of awkward sizes, as tensors or from a dataset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from grammar.drawing import Draw
from grammar.losses import Loss
from grammar.models import WORDS, Model
from lockstep.kernel import spec

SOURCES = ("tensors", "tensors", "tensors", "in memory", "subset", "augmented", "stream", "sampler")


@dataclass(frozen=True)
class Data:
    """The batches of a training, as they were drawn.

    `sizes` are those of the batches: of all of them where they are given as tensors, of
    each epoch where they come from a dataset, by `batch_size`.
    """

    source: str
    sizes: tuple[int, ...]
    batch_size: int
    epochs: int
    shuffle: bool
    workers: int
    named: bool = False
    """A batch is a mapping of the model's arguments."""

    def __str__(self) -> str:
        """Describe the data."""
        if not self.epochs:
            return f"{'named ' if self.named else ''}tensors {list(self.sizes)}"
        parts = [f"{self.source} of {sum(self.sizes)} by {self.batch_size}, {self.epochs} epochs"]
        parts += ["shuffled"] if self.shuffle else []
        parts += [f"{self.workers} worker"] if self.workers else []
        return " ".join(parts)

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return len(self.sizes) * max(1, self.epochs)

    def smallest(self, microbatches: int) -> int:
        """Return the number of samples in the smallest micro-batch."""
        return min(size // min(size, microbatches) for size in self.sizes)

    def in_order(self) -> Data:
        """Return data whose batches hold the same samples in every epoch."""
        source = "in memory" if self.source == "sampler" else self.source
        return replace(self, source=source, shuffle=False)

    def with_names(self) -> Data:
        """Return data whose batches are mappings."""
        return replace(self, named=True)


def draw_data(draw: Draw, microbatches: int) -> Data:
    """Draw batches that micro-batches divide, or do not; fewer samples than these; a single one."""
    source = draw.choice(SOURCES)
    even = draw.chance(0.5)  # at least two samples in each micro-batch, for batch norm
    lowest, highest = (2 * microbatches, 3 * microbatches + 2) if even else (1, 2 * microbatches)
    if source == "tensors":
        sizes = tuple(draw.randint(lowest, highest) for _ in range(draw.randint(2, 5)))
        return Data(source, sizes, 0, 0, False, 0)
    size = draw.randint(lowest, highest)
    rest = draw.randint(lowest, highest)
    count = draw.randint(1, 2)
    sizes = (*[size] * count, min(rest, size))
    workers = 1 if source in ("augmented", "stream") and draw.chance(0.06) else 0
    shuffle = source not in ("stream", "sampler") and draw.chance(0.7)
    return Data(source, sizes, size, 2, shuffle, workers)


def tensors(
    data: Data, model: Model, loss: Loss, microbatches: int, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return inputs and targets of all samples, drawn under `seed`."""
    generator = torch.Generator().manual_seed(seed)
    samples = sum(data.sizes)
    inputs = []
    for shape in model.shape():
        if model.family == "words":
            inputs.append(torch.randint(0, WORDS, (samples, *shape), generator=generator))
        else:
            inputs.append(torch.randn(samples, *shape, generator=generator).to(model.dtype))
    targets = loss.draw_targets(samples, model.classes, generator)
    if targets.is_floating_point():
        targets = targets.to(model.dtype)
    elif loss.ignore is not None:
        targets = _ignoring(targets, data, loss, microbatches, generator)
    return inputs, targets


def _ignoring(
    targets: torch.Tensor, data: Data, loss: Loss, microbatches: int, generator: torch.Generator
) -> torch.Tensor:
    """Replace targets by ignored ones: a third of them, sometimes those of a micro-batch.

    Each batch keeps one that counts, and so does each micro-batch unless it may be left out.
    """
    assert loss.ignore is not None
    begin = 0
    for size in data.sizes:
        batch = targets[begin : begin + size]
        batch[batch == loss.ignore] = 1
        spans = spec.cut(size, min(size, microbatches))
        whole = int(torch.randint(0, len(spans), (), generator=generator))
        keeper = (whole + 1) % len(spans)
        for number, span in enumerate(spans):
            part = batch[span.start : span.stop]
            ignored = torch.rand(len(part), generator=generator) < 1 / 3
            if number == whole != keeper and loss.left_out:
                ignored[:] = True
            elif ignored.all() and (number == keeper or not loss.left_out):
                ignored[0] = False
            part[ignored] = loss.ignore
        begin += size
    return targets


# --- datasets -------------------------------------------------------------------------------------


def dataset_of(data: Data, inputs: list[torch.Tensor], targets: torch.Tensor) -> Any:
    """Return the dataset of these tensors."""
    columns = [*inputs, targets]
    if data.source == "subset":
        places = list(reversed(range(len(targets))))
        reordered = [column.flip(0) for column in columns]
        return Subset(TensorDataset(*reordered), places)
    if data.source == "augmented":
        return Augmented(columns)
    return Streamed(columns) if data.source == "stream" else TensorDataset(*columns)


def order_of(data: Data, epoch: int) -> list[int] | None:
    """Return the indices that a sampler draws in an epoch, some of them again; or None."""
    if data.source != "sampler":
        return None
    generator = torch.Generator().manual_seed(epoch)
    total = sum(data.sizes)
    return torch.randint(0, total, (total,), generator=generator).tolist()


def augmented(columns: list[torch.Tensor], index: int) -> tuple[Any, ...]:
    """Return a sample with random changes to its inputs."""
    *inputs, target = (column[index] for column in columns)
    for number, each in enumerate(inputs):
        if each.is_floating_point():
            factor = 1 + 0.1 * random.random() + 0.1 * numpy.random.rand()
            inputs[number] = each * factor + (0.1 * torch.randn(each.shape)).to(each.dtype)
        elif torch.rand(()) < 0.5:
            inputs[number] = each.flip(0)
    return (*inputs, target)


class Augmented(Dataset[Any]):
    """Changes each sample at random; some of them are drawn by `random` and numpy."""

    def __init__(self, columns: list[torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return augmented(self.columns, index)


class Streamed(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, columns: list[torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield augmented(self.columns, index)
