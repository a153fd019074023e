"""Tying: a parameter that several stages share, its gradient added as in one process.

    holders of w        stage 0 (owner)      stage 2         stage 3
    of micro-batch m    (g3 + g2') + g0' <── g3 + g2'  <──   g3            '  one use after another
    then                leaf m of the tree, sum over the replicas
    after the sum       .grad            ──> .grad      ──>  .grad

In one process autograd reaches the uses of w from the last to the first, and adds each
to the sum so far. So a stage does not add what comes from later stages afterwards: it
is a root of its backward, the first thing that arrives at w. The hooks of w are called
with the whole sum, so by its owner alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from lockstep.comm.reproducible_all_reduce import in_format_of
from lockstep.pipeline.boundary import assembled, flattened
from lockstep.pipeline.p2p import Receiver, Sender

__all__ = ["Tie", "ties_of", "without_hooks"]

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Tie:
    """The parameters that stage `later` hands on to stage `earlier`, and the links between.

    The links are None where both stages are on one rank: then `held` keeps what is
    handed on, by micro-batch.
    """

    later: int
    earlier: int
    parameters: list[nn.Parameter]
    up: Sender | None = None
    down: Receiver | None = None
    down_sender: Sender | None = None
    up_receiver: Receiver | None = None
    held: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)

    def hand_on(self, gradients: Sequence[torch.Tensor | None], attempt: int, leaf: int) -> None:
        """Give the later stage's sums of a micro-batch to the earlier one."""
        if self.up is None:
            self.held[leaf] = list(gradients)
        else:
            self.up.send(*flattened(tuple(gradients)), attempt, leaf)

    def taken(self, attempt: int, leaf: int) -> Pairs:
        """Return what the later stages made of a micro-batch, with the parameters it is of."""
        if self.down is None:
            gradients = self.held.pop(leaf)
        else:
            pattern, tensors = self.down.receive(attempt, leaf)
            gradients = assembled(pattern, tensors)
        pairs = zip(self.parameters, gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def tell(self, attempt: int) -> None:
        """Send the earlier stage's sums over the batch to the later one."""
        if self.down_sender is not None:
            gradients = tuple(parameter.grad for parameter in self.parameters)
            self.down_sender.send(*flattened(gradients), attempt, 0)

    def hear(self, attempt: int) -> None:
        """Take the sums over the batch from the earlier stage."""
        if self.up_receiver is None:
            return
        pattern, tensors = self.up_receiver.receive(attempt, 0)
        for parameter, gradient in zip(self.parameters, assembled(pattern, tensors), strict=True):
            parameter.grad = None if gradient is None else in_format_of(gradient, parameter)


@contextmanager
def without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let no hook of the parameters be called by what the body runs backward."""
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
        for hooks, called in hidden:
            hooks.update(called)


def ties_of(
    parameters: Mapping[str, nn.Parameter], holders: Mapping[str, Sequence[int]]
) -> list[Tie]:
    """Return the ties of a cut, the latest stages first: each sum is whole when it goes on."""
    found: dict[tuple[int, int], Tie] = {}
    for name, parameter in parameters.items():
        stages = holders[name]
        for earlier, later in pairwise(stages):
            tie = found.setdefault((later, earlier), Tie(later, earlier, []))
            tie.parameters.append(parameter)
    return [found[pair] for pair in sorted(found, reverse=True)]
