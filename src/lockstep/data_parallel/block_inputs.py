"""Inputs of sharded modules whose gradients torch would add in another order.

Autograd adds the gradients of a tensor with several uses one after another, the last use first.
`fully_shard` puts a node between a module and its inputs, behind which sums are separate:

    x ──> a ──> b in the module, c after it           without the node    (c + b) + a
    x ──> node ──> a ──> b in the module, c after it  with it             c + (b + a)

It also gives a gradient of zeros to an input that the module does not use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

__all__ = ["find_reordered_sum"]

NODE = "RegisterPostBackwardFunctionBackward"
"""The node that `fully_shard` puts before the uses of a module's inputs."""

Use = tuple[int, int]
"""A use of a tensor, in the order in which backward comes to it: node and input."""


def find_reordered_sum(roots: Sequence[tuple[Any, int]]) -> Any | None:
    """Return a node of `fully_shard` behind which gradients are added in another order, or None.

    Args:
        roots: The tensors from which backward begins: their nodes, and the numbers of the outputs.
    """
    uses: dict[tuple[Any, int], list[tuple[Use, Any]]] = defaultdict(list)
    reached = {node for node, _ in roots}
    waiting = list(reached)
    for root in roots:
        uses[root].append(((-(1 << 64), 0), None))
    while waiting:
        node = waiting.pop()
        for index, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            uses[target, number].append(((-node._sequence_nr(), index), node))
            if target not in reached:
                reached.add(target)
                waiting.append(target)

    def list_terms(tensor: tuple[Any, int]) -> list[Use] | None:
        """Return the uses in the order of addition; None if some are added separately."""
        terms = list[Use]()
        for use, node in sorted(uses[tensor], key=lambda entry: entry[0]):
            inner: list[Use] | None = [use]
            if _is_of_torch(node):
                inner = list_terms((node, use[1]))
            if not inner or (terms and len(inner) > 1):
                return None
            terms += inner
        return terms

    for tensor in [tensor for tensor in uses if not _is_of_torch(tensor[0])]:
        nodes = [node for _, node in uses[tensor] if _is_of_torch(node)]
        if nodes:
            terms = list_terms(tensor)
            # The first two may be swapped: a + b has the bits of b + a.
            if terms is None or sorted(terms) not in (terms, [*terms[1::-1], *terms[2:]]):
                return nodes[0]
    return None


def _is_of_torch(node: Any) -> bool:
    return type(node).__name__ == NODE
