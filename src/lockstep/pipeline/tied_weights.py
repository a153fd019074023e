"""Tied parameters: sums the gradients of a parameter in several stages as in one process.

    w is held by        stage 0 (owner)      stage 2         stage 3
    of micro-batch m    (g3 + g2') + g0' <── g3 + g2'  <──   g3            '  one use after another
    then                leaf m of the tree, reduction over the replicas
    after it            .grad            ──> .grad      ──>  .grad

In one process autograd visits the uses of w from the last to the first, and adds each gradient
to the sum so far. Hence a stage does not add the sum of the later stages afterwards: that sum
is a root of its backward, the first gradient that is accumulated into w. The hooks of w must
receive the complete sum, so only the owner calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from lockstep.comm.memory_format import in_format_of
from lockstep.pipeline.boundary import flatten, unflatten
from lockstep.pipeline.p2p import Receiver, Sender

__all__ = ["TiedParameters", "disable_hooks", "find_tied_parameters"]

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class TiedParameters:
    """Parameters that two stages hold, with the links between these stages.

    Attributes:
        later: The number of the later stage.
        earlier: The number of the earlier stage, to which the later one sends its sums.
        parameters: The parameters.
        gradient_sender: Sends the sums of the later stage; None if both stages are on one rank.
        gradient_receiver: Receives these sums on the rank of the earlier stage.
        reduced_sender: Sends the reduced gradients of the earlier stage.
        reduced_receiver: Receives these gradients on the rank of the later stage.
        local_gradients: The sums by micro-batch, if both stages are on one rank.
    """

    later: int
    earlier: int
    parameters: list[nn.Parameter]
    gradient_sender: Sender | None = None
    gradient_receiver: Receiver | None = None
    reduced_sender: Sender | None = None
    reduced_receiver: Receiver | None = None
    local_gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)

    def send_gradients(
        self, gradients: Sequence[torch.Tensor | None], attempt: int, index: int
    ) -> None:
        """Send the sums of the later stage for a micro-batch to the earlier stage."""
        if self.gradient_sender is None:
            self.local_gradients[index] = list(gradients)
        else:
            self.gradient_sender.send(*flatten(tuple(gradients)), attempt, index)

    def receive_gradients(self, attempt: int, index: int) -> Pairs:
        """Return the sums of the later stages for a micro-batch, with their parameters."""
        if self.gradient_receiver is None:
            gradients = self.local_gradients.pop(index)
        else:
            structure, tensors = self.gradient_receiver.receive(attempt, index)
            gradients = unflatten(structure, tensors)
        pairs = zip(self.parameters, gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def send_reduced(self, attempt: int) -> None:
        """Send the reduced gradients of the batch to the later stage."""
        if self.reduced_sender is not None:
            gradients = tuple(parameter.grad for parameter in self.parameters)
            self.reduced_sender.send(*flatten(gradients), attempt, 0)

    def receive_reduced(self, attempt: int) -> None:
        """Receive the reduced gradients of the batch from the earlier stage."""
        if self.reduced_receiver is None:
            return
        structure, tensors = self.reduced_receiver.receive(attempt, 0)
        for parameter, gradient in zip(self.parameters, unflatten(structure, tensors), strict=True):
            parameter.grad = None if gradient is None else in_format_of(gradient, parameter)


@contextmanager
def disable_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Disable the hooks of parameters during a backward in the body."""
    hidden = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (
            parameter._backward_hooks,
            parameter._post_accumulate_grad_hooks,
        )
        if hooks
    ]
    for hooks, _ in hidden:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in hidden:
            hooks.update(entries)


def find_tied_parameters(
    parameters: Mapping[str, nn.Parameter], stages_by_name: Mapping[str, Sequence[int]]
) -> list[TiedParameters]:
    """Return the tied parameters, latest stages first, so that each sum is complete when sent."""
    ties: dict[tuple[int, int], TiedParameters] = {}
    for name, parameter in parameters.items():
        stages = stages_by_name[name]
        for earlier, later in pairwise(stages):
            tie = ties.setdefault((later, earlier), TiedParameters(later, earlier, []))
            tie.parameters.append(parameter)
    return [ties[pair] for pair in sorted(ties, reverse=True)]
