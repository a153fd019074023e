"""The stage: a contiguous piece of the model on one rank, forward and backward.

    forward of m    fresh buffers, generators keyed by (seed, step, m), the blocks in turn;
                    what the micro-batch needs until its backward is put into its flight
    backward of m   its buffers and its keys again (a recomputation writes and draws too),
                    the gradients of the outputs in, those of the inputs out
    after it        gradients become leaf m of the tree, buffers are kept aside

Several micro-batches may be in flight. The backward is whole, or in its two parts
(`lockstep.pipeline.splitting`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.pipeline.boundary import Pattern, flattened
from lockstep.pipeline.splitting import Split, splittable
from lockstep.randomness import state_of_others
from lockstep.step.buffers import Buffers, Paused
from lockstep.step.entry import Entry
from lockstep.step.forward import called
from lockstep.step.gradients import Gradients
from lockstep.step.recomputation import Recomputation
from lockstep.step.units import Calls, Units

__all__ = ["Stage"]

GUARDED = 16
"""How many forwards are watched for random numbers that are not torch's."""

Loss = Callable[[Any], torch.Tensor]
"""Gives the scaled loss of the micro-batch from the model's outputs."""

Roots = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that backward begins from besides the outputs, with their gradients."""


@dataclass
class Flight:
    """What a micro-batch keeps between its forward and its backward on one stage."""

    entry: Entry | None
    outputs: list[torch.Tensor]
    buffers: Paused
    calls: Calls | None
    split: Split | None = None
    early: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


class Stage:
    """Stage `number` of the model, on this rank.

    Parameters:
        number: in model order; the last of all has the loss.
        named: the modules whose composition it is, in order, by their names in the model.
        units: the keys of their random numbers.
        gradients: the tree of the parameters whose gradients are added here.
        recomputation: of its blocks, in backward.
    """

    def __init__(
        self,
        number: int,
        named: Mapping[str, nn.Module],
        units: Units,
        gradients: Gradients,
        recomputation: Recomputation,
    ) -> None:
        self.number = number
        self.named = dict(named)
        self.units = units
        self.gradients = gradients
        self.recomputation = recomputation
        self.parameters = list(
            dict.fromkeys(each for block in named.values() for each in block.parameters())
        )
        self._flights: dict[int, Flight] = {}
        self._unguarded = GUARDED

    def begin(self, buffers: Buffers) -> None:
        """Begin a step. No gradient is left: also not of a parameter that another stage owns."""
        self.buffers = buffers
        self.end()

    def end(self) -> None:
        """Let go of what is under way, after a failure."""
        self._flights = {}
        for parameter in self.parameters:
            parameter.grad = None

    def outputs(self, leaf: int) -> int:
        """Return how many outputs of a micro-batch have a gradient."""
        return len(self._flights[leaf].outputs)

    def forward(
        self, step: int, leaf: int, entry: Entry | None, data: Any, place: str, loss: Loss | None
    ) -> tuple[Pattern, list[torch.Tensor]]:
        """Compute a micro-batch; return the outputs, flattened, or nothing after a loss.

        `data` is what the first block is given: of the first stage as `called` takes
        it, of the others one value.
        """
        self.buffers.enter()
        self.units.begin(step, leaf)
        value = self._composed(data, place, first=entry is None)
        if loss is not None:
            self.units.end()
            value = loss(value)
        pattern, tensors = flattened(value)
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        self._flights[leaf] = Flight(entry, outputs, self.buffers.pause(), self.units.pause())
        if entry is not None:
            entry.leave()
        return pattern, tensors

    def backward(
        self, leaf: int, gradients: Sequence[torch.Tensor | None] | None, also: Roots = ()
    ) -> list[torch.Tensor | None]:
        """Run the whole backward; return the gradients of the inputs that have one.

        `gradients` are those of the outputs that require one; None after a loss.
        `also` are gradients of parameters that later stages share.
        """
        flight = self._resumed(leaf)
        roots, given = _roots(flight, gradients, also)
        if roots:
            torch.autograd.backward(roots, given)
        self._done(leaf)
        return [] if flight.entry is None else flight.entry.gradients

    def backward_inputs(
        self,
        leaf: int,
        gradients: Sequence[torch.Tensor | None] | None,
        whole: Sequence[torch.Tensor],
        also: Roots = (),
    ) -> list[torch.Tensor | None]:
        """Run the first part of the backward, as `backward`; `whole` as `Split` takes it."""
        flight = self._resumed(leaf)
        roots, given = _roots(flight, gradients, also)
        entry = flight.entry
        if entry is not None and entry.anchor is not None and roots and splittable(roots):
            flight.split = Split(roots, entry.anchor, whole)
            flight.split.first(given)
        elif roots:
            torch.autograd.backward(roots, given)
        # The next micro-batch's first part comes before this one's second.
        for parameter in self.parameters:
            if parameter.grad is not None:
                flight.early[parameter] = parameter.grad
                parameter.grad = None
        flight.buffers, flight.calls = self.buffers.pause(), self.units.pause()
        flight.outputs = []
        return [] if entry is None else entry.gradients

    def backward_weights(self, leaf: int) -> None:
        """Run the second part of the backward."""
        flight = self._resumed(leaf)
        if flight.split is not None:
            flight.split.second()
        for parameter, gradient in flight.early.items():
            parameter.grad = gradient
        self._done(leaf)

    def taken(self, leaf: int, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Take out the gradients of parameters that an earlier stage owns."""
        flight = self._flights.get(leaf)
        if flight is not None:
            return [flight.early.pop(parameter, None) for parameter in parameters]
        found = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    def finish(self, leaf: int, share: float) -> None:
        """Take the gradients of a micro-batch, and its buffers; `share` is its part of them."""
        self.buffers.leave(leaf, share)
        self.gradients.take(leaf)

    def _composed(self, data: Any, place: str, first: bool) -> Any:
        """Call the blocks; the first times, see that none draws what only stage 0 may."""
        blocks = list(self.named.values())
        if first or not self._unguarded:
            return composed(blocks, data, place, first)
        self._unguarded -= 1
        before = state_of_others()
        value = composed(blocks, data, place, first)
        if state_of_others() != before:
            raise UsageError(
                f"{place}: a block draws from Python's or numpy's random numbers, which are seeded "
                "once a micro-batch and not in every stage; draw them from torch (torch.rand)"
            )
        return value

    def _done(self, leaf: int) -> None:
        del self._flights[leaf]
        self.units.pause()

    def _resumed(self, leaf: int) -> Flight:
        flight = self._flights[leaf]
        self.buffers.resume(flight.buffers)
        self.units.resume(flight.calls)
        return flight


def _roots(
    flight: Flight, gradients: Sequence[torch.Tensor | None] | None, also: Roots
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return what backward begins from, and its gradients."""
    roots: list[torch.Tensor] = [tensor for tensor, _ in also]
    given: list[torch.Tensor | None] = [gradient for _, gradient in also]
    for number, output in enumerate(flight.outputs):
        gradient = None if gradients is None else gradients[number]
        if gradients is None or gradient is not None:
            roots.append(output)
            given.append(gradient)
    return roots, given


def composed(blocks: Sequence[nn.Module], data: Any, place: str, first: bool) -> Any:
    """Return what the blocks, one after another, make of `data`."""
    value = called(blocks[0], data if first else (data,), place)
    for block in blocks[1:]:
        value = called(block, (value,), place)
    return value
