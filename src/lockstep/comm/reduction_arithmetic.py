"""The arithmetic of reductions across hosts: that of the native module, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm import native_module
from lockstep.comm.hosts.reduction_plan import Term
from lockstep.kernel.tree import Node

__all__ = ["Reduction"]

SUM, AVG = 0, 1
"""Numbers of reductions in `torch.distributed.ReduceOp`."""

HALF = (torch.float16, torch.bfloat16)


class Reduction:
    """The arithmetic of a reduction.

    Args:
        dtype: The element type.
        number: The number of the reduction in `torch.distributed.ReduceOp`.
        ranks: The number of ranks, by which an average is divided.
        factors: The factor of each rank (PREMUL_SUM), or nothing.
    """

    def __init__(
        self, dtype: torch.dtype, number: int, ranks: int, factors: Sequence[float] = ()
    ) -> None:
        self.dtype, self.number, self.factors = dtype, number, list(factors)
        self.round_each = False
        self.divisor = float(ranks) if number == AVG else 1.0
        self.wide = torch.float32 if dtype in HALF else dtype

    @classmethod
    def of_gradients(cls, dtype: torch.dtype, divisor: float) -> Reduction:
        """Return the sum of gradients, which is rounded to their dtype at every node."""
        found = cls(dtype, SUM, 1)
        found.round_each, found.divisor, found.wide = True, divisor, dtype
        return found

    @property
    def is_order_free(self) -> bool:
        """Whether the result does not depend on the order, which is so for integers and bools."""
        kind = self.dtype
        return not (kind.is_floating_point or kind.is_complex or self.factors)

    def factors_of(self, term: Term) -> list[float]:
        """Return the factors of the inputs of a term."""
        return [self.factors[rank] for rank, _ in term.inputs] if self.factors else []

    def combine(
        self,
        inputs: Sequence[torch.Tensor],
        nodes: Sequence[Node],
        leaves: int,
        result: torch.Tensor,
        factors: Sequence[float] = (),
        present: Sequence[bool] = (),
        divisor: float = 1.0,
    ) -> None:
        """Combine the values of nodes that cover a tree, into `result`."""
        native_module.load().combine(
            inputs, nodes, leaves, present, self.dtype, self.number, self.round_each, divisor,
            factors, result,
        )  # fmt: skip
