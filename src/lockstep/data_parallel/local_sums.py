"""This rank's sums of gradients: those of its micro-batches, added along the tree in one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from lockstep.checksum import checksum
from lockstep.comm.memory_format import in_format_of, is_in_format_of
from lockstep.comm.sparse_gradients import add_sparse
from lockstep.kernel.errors import GradientError
from lockstep.kernel.tree import Node, TensorList, TreeAccumulator, add_present, left_siblings

__all__ = ["LocalSums"]


class LocalSums:
    """The sums of one step.

    A micro-batch is added to its left siblings in the tree as soon as its gradients are known. The
    last addition of a node writes to its destination in the planned buckets.

    Args:
        parameters: Names and parameters.
        sparse: The indices of the parameters whose gradients may be sparse.
        leaves: The number of micro-batches of the batch.
        destinations: The memory in buckets for the values of this rank's nodes, by parameter.
        add_natively: The function of the native module that adds all gradients in one call; None
            without the native module.

    Attributes:
        complete: The values of this rank's nodes, without those of a micro-batch that is being
            accumulated.
        failure: The reason why a gradient was accumulated too early; "" for none.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Collection[int],
        leaves: int,
        destinations: Mapping[Node, Mapping[int, torch.Tensor]],
        add_natively: Callable[..., bool] | None,
    ) -> None:
        self._parameters = parameters
        self._sparse = sparse
        self._destinations = destinations
        self._tensors = [parameter for _, parameter in parameters]
        self._add_natively = None if sparse else add_natively
        self._leaves = leaves
        self.complete: dict[Node, TensorList] = {}
        self.failure = ""
        # The micro-batch that is being accumulated: its left siblings in the tree, and the node and
        # the values of their sum.
        self._siblings: list[TensorList] | None = None
        self._node: Node = (0, 0)
        self._values: TensorList = []

    def fold(self) -> None:
        """Add nodes to their siblings, also if these came first, so that the largest ones are held.

        Micro-batches that follow a lost rank's come in another order.
        """
        accumulator = TreeAccumulator[TensorList](self._leaves, _add_lists)
        for node in sorted(self.complete):
            accumulator.put(node, self.complete[node])
        self.complete = accumulator.nodes

    @property
    def is_accumulating(self) -> bool:
        """Whether a micro-batch is being accumulated, so that its backward may be running."""
        return self._siblings is not None

    @property
    def nodes(self) -> dict[Node, TensorList]:
        """The values of this rank's nodes so far."""
        if self._siblings is None:
            return self.complete
        return {**self.complete, self._node: self._values}

    def accumulate(self, microbatch: int) -> None:
        """Move the gradients in `.grad` to a micro-batch."""
        self.accumulate_node((microbatch, microbatch + 1))

    def accumulate_node(self, node: Node) -> None:
        """Move the gradients in `.grad` to a node, whose sum they are."""
        if self._siblings is None and self._accumulate_together(node):
            return
        self._open_node(node)
        for index in range(len(self._parameters)):
            self.accumulate_one(index)
        self.complete[self._node] = self._values
        self._siblings = None

    @torch.no_grad()
    def hash_node(self, node: Node) -> dict[torch.Tensor, int]:
        """Return the checksums of a node's gradients by parameter.

        Those of its last micro-batch are still in `.grad`; nothing is moved.
        """
        first, end = node
        pairs = left_siblings((end - 1, end), self._leaves)
        siblings = [self.complete[sibling] for sibling, _ in pairs if sibling[0] >= first]
        hashes: dict[torch.Tensor, int] = {}
        for index, (name, parameter) in enumerate(self._parameters):
            value = _read_gradient(name, parameter, index in self._sparse)
            for values in siblings:
                value = add_sparse(values[index], value)  # in new memory
            if value is not None:
                hashes[parameter] = checksum(value)
        return hashes

    def skip(self, microbatch: int) -> None:
        """Let a micro-batch that is not computed be without gradients, without reading `.grad`."""
        self.open(microbatch)
        for index in range(len(self._parameters)):
            self._add(index, None)
        self.complete[self._node] = self._values
        self._siblings = None

    def open(self, microbatch: int) -> None:
        """Begin to accumulate the gradients of a micro-batch, unless this has begun already."""
        self._open_node((microbatch, microbatch + 1))

    def _open_node(self, node: Node) -> None:
        if self._siblings is None:
            self._siblings = []
            self._node = node
            for sibling, parent in left_siblings(node, self._leaves):
                if sibling not in self.complete:  # it has leaves of other ranks
                    break
                self._siblings.append(self.complete.pop(sibling))
                self._node = parent
            self._values = [None] * len(self._parameters)

    def accumulate_one(self, index: int) -> None:
        """Move one parameter's gradient out of `.grad`, unless it has been moved already."""
        name, parameter = self._parameters[index]
        if self._values[index] is None:
            gradient = _read_gradient(name, parameter, index in self._sparse)
            parameter.grad = None
            self._add(index, gradient)
        elif parameter.grad is not None:
            self.fail_late(index)

    def fail_late(self, index: int) -> None:
        """Note that a gradient arrived in two parts."""
        self.failure = (
            f"the gradient of {self._parameters[index][0]} arrived in two parts, unlike in the "
            "steps before; if a part of the model uses torch.utils.checkpoint, pass "
            "use_reentrant=False, and call backward(final=True) once per micro-batch"
        )

    def release(self, indices: Collection[int]) -> None:
        """Free gradients that have been packed; their destinations mark them as present."""
        for index in indices:
            destination = self._find_destination(index)
            if destination is not None and self._values[index] is not None:
                self._values[index] = destination

    def _find_destination(self, index: int) -> torch.Tensor | None:
        """Return the memory in a bucket for the current node's value of a parameter."""
        return self._destinations.get(self._node, {}).get(index)

    def _accumulate_together(self, node: Node) -> bool:
        """Move all gradients out of `.grad` in one call of the native module, in the usual case.

        Returns:
            Whether this is the usual case: gradients have the dtype and layout of their
            parameters, and every sibling has gradients of the same parameters.
        """
        if self._add_natively is None:
            return self._accumulate_on_accelerator(node)
        siblings = left_siblings(node, self._leaves)
        return self._add_natively(self._tensors, self.complete, node, siblings, self._destinations)

    @torch.no_grad()
    def _accumulate_on_accelerator(self, node: Node) -> bool:
        """Do the same with one kernel per addition, where launching takes longer than adding."""
        self._open_node(node)
        gradients = [parameter.grad for parameter in self._tensors]
        if (
            not gradients  # a stage may have no parameters
            or self._sparse
            or self._destinations.get(self._node)
            or not all(map(_is_usual, gradients, self._tensors))
            or any(value is None for values in self._siblings or () for value in values)
        ):
            return False
        values: Any = gradients
        siblings: Any = self._siblings or ()
        for left in siblings:  # innermost first; left + right is right + left
            torch._foreach_add_(left, values)
            values = left
        for parameter in self._tensors:
            parameter.grad = None
        self.complete[self._node] = values
        self._siblings = None
        return True

    @torch.no_grad()
    def _add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add one parameter's gradient, or None, to its siblings in the tree."""
        assert self._siblings is not None
        terms = [value for values in self._siblings if (value := values[index]) is not None]
        if gradient is not None:
            terms.insert(0, gradient)
        if not terms:
            return
        if index in self._sparse:
            for left in terms:  # the gradient itself, then its left siblings
                self._values[index] = add_sparse(left, self._values[index])
            return
        *others, last = terms
        if not others:
            self._values[index] = last  # launching its bucket copies it to its destination
            return
        value = others[0]
        for left in others[1:]:
            value = left.add_(value)
        destination = self._find_destination(index)
        out = last if destination is None else destination
        self._values[index] = torch.add(last, value, out=out)


def _add_lists(left: TensorList, right: TensorList) -> TensorList:
    return [
        add_sparse(one, two) if one is not None and one.is_sparse else add_present(one, two)
        for one, two in zip(left, right, strict=True)
    ]


def _is_usual(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Return whether a gradient is one on an accelerator that needs no conversion."""
    return (
        gradient is not None
        and not gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.dtype == parameter.dtype
        and is_in_format_of(gradient, parameter)
    )


def _read_gradient(
    name: str, parameter: torch.nn.Parameter, may_be_sparse: bool
) -> torch.Tensor | None:
    """Return a parameter's gradient, coalesced or in the memory format of the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse and not may_be_sparse:
        raise GradientError(
            f"parameter {name} has a sparse gradient, which is supported only for the weights of "
            "Embedding and EmbeddingBag with sparse=True: use one of these modules, or sparse=False"
        )
    if gradient.dtype != parameter.dtype:
        raise GradientError(
            f"parameter {name} is {parameter.dtype} and its gradient {gradient.dtype}"
        )
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient.coalesce()
    if is_in_format_of(gradient, parameter):
        return gradient
    # The norm of a gradient depends on the order of its elements in memory.
    return in_format_of(gradient, parameter)
