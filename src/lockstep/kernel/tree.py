"""Rule 4, the tree: the order in which values are added, the same on any number of ranks.

    node(lo, hi) = node(lo, mid) + node(mid, hi)
    mid - lo     = the largest power of two below hi - lo

        0   1   2   3   4   5   6                leaves = 7
        └─01┘   └─23┘   └─45┘   │
          └──0123─┘       └─456─┘
                └────0-6────┘

The shape depends only on the number of leaves. A tree without its last leaves is the tree of
the remaining leaves, so a short batch needs no special rule. Three ranks with the leaves 0-2, 3-5
and 6 hold the nodes {01, 2}, {3, 45} and {6}; the remaining nodes are added across ranks
(`lockstep.comm.reproducible_all_reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

import torch

__all__ = [
    "Node",
    "TensorList",
    "TreeAccumulator",
    "add_present",
    "left_siblings",
    "nodes_of",
    "split",
    "total",
]

Node = tuple[int, int]
"""A node (lo, hi) covers the leaves lo, lo + 1, ..., hi - 1."""

TensorList = list[torch.Tensor | None]
"""The value of a node, such as the gradient of every parameter; None for one that is absent."""

Value = TypeVar("Value")


def split(lo: int, hi: int) -> int:
    """Return the first leaf of the right child of node (lo, hi), which has at least 2 leaves."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


@lru_cache(maxsize=64)
def _parents(leaves: int) -> dict[Node, tuple[Node, Node]]:
    """Map every node but the root to its (sibling, parent)."""
    parents: dict[Node, tuple[Node, Node]] = {}
    pending = [(0, leaves)]
    while pending:
        lo, hi = node = pending.pop()
        if hi - lo < 2:
            continue
        left = (lo, split(lo, hi))
        right = (split(lo, hi), hi)
        parents[left] = (right, node)
        parents[right] = (left, node)
        pending += [left, right]
    return parents


@lru_cache(maxsize=1024)
def left_siblings(node: Node, leaves: int) -> list[tuple[Node, Node]]:
    """Return what a node is added to if leaves arrive in order, for callers without an accumulator.

    Returns:
        The left sibling and its parent of each addition, innermost first.
    """
    parents = _parents(leaves)
    pairs = []
    while node in parents and parents[node][0] < node:
        pairs.append(parents[node])
        node = parents[node][1]
    return pairs


def nodes_of(owned: range, leaves: int) -> list[Node]:
    """Return the largest nodes that cover only leaves in `owned`; their owner adds them alone."""

    def visit(lo: int, hi: int) -> Iterable[Node]:
        if hi <= owned.start or owned.stop <= lo:
            return
        if owned.start <= lo and hi <= owned.stop:
            yield (lo, hi)
            return
        yield from visit(lo, split(lo, hi))
        yield from visit(split(lo, hi), hi)

    return list(visit(0, leaves)) if owned else []


class TreeAccumulator(Generic[Value]):
    """Adds values along the tree as they arrive, as soon as both siblings are known.

    If leaves arrive in order, at most log2(leaves) + 1 partial sums are held at a time, like the
    digits of a binary counter.

    Args:
        leaves: The number of leaves.
        add: A function of the left and the right sibling that returns their sum; it may reuse
            the memory of the left one.
    """

    def __init__(self, leaves: int, add: Callable[[Value, Value], Value]) -> None:
        self.nodes: dict[Node, Value] = {}
        self._parents = _parents(leaves)
        self._add = add

    def put(self, node: Node, value: Value) -> None:
        """Add the value of a node to its sibling if the sibling is known; repeat upwards."""
        while (relatives := self._parents.get(node)) and relatives[0] in self.nodes:
            sibling, parent = relatives
            other = self.nodes.pop(sibling)
            value = self._add(value, other) if node < sibling else self._add(other, value)
            node = parent
        self.nodes[node] = value


def total(values: Mapping[Node, Value], leaves: int, add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum, along the tree, of nodes that together cover all leaves."""
    terms = [values[node] for node in sorted(values)]
    if len(terms) == leaves:  # all are leaves: add one level of the tree after the other
        while len(terms) > 1:
            sums = [*map(add, terms[::2], terms[1::2])]
            terms = sums + terms[2 * len(sums) :]
        return terms[0]
    accumulator = TreeAccumulator(leaves, add)
    for node, term in zip(sorted(values), terms, strict=True):
        accumulator.put(node, term)
    (result,) = accumulator.nodes.values()
    return result


def add_present(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two tensors, in the memory of `left`; None stands for an absent tensor."""
    if left is None or right is None:
        return left if right is None else right
    return left.add_(right)
