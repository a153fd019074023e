"""Gradients: taken from autograd leaf by leaf, added along the tree, given back as `.grad`.

    backward of micro-batch m ──> .grad of every parameter ──> leaf m of the tree
    after the last            ──> this rank's nodes ──exact sum──> .grad, on every rank

Autograd never adds two micro-batches: after each backward the gradients are
taken out of `.grad`, and the fold adds them as soon as siblings meet. A rank
holds at most log2(M) + 1 partial sums at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import plan
from lockstep.comm.exact import ExactSum, add_lists, exact_sums, in_layout_of
from lockstep.comm.tree import Fold, Node
from lockstep.errors import GradientError

__all__ = ["BUCKET_BYTES", "Gradients"]

BUCKET_BYTES = 4 << 20
"""Bytes of a bucket. One bucket's exchange overlaps the additions of the one before."""


class Gradients:
    """The gradients of `parameters` (name and tensor, the same on every rank) during one step."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._fold: Fold[list[torch.Tensor | None]] | None = None
        self._leaves = 0
        # Kept between steps with their buffers, for one case: the leaves and who is trained.
        self._case: tuple[int, ...] = ()
        self._sums: list[ExactSum] = []

    def begin(self, leaves: int) -> None:
        """Start a step whose batch has `leaves` micro-batches; `.grad` is emptied."""
        self._leaves = leaves
        self._fold = Fold(leaves, add_lists)
        self.clear()

    def clear(self) -> None:
        """Empty `.grad` of every parameter."""
        for _, parameter in self._parameters:
            parameter.grad = None

    def take(self, microbatch: int) -> None:
        """Make what autograd left in `.grad` the leaf of `microbatch`."""
        assert self._fold is not None
        taken = [_gradient(name, parameter) for name, parameter in self._parameters]
        self.clear()
        self._fold.put((microbatch, microbatch + 1), taken)

    @torch.no_grad()
    def reduce(self, holders: Sequence[Sequence[Node]]) -> None:
        """Leave the sum over all micro-batches in `.grad` of every parameter, on every rank.

        `holders` lists the nodes of each rank of the group. A parameter that got
        no gradient in any micro-batch keeps `.grad = None`. The gradients may be
        views of buffers that the next step overwrites.
        """
        assert self._fold is not None
        held, self._fold = self._fold.nodes, None
        if len(holders) == 1:
            (sums,) = held.values()
            pairs = list(enumerate(sums))
        else:
            pairs = exact_sums(self._exact_sums(holders), held)
        for index, gradient in pairs:
            parameter = self._parameters[index][1]
            if gradient is not None:
                parameter.grad = in_layout_of(gradient, parameter) if len(holders) > 1 else gradient

    def _exact_sums(self, holders: Sequence[Sequence[Node]]) -> list[ExactSum]:
        """Plan the buckets of the parameters that are trained now; frozen ones stay at home."""
        trained = [
            number
            for number, (_, parameter) in enumerate(self._parameters)
            if parameter.requires_grad
        ]
        case = (self._leaves, *trained)
        if case != self._case:
            parameters = [self._parameters[number][1] for number in trained]
            buckets = plan(
                [parameter.numel() for parameter in parameters],
                [parameter.dtype for parameter in parameters],
                BUCKET_BYTES,
                indices=trained,
            )
            self._case, self._sums = case, []  # the old buffers go before the new ones come
            self._sums = [
                ExactSum(bucket, holders, self._leaves, parameters[0].device, self._group)
                for bucket in buckets
            ]
        return self._sums


def _gradient(name: str, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient in the memory format of the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise GradientError(
            f"parameter {name} has a sparse gradient, which cannot be added exactly: "
            "make its Embedding with sparse=False"
        )
    if gradient.dtype != parameter.dtype:
        raise GradientError(
            f"parameter {name} is {parameter.dtype} and its gradient {gradient.dtype}"
        )
    gradient = gradient.detach()
    if gradient.stride() == parameter.stride():
        return gradient
    # The norm of a gradient depends on the order in which its elements lie.
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
