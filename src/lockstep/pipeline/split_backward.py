"""Split backward: the backward of a stage in two parts, with the bits of a whole one.

The previous rank waits for the gradients of the inputs; the gradients of the weights can be
computed later. Some nodes of the autograd graph lead to the inputs, the others only to weights:

    root ──> Conv ──> ReLU ──> Linear ──> entry         lead to the inputs: the first part
               │                 │
               ╰─> w, b          ╰──> t() ──> w, b      side branches: the second part

(1) The first part runs only the nodes that lead to the inputs. At each junction, where a side
    branch leaves, it keeps the incoming gradient.
(2) The second part runs each junction again with that gradient, into its side branch only. A
    convolution then computes the gradients of its weights, which it skipped before. The result
    of a node does not depend on which other gradients it computes.

This is worthwhile only for nodes that compute the gradients of weights and inputs separately,
such as convolutions and matrix products. A batch norm or an LSTM would compute everything
twice, so its side branches belong to the first part. The same holds for a weight that is used
at several junctions, because its gradients are summed in the order in which autograd visits
the junctions.

A graph with recomputation (activation checkpointing) or with custom autograd functions is not
split: a junction runs twice, and would repeat their side effects. A weight with hooks belongs
to the first part, so that its hooks are called in the order of a whole backward. Hooks of a
tensor at a junction cannot be detected: they are called twice, and the second result is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

__all__ = ["GraphInput", "GraphInputFunction", "SideBranch", "SplitBackward", "is_splittable"]

SEPARATE = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "MkldnnLinear", "Mm")
"""The autograd nodes that compute the gradients of weights separately."""


@dataclass
class SideBranch:
    """A side branch: the junctions where it leaves, and the leaves where it ends."""

    junctions: list[Node] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


class SplitBackward:
    """The two parts of one backward.

    Args:
        roots: The tensors at which backward starts.
        anchor: The anchor of the `GraphInput`, where the first part ends.
        unsplit: Weights whose gradients always belong to the first part.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        unsplit: Sequence[torch.Tensor] = (),
    ) -> None:
        early = {id(tensor) for tensor in unsplit}
        self._roots = list(roots)
        self._anchor = anchor
        self._kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        self._late: list[SideBranch] = []
        self._early: list[torch.Tensor] = []
        for branch in _find_branches([_get_node(root) for root in roots], _get_node(anchor)):
            if (
                len(branch.junctions) == 1
                and _is_separate(branch.junctions[0])
                and early.isdisjoint(map(id, branch.leaves))
                and not any(map(_has_hooks, branch.leaves))
            ):
                self._late.append(branch)
            else:
                self._early += branch.leaves

    def backward_inputs(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the first part, with the gradients of the roots."""
        handles = [
            branch.junctions[0].register_prehook(self._make_keeper(branch.junctions[0]))
            for branch in self._late
        ]
        try:
            inputs = [self._anchor, *dict.fromkeys(self._early)]
            torch.autograd.backward(self._roots, gradients, retain_graph=True, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()
        self._roots = []

    def backward_weights(self) -> None:
        """Run the second part, and free the graph."""
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
                # Hooks of the junction's output ran in the first part: drop their second result.
                handle = junction.register_prehook(partial(_replace, gradients))
                try:
                    torch.autograd.backward(
                        [edge for edge, _ in edges],
                        [gradient for _, gradient in edges],
                        inputs=branch.leaves,
                    )
                finally:
                    handle.remove()

    def _make_keeper(self, node: Node) -> Any:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._kept[node] = gradients

        return keep


def _replace(gradients: Any, incoming: Any) -> Any:
    return gradients


def _has_hooks(leaf: torch.Tensor) -> bool:
    """Return whether a leaf has hooks."""
    after = leaf._post_accumulate_grad_hooks
    return bool(leaf._backward_hooks) or bool(after)


def is_splittable(roots: Sequence[torch.Tensor]) -> bool:
    """Return whether the junctions of the graph below `roots` may run twice."""
    seen: set[Node] = set()
    pending = [_get_node(root) for root in roots]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if issubclass(type(node), BackwardCFunction):
            if getattr(node, "_forward_cls", None) is GraphInputFunction:
                continue
            return False
        if any(
            _has_unpack_hook(getattr(node, name)) for name in _get_saved_names(type(node), node)
        ):
            return False
        pending += [below for below, _ in node.next_functions if below is not None]
    return True


_saved: dict[type, list[str]] = {}


def _get_saved_names(kind: type, node: Node) -> list[str]:
    """Return the attributes in which a type of node keeps its saved tensors."""
    if kind not in _saved:
        _saved[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    return _saved[kind]


def _has_unpack_hook(saved: Any) -> bool:
    """Return whether a saved tensor has an unpack hook; True if that cannot be determined."""
    if isinstance(saved, (tuple, list)):
        return any(map(_has_unpack_hook, saved))
    return getattr(saved, "unpack_hook", _has_unpack_hook) is not None


def _is_separate(junction: Node) -> bool:
    """Return whether a node computes the gradients of its weights separately."""
    return junction.name().rstrip("0123456789").removesuffix("Backward") in SEPARATE


def _get_node(tensor: torch.Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _find_branches(roots: Sequence[Node], entry: Node) -> list[SideBranch]:
    """Return the side branches of the graph below `roots`; connected branches are merged."""
    leading = _find_leading_nodes(entry, roots)
    group: dict[Node, SideBranch] = {}
    branches: list[SideBranch] = []
    for junction in leading:
        branch: SideBranch | None = None
        for node, _ in junction.next_functions:
            if node is not None and node not in leading:
                branch = _explore(node, branch, group, branches)
        if branch is not None and junction not in branch.junctions:
            branch.junctions.append(junction)
    for root in roots:
        if root not in leading:  # it depends on weights only, so it is itself the junction
            branch = _explore(root, None, group, branches)
            branch.junctions += [root, root]
    return branches


def _explore(
    start: Node,
    branch: SideBranch | None,
    group: dict[Node, SideBranch],
    branches: list[SideBranch],
) -> SideBranch:
    """Add `start` and the nodes below it to `branch`; merge branches that share a node."""
    if branch is None:
        branch = SideBranch()
        branches.append(branch)
    pending = [start]
    while pending:
        node = pending.pop()
        other = group.get(node)
        if other is branch:
            continue
        if other is not None:
            branch.junctions += other.junctions
            branch.leaves += other.leaves
            branches.remove(other)
            for member, owner in group.items():
                if owner is other:
                    group[member] = branch
            continue
        group[node] = branch
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            branch.leaves.append(leaf)
        pending += [member for member, _ in node.next_functions if member is not None]
    return branch


def _find_leading_nodes(entry: Node, roots: Sequence[Node]) -> dict[Node, None]:
    """Return the nodes below `roots` that lead to `entry`, including `entry` itself."""
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


# --- the input of the graph ----------------------------------------------------------------------


class GraphInput:
    """The received tensors of one micro-batch; `tensors` are those that the blocks use."""

    def __init__(self, received: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * sum(requires_grad)
        self.anchor: torch.Tensor | None = None
        self.tensors = list(received)
        if not any(requires_grad):
            return
        self.anchor = torch.empty(0, requires_grad=True)
        wanted = [number for number, needed in enumerate(requires_grad) if needed]
        entered: Any = GraphInputFunction.apply(  # type: ignore[no-untyped-call]
            self.anchor, self, [self.tensors[number] for number in wanted]
        )
        for number, tensor in zip(wanted, entered, strict=True):
            self.tensors[number] = tensor

    def free(self) -> None:
        """Release the tensors; autograd keeps those that the backward needs."""
        self.tensors = []


class GraphInputFunction(torch.autograd.Function):
    """Gives tensors a grad_fn. They are not inputs of the function, so its outputs are no views."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graph_input: GraphInput, tensors: Any) -> Any:
        """Return the tensors, which are not the function's own inputs."""
        ctx.graph_input = graph_input
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Keep the gradients."""
        ctx.graph_input.gradients = list(gradients)
        return None, None, None
