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
from lockstep.comm.exact import ExactSum, add_lists, exact_sums, in_format_of, in_layout_of
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
        # Kept between steps with their buffers, for one case: the leaves and the gradients.
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

    def present(self) -> str:
        """Return which parameters have a gradient on this rank, as the bits of a hex number."""
        assert self._fold is not None
        columns = zip(*self._fold.nodes.values(), strict=True)
        return f"{sum(1 << index for index, column in enumerate(columns) if _any(column)):x}"

    @torch.no_grad()
    def reduce(self, holders: Sequence[Sequence[Node]], present: Sequence[str]) -> None:
        """Leave the sum over all micro-batches in `.grad` of every parameter, on every rank.

        `holders` lists the nodes of each rank of the group, `present` what each
        rank says of its own. A parameter that got no gradient in any micro-batch
        keeps `.grad = None`, and nothing of it is sent.
        """
        assert self._fold is not None
        held, self._fold = self._fold.nodes, None
        if len(holders) == 1:
            (sums,) = held.values()
            pairs = list(enumerate(sums))
        else:
            pairs = exact_sums(self._exact_sums(holders, _union(present)), held)
        for index, gradient in pairs:
            parameter = self._parameters[index][1]
            if gradient is not None:
                parameter.grad = in_layout_of(gradient, parameter) if len(holders) > 1 else gradient

    def _exact_sums(
        self, holders: Sequence[Sequence[Node]], trained: Sequence[int]
    ) -> list[ExactSum]:
        """Plan the buckets of the parameters that have a gradient somewhere."""
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
    return in_format_of(gradient, parameter)


def _any(column: Sequence[torch.Tensor | None]) -> bool:
    return any(value is not None for value in column)


def _union(present: Sequence[str]) -> list[int]:
    """Return the numbers of the parameters that some rank has a gradient of."""
    bits = 0
    for each in present:
        bits |= int(each, 16)
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
