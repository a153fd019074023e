"""The right answers: the parameters of one process that trained on the same global batches.

Plain PyTorch: a backward for every micro-batch of every rank, the gradients added
along the tree of docs/concepts/guarantee.md. A contender that guarantees bits must have
every one of them; one that adds in another order may differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import lockstep
from benchmarks.step.contenders import Case, Training, loss
from benchmarks.step.networks import Batch, Network
from lockstep.checksum import digest
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, add_present

__all__ = ["CHECKED", "LIMIT", "Answer", "Expected", "plain_digest", "training_digest", "write"]

CHECKED = 2
"""Steps from the beginning after which the parameters are compared."""

LIMIT = 0.05
"""How far parameters may be from the right ones, as a share of the distance that those moved.

AdamW divides a gradient by its size: where that is next to nothing, rounding decides its sign.
"""

PIECE = 1 << 20  # elements that are compared at a time


@dataclass(frozen=True)
class Answer:
    """Parameters that were compared: their digest, whether all bits are right, how far off."""

    digest: str
    same: bool
    error: float


@dataclass(frozen=True)
class Expected:
    """The parameters before and after the first steps, in files of float32."""

    net: Network
    begun: Path
    ended: Path
    digest: str

    @classmethod
    def of(cls, case: Case, ranks: int, folder: str, timeout: float) -> Expected:
        """Train in a process of its own, as `ranks` ranks have to, and keep what came of it."""
        begun = Path(folder, "begun")
        ended = Path(folder, "ended")
        lockstep.launch(train, (case, ranks, str(begun), str(ended)), timeout=timeout)
        return cls(case.net, begun, ended, file_digest(case.net, ended))

    def compare(self, file: str) -> Answer:
        """Compare the parameters in `file` with the right ones."""
        found = file_digest(self.net, Path(file))
        return Answer(found, found == self.digest, self._error(Path(file)))

    def _error(self, file: Path) -> float:
        """Return the distance from the right parameters over that which those have gone."""
        off = gone = 0.0
        files = (self.begun, self.ended, file)
        begun, ended, got = (np.memmap(each, np.float32, "r") for each in files)
        for start in range(0, len(ended), PIECE):
            here = slice(start, start + PIECE)
            right = ended[here].astype(np.float64)
            off += float(np.square(got[here] - right).sum())
            gone += float(np.square(begun[here] - right).sum())
        return math.sqrt(off / gone) if gone else math.inf


class Alone(Training):
    """Plain PyTorch in one process, on the micro-batches of `ranks` ranks."""

    def __init__(self, case: Case, ranks: int) -> None:
        self._model = case.net.model()
        self._optimizer = case.optimize(self._model.parameters())
        self._leaves = case.leaves(ranks)

    def step(self, batch: Batch) -> None:
        """Train on one global batch."""
        gradients(self._model, batch, self._leaves)
        self._optimizer.step()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters."""
        yield from ((name, each.detach()) for name, each in self._model.named_parameters())


def train(case: Case, ranks: int, begun: str, ended: str) -> None:
    """Train alone for `ranks` ranks; write the parameters before and after."""
    lockstep.init(device="cpu")
    training = Alone(case, ranks)
    write(training, begun)
    for turn in range(CHECKED):
        training.step(case.batch(ranks, turn))
    write(training, ended)
    lockstep.shutdown()


def plain_digest(cases: Sequence[Case]) -> list[str]:
    """Train each case alone and return the digests."""
    lockstep.init(device="cpu")
    found = []
    for case in cases:
        training = Alone(case, 1)
        for turn in range(CHECKED):
            training.step(case.batch(1, turn))
        found.append(training_digest(training))
    lockstep.shutdown()
    return found


def training_digest(training: Training) -> str:
    """Return the digest of a training's parameters."""
    return digest(dict(training.parameters()))


def gradients(model: nn.Module, batch: Batch, leaves: int) -> None:
    """Leave the gradient of the batch in `.grad`, added along the tree over `leaves` leaves."""
    fold: TreeAccumulator[list[torch.Tensor | None]] = TreeAccumulator(
        leaves, lambda left, right: [*map(add_present, left, right)]
    )
    inputs, targets = batch
    for leaf, span in enumerate(split_evenly(len(inputs), leaves)):
        rows = slice(span.start, span.stop)
        model.zero_grad()
        # A tensor of its own: kernels may choose their path by where a slice begins.
        value = loss(model(inputs[rows].clone()), targets[rows].clone())
        (value * (len(span) / len(inputs))).backward()
        fold.put((leaf, leaf + 1), [each.grad for each in model.parameters()])
    for parameter, gradient in zip(model.parameters(), fold.nodes[0, leaves], strict=True):
        parameter.grad = gradient


def write(training: Training, file: str) -> None:
    """Write the parameters one after another, without a second copy of them all."""
    with open(file, "wb") as out:
        for _, each in training.parameters():
            each.contiguous().numpy().tofile(out)


def file_digest(net: Network, file: Path) -> str:
    """Return the digest of the parameters in a file, as a trainer without buffers says it."""
    numbers = torch.from_numpy(np.memmap(file, np.float32, "c"))
    with torch.device("meta"):
        shapes = [(name, each.shape) for name, each in net.build().named_parameters()]
    parts = numbers.split([shape.numel() for _, shape in shapes])
    return digest(
        {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}
    )
