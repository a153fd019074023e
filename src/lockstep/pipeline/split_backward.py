"""Splitting: a stage's backward in two parts, the same bits as in one.

The gradient of the inputs is wanted at once, by the rank before; those of the weights
can wait. Some nodes of autograd's graph lead to the inputs, the others only to weights:

    root ──> Conv ──> ReLU ──> Linear ──> entry         lead to the inputs: the first part
               │                 │
               ╰─> w, b          ╰──> t() ──> w, b      side branches: the second part

(1) the first part runs the nodes that lead to the inputs, and nothing else. At each
    junction, where a side branch leaves, the incoming gradient is kept
(2) the second part runs each junction once more with that gradient, into its side
    branch only. A convolution then computes the gradients of its weights, which it
    left out before; what a node computes does not depend on what else it computes

Worth it where a node computes the gradients of its weights apart from that of its
input, as convolutions and matrix products do. Others, a batch norm or an LSTM, would
do everything twice: their side branches belong to the first part. So do those of a
weight that is used at several junctions, the sum of what they give in the order in
which autograd reaches them.

A graph that computes something again in backward (activation checkpointing), or that
holds somebody's own autograd functions, is not split: a junction runs twice, and may
do there what it should do once. Hooks of a weight are called where they would be: its
branch belongs to the first part. Hooks of a tensor at a junction cannot be seen; they are
called twice, and what they return the second time is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lockstep.pipeline.graph_entry import Enter

__all__ = ["Branch", "Split", "splittable"]

SEPARATE = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "MkldnnLinear", "Mm")
"""Autograd's names of what computes the gradients of weights by themselves."""


@dataclass
class Branch:
    """A side branch: the junctions it leaves from, and the leaves it ends in."""

    junctions: list[Node] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


class Split:
    """The two parts of one backward, from `roots` to the inputs behind `anchor` and the weights.

    `whole` are weights whose gradients belong to the first part whatever their place.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        whole: Sequence[torch.Tensor] = (),
    ) -> None:
        early = {id(each) for each in whole}
        self._roots, self._anchor = list(roots), anchor
        self._kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        self._late: list[Branch] = []
        self._early: list[torch.Tensor] = []
        for branch in _branches([_node(root) for root in roots], _node(anchor)):
            if (
                len(branch.junctions) == 1
                and _separate(branch.junctions[0])
                and early.isdisjoint(map(id, branch.leaves))
                and not any(map(_has_hooks, branch.leaves))
            ):
                self._late.append(branch)
            else:
                self._early += branch.leaves

    def first(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Do (1), with the gradients of the roots."""
        handles = [
            branch.junctions[0].register_prehook(self._keeper(branch.junctions[0]))
            for branch in self._late
        ]
        try:
            inputs = [self._anchor, *dict.fromkeys(self._early)]
            torch.autograd.backward(self._roots, gradients, retain_graph=True, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()
        self._roots = []

    def second(self) -> None:
        """Do (2), and let go of the graph."""
        while self._late:
            branch = self._late.pop()
            (junction,) = branch.junctions
            gradients = self._kept.pop(junction, ())
            edges = [
                (GradientEdge(junction, number), gradient)
                for number, gradient in enumerate(gradients)
                if gradient is not None
            ]
            if edges and branch.leaves:
                # Hooks of the junction's output have been called with these: not once more.
                handle = junction.register_prehook(partial(_replaced, gradients))
                try:
                    torch.autograd.backward(
                        [edge for edge, _ in edges],
                        [gradient for _, gradient in edges],
                        inputs=branch.leaves,
                    )
                finally:
                    handle.remove()

    def _keeper(self, node: Node) -> Any:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._kept[node] = gradients

        return keep


def _replaced(gradients: Any, incoming: Any) -> Any:
    return gradients


def _has_hooks(leaf: torch.Tensor) -> bool:
    """Tell whether backward calls somebody's function when a gradient arrives at a leaf."""
    after = leaf._post_accumulate_grad_hooks
    return bool(leaf._backward_hooks) or bool(after)


def splittable(roots: Sequence[torch.Tensor]) -> bool:
    """Tell whether a junction of the graph below `roots` may be run twice."""
    seen: set[Node] = set()
    pending = [_node(root) for root in roots]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if issubclass(type(node), BackwardCFunction):
            if getattr(node, "_forward_cls", None) is Enter:
                continue
            return False
        if any(_hooked(getattr(node, name)) for name in _saved_names(type(node), node)):
            return False
        pending += [below for below, _ in node.next_functions if below is not None]
    return True


_saved: dict[type, list[str]] = {}


def _saved_names(kind: type, node: Node) -> list[str]:
    """Return the attributes of a kind of node that hold what it saved."""
    if kind not in _saved:
        _saved[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    return _saved[kind]


def _hooked(saved: Any) -> bool:
    """Tell whether a saved tensor comes back by somebody's function, or that cannot be known."""
    if isinstance(saved, (tuple, list)):
        return any(map(_hooked, saved))
    return getattr(saved, "unpack_hook", _hooked) is not None


def _separate(junction: Node) -> bool:
    """Tell whether a node makes the gradients of its weights apart from that of its input."""
    return junction.name().rstrip("0123456789").removesuffix("Backward") in SEPARATE


def _node(tensor: torch.Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _branches(roots: Sequence[Node], entry: Node) -> list[Branch]:
    """Return the side branches of the graph below `roots`; those that touch are one."""
    leading = _leading_to(entry, roots)
    group: dict[Node, Branch] = {}
    found: list[Branch] = []
    for junction in leading:
        branch: Branch | None = None
        for node, _ in junction.next_functions:
            if node is not None and node not in leading:
                branch = _explored(node, branch, group, found)
        if branch is not None and junction not in branch.junctions:
            branch.junctions.append(junction)
    for root in roots:
        if root not in leading:  # it depends on weights alone: a junction that nobody runs
            branch = _explored(root, None, group, found)
            branch.junctions += [root, root]
    return found


def _explored(
    start: Node, branch: Branch | None, group: dict[Node, Branch], found: list[Branch]
) -> Branch:
    """Put `start` and what lies below it into `branch`, joined with the branches it meets."""
    if branch is None:
        branch = Branch()
        found.append(branch)
    pending = [start]
    while pending:
        node = pending.pop()
        other = group.get(node)
        if other is branch:
            continue
        if other is not None:
            branch.junctions += other.junctions
            branch.leaves += other.leaves
            found.remove(other)
            for each, owner in group.items():
                if owner is other:
                    group[each] = branch
            continue
        group[node] = branch
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            branch.leaves.append(leaf)
        pending += [each for each, _ in node.next_functions if each is not None]
    return branch


def _leading_to(entry: Node, roots: Sequence[Node]) -> dict[Node, None]:
    """Return the nodes below `roots` from which `entry` is reached, `entry` included."""
    above: dict[Node, list[Node]] = {}
    pending = list(dict.fromkeys(roots))
    seen = set(pending)
    while pending:
        node = pending.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            above.setdefault(below, []).append(node)
            if below not in seen:
                seen.add(below)
                pending.append(below)
    leading: dict[Node, None] = {}
    pending = [entry]
    while pending:
        node = pending.pop()
        if node not in leading:
            leading[node] = None
            pending += above.get(node, [])
    return leading
