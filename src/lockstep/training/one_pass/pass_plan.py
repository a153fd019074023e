"""Which operators of a pass over several micro-batches are called for each of them.

    one micro-batch            x (8, 64)       x @ w (8, 10)       grad.t() @ x (10, 64)
    four of them together      x (32, 64)      x @ w (32, 10)      grad.t() @ x (10, 64)
                               rows            rows                shared: adds up rows

The operators of both passes are recorded, and compared one by one (`call_comparison.py`). What
depends on several of them is decided here: which tensors are memory as it is, in which order rows
alternate, and which gradients of parameters are kept for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, TypeAlias

import torch

from lockstep.training.one_pass.call_comparison import (
    CHANGES,
    CallComparison,
    CannotJoin,
    NotedCall,
    Slices,
    UnknownOrder,
    has_tensors,
    list_tensors,
)
from lockstep.training.one_pass.pass_operators import UNSET, VIEWS

__all__ = ["PlannedCalls", "count_bytes", "plan_pass"]

MOST_PARTS = 128 << 20
"""The bytes of gradients that are kept for all micro-batches."""


PlannedCalls: TypeAlias = list[tuple[str, str, Any, Any]]
"""Operators to call for the rows of each micro-batch, as arguments of `SegmentedCalls`."""


def plan_pass(
    alone: Sequence[NotedCall],
    joined: Sequence[NotedCall],
    segments: int,
    samples: int,
    make_rule: Callable[..., Any],
    orders: Iterable[tuple[int, int]] | None = None,
) -> PlannedCalls:
    """Return what a forward or backward pass over several micro-batches has to call.

    Args:
        alone: The pass over one micro-batch.
        joined: That over all micro-batches.
        segments: The number of micro-batches.
        samples: The number of samples of each of them.
        make_rule: Makes a rule of the native module from `Slices`.
        orders: Of a backward pass, the numbers of rows in the forward pass, and of the turns in
            which these alternate; negative numbers if they are equal, or mixed.

    Raises:
        CannotJoin: An operator couples samples, or its results depend on their position.
    """
    for first, second in zip(alone, joined, strict=False):
        if first.values is None or second.values is None:
            raise CannotJoin(f"{first.name} gets a tensor subclass, as in a compiled function")
        if first[:2] != second[:2]:
            raise CannotJoin(f"other operators follow {first.name}")
    if len(alone) != len(joined):
        raise CannotJoin("other operators are called for several micro-batches")
    is_backward = orders is not None
    comparisons = [CallComparison(*pair, segments) for pair in zip(alone, joined, strict=True)]
    unset = _list_unset(joined)
    rules = [
        comparison.find_slices(is_backward=is_backward, is_unset=number in unset)
        for number, comparison in enumerate(comparisons)
    ]
    _refuse_positions(joined, comparisons)
    if orders is not None:
        shared = [comparison.list_shared() for comparison in comparisons]
        rules = _find_turns(joined, rules, segments, samples, {*orders})
        rules = _keep_parts(joined, rules, shared, segments)
    return [
        (call.name, call.overload, rule and make_rule(*rule), call.values)
        for call, rule in zip(joined, rules, strict=True)
    ]


def _list_unset(calls: Sequence[NotedCall]) -> set[int]:
    """Return the calls that return memory as it is, or positions, and those that copy these."""
    return _with_copies(calls, {n for n, call in enumerate(calls) if call.kind in UNSET})


def _with_copies(calls: Sequence[NotedCall], numbers: set[int]) -> set[int]:
    """Return the numbers of calls, and of those that copy what these return."""
    found = {*numbers}
    for number, call in enumerate(calls):
        is_copy = call.kind in VIEWS or call.kind in ("to", "_to_copy")
        if is_copy and call.sources and found.issuperset(call.sources):
            found.add(number)
    return found


def _refuse_positions(calls: Sequence[NotedCall], comparisons: Sequence[CallComparison]) -> None:
    """Raise CannotJoin if the positions of samples are used as numbers, maybe without effect yet.

    Those of a micro-batch begin at 0 in a separate pass. An operator that finds rows by them may
    use them.
    """
    pairs = enumerate(zip(calls, comparisons, strict=True))
    made = {n for n, (call, compared) in pairs if call.kind == "arange" and compared.has_rows}
    positions = _with_copies(calls, made)
    for number, call in enumerate(calls):
        is_used = number not in positions and not positions.isdisjoint(call.sources)
        if is_used and call.is_pointwise:
            raise CannotJoin(f"{call.name} computes with the positions of all samples")


def _find_turns(
    calls: Sequence[NotedCall],
    rules: Sequence[Slices | None],
    segments: int,
    samples: int,
    orders: Set[tuple[int, int]],
) -> list[Slices | None]:
    """Return the rules with the turns in which the rows of micro-batches alternate.

    Several numbers of turns fit where all elements are equal, such as zeros. There is one turn only
    if no tensor of the forward pass has other rows than the samples.

    Raises:
        UnknownOrder: The numbers are not known.
    """
    usual = (samples * segments, 1)
    completed: list[Slices | None] = []
    for call, rule in zip(calls, rules, strict=True):
        if rule is None or not rule.tensors or rule.draws or not call.turns:
            completed.append(rule)
            continue
        tensors = list_tensors(call.arguments)
        counts = {tensors[n].sizes[dimension] for n, dimension in rule.tensors}
        fitting = set.intersection(*(set(call.turns[n]) for n, _ in rule.tensors))
        if len(counts) > 1:
            completed.append(rule)
            continue
        if len(fitting) > 1:
            is_usual = counts == {usual[0]} and orders <= {usual}
            fitting = fitting & {1} if is_usual else set()
        if len(fitting) != 1:
            raise UnknownOrder("the order of the rows in the backward pass is not known")
        completed.append(rule._replace(turns=min(fitting)))
    return completed


def _keep_parts(
    calls: Sequence[NotedCall],
    rules: Sequence[Slices | None],
    shared: Sequence[set[int] | None],
    segments: int,
) -> list[Slices | None]:
    """Return the rules by which gradients of parameters that are changed are kept in parts.

    A parameter that is used twice has the sum of two gradients. They are added for each
    micro-batch, as in separate passes.

    Args:
        calls: The calls of the backward pass.
        rules: How they are called for each micro-batch.
        shared: For each call with rows, also of one that is called once, the calls that have
            returned its tensors without rows; None for a call without rows.
        segments: The number of micro-batches.

    Raises:
        CannotJoin: It is not known which gradients are changed, or they take too much memory.
    """
    sources = [{n for n in call.sources if n >= 0} for call in calls]
    has_rows = [numbers is not None for numbers in shared]
    derived: set[int] = set()  # the calls that return gradients of parameters
    for number, rule in enumerate(rules):
        is_sum = rule is not None and -1 in rule.results
        if (shared[number] or set()) & derived:
            raise CannotJoin(f"{calls[number].name} uses the gradient of a parameter for samples")
        if not is_sum and (has_rows[number] or not sources[number] & derived):
            continue
        derived.add(number)
        if not any(map(has_tensors, calls[number].results)):
            raise CannotJoin(f"{calls[number].name} reads the gradient of a parameter")
    kept: set[int] = set()
    completed = [*rules]
    for number, rule in enumerate(rules):
        if rule is CHANGES and number in derived:
            kept.add(number)
        elif rule is CHANGES:  # the same for all micro-batches, such as the square of a weight
            completed[number] = None
            if _writes(calls[number]):
                raise CannotJoin(f"{calls[number].name} changes the gradient of a parameter")
    count = -1
    while count != len(kept):  # until both what they come from and what comes from them is kept
        count = len(kept)
        for number in [*kept]:
            kept |= sources[number] & derived
        kept |= {number for number in derived if sources[number] & kept and not has_rows[number]}
    size = 0
    for number, rule in enumerate(rules):
        if number not in kept:
            continue
        size += count_bytes([calls[number]])
        is_sum = rule is not None and has_rows[number]
        completed[number] = rule._replace(keeps_parts=True) if rule and is_sum else CHANGES
    if size * segments > MOST_PARTS:
        raise CannotJoin("the gradients of parameters that are used twice take too much memory")
    return completed


def _writes(call: NotedCall) -> bool:
    """Return whether an operator writes one of its arguments."""
    arguments = torch._C._get_schema(call.name, call.overload).arguments
    return any(one.alias_info is not None and one.alias_info.is_write for one in arguments)


def count_bytes(calls: Sequence[NotedCall]) -> int:
    """Return about how many bytes a forward pass keeps for its backward pass."""
    return sum(
        torch.Size(tensor.sizes).numel() * tensor.element_size
        for call in calls
        if call.kind not in VIEWS
        for tensor in list_tensors(call.results)
    )
