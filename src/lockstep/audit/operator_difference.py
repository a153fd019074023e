"""The operator that made two computations of a step differ, found by a pure comparison of calls.

    a   mm    relu   mul   sum       equal inputs, arguments and generator; other outputs:
    b   mm    relu   mul   sum       this operator computed another result
              ────
    a   mm    relu   mul   sum       an operator that only one side called, and through which
    b   mm    gelu   mul   sum       came the values that a later operator got
              ────
    a   mm    relu   mul   sum       inputs differ, and no operator wrote them: parameters, data, or
    b   mm    relu   mul   sum       memory that was written from outside
                     ───

Both sequences are walked in parallel. A constant that the program makes only counts as a
difference if an operator with another result reads it. Memory that was only written in part has no
checksum; a call that reads it is explained by the calls that wrote to it. Operators that differ
without effect on a later one, such as those of a message that only one side prints, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from lockstep.audit.operator_call import OperatorCall

__all__ = ["OperatorDifference", "first_operator_difference", "is_constant"]


@dataclass(frozen=True)
class OperatorDifference:
    """The first place at which two computations of a step differ.

    Attributes:
        kind: "output": another result, and equal inputs as far as these are known.
            "arguments": another result, because of other arguments that are not tensors.
            "generator": random numbers from another state of the generator. "call": an operator
            that only one side called, or another one in its place. "input": a value that no
            recorded operator wrote.
        a: The index of the call in the first sequence; None if it has none.
        b: The index of the call in the second sequence; None if it has none.
        position: The index of the first output that differs, or of the first input for "input";
            None for "call".
    """

    kind: Literal["output", "arguments", "generator", "call", "input"]
    a: int | None
    b: int | None
    position: int | None = None


def first_operator_difference(
    a: Sequence[OperatorCall], b: Sequence[OperatorCall]
) -> OperatorDifference | None:
    """Return the operator that made the first difference between two sequences of calls.

    Args:
        a: All calls of one computation of a step, in order.
        b: All calls of another computation of the same step, in order.

    Returns:
        The difference; None if no operator that both sides called has another result, and no
        operator that only one side called wrote to the model or belongs to the optimizer.
    """
    sides = _Side(a), _Side(b)
    for i, j in _pairs(a, b):
        if i is None or j is None:
            for side, index in zip(sides, (i, j), strict=True):
                side.alone |= set() if index is None else {index}
            continue
        for side, index, other in zip(sides, (i, j), (j, i), strict=True):
            side.partners[index] = other
        if _first_unequal(a[i].outputs, b[j].outputs) is None:
            continue
        if is_constant(a[i]):  # only matters if an operator with another result reads it
            for side, index in zip(sides, (i, j), strict=True):
                side.constants.add(index)
            continue
        return _explain(i, j, *sides)
    for side, is_first in zip(sides, (True, False), strict=True):
        for index in sorted(side.alone):
            if _has_effect(side.calls[index]):
                return OperatorDifference("call", *((index, None) if is_first else (None, index)))
    return None


@dataclass
class _Side:
    """One sequence of calls, and the knowledge about the calls walked so far.

    Attributes:
        calls: The calls.
        alone: The indices of calls that the other side does not have.
        partners: For every other call, the index of the same call on the other side.
        constants: The indices of constants that have other values on the other side.
    """

    calls: Sequence[OperatorCall]
    alone: set[int] = field(default_factory=set)
    partners: dict[int, int] = field(default_factory=dict)
    constants: set[int] = field(default_factory=set)

    def values(self) -> set[int]:
        """Return the checksums of all inputs and outputs."""
        return {value for call in self.calls for value in (*call.inputs, *call.outputs)}

    def origins(self, index: int, known: set[int]) -> set[int]:
        """Return the calls that may have made unknown inputs of a call.

        These are calls and constants that the other side does not have, and calls that both sides
        have but whose checksums do not cover all that they wrote (views, partial writes).
        """
        origins: set[int] = set()
        pending = [index]
        while pending:
            call = self.calls[pending.pop()]
            unknown = {
                producer
                for value, producer in zip(call.inputs, call.producers, strict=True)
                if value == 0 or value not in known
            }
            for producer in {*unknown, *call.earlier} - origins - {-1}:
                if self._may_differ(producer):
                    origins.add(producer)
                    pending.append(producer)
        return origins

    def _may_differ(self, index: int) -> bool:
        """Return whether a call can differ from its partner although their outputs agree."""
        call = self.calls[index]
        is_incomplete = not all(call.outputs) or not call.outputs or bool(call.earlier)
        return is_incomplete or index in self.alone or index in self.constants

    def first(self, some: set[int]) -> int | None:
        """Return the first of some calls, preferably of those that compute something."""
        computing = {index for index in some if self.calls[index].outputs}
        return min(computing or some, default=None)


def _explain(i: int, j: int, a: _Side, b: _Side) -> OperatorDifference:
    """Return why a call that both sides have has another result."""
    left = a.calls[i]
    right = b.calls[j]
    position = _first_unequal(left.outputs, right.outputs)
    changed = _first_unequal(left.inputs, right.inputs)
    if changed is None and left.generator[0] != right.generator[0]:
        drawn = [
            max((index for index in side.alone if any(side.calls[index].generator)), default=None)
            for side in (a, b)
        ]
        if drawn != [None, None]:
            return OperatorDifference("call", *drawn)
        return OperatorDifference("generator", i, j, position)
    if changed is not None or 0 in (*left.inputs, *right.inputs):
        origin = _find_origin(a, a.origins(i, b.values()), b, b.origins(j, a.values()))
        if origin is not None:
            return origin
    if changed is not None:
        return OperatorDifference("input", i, j, changed)
    if left.arguments != right.arguments:
        return OperatorDifference("arguments", i, j, position)
    return OperatorDifference("output", i, j, position)


def _find_origin(
    a: _Side, behind_a: set[int], b: _Side, behind_b: set[int]
) -> OperatorDifference | None:
    """Return the earlier call that made the inputs of a call differ; None if no call did.

    Args:
        a: The first side.
        behind_a: The calls of the first side that may have made the inputs.
        b: The second side.
        behind_b: The calls of the second side that may have made the inputs.
    """
    alone = a.first(behind_a & a.alone), b.first(behind_b & b.alone)
    if alone != (None, None):
        return OperatorDifference("call", *alone)
    for constant in sorted(behind_a & a.constants):
        return OperatorDifference("output", constant, a.partners[constant], 0)
    for index in sorted(behind_a):
        left = a.calls[index]
        right = b.calls[a.partners[index]]
        if left.arguments != right.arguments:
            return OperatorDifference("arguments", index, a.partners[index])
    for index in sorted(behind_a):
        changed = _first_unequal(a.calls[index].inputs, b.calls[a.partners[index]].inputs)
        if changed is not None:
            return OperatorDifference("input", index, a.partners[index], changed)
    return None


def is_constant(call: OperatorCall) -> bool:
    """Return whether a call makes a tensor from values that come from outside torch."""
    is_made_from_nothing = not (call.inputs or call.arguments or any(call.generator))
    return is_made_from_nothing and call.phase != "data"


def _has_effect(call: OperatorCall) -> bool:
    """Return whether a call of one side alone changes the model or the optimizer's state."""
    writes_model = any(": " in types for types in call.output_types) and bool(call.outputs)
    return writes_model or (call.phase == "optimizer" and bool(call.outputs))


def _first_unequal(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position where two sequences differ; None if they are equal.

    A checksum of 0 is unknown, and counts as equal.
    """
    if a == b:
        return None
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right and left and right:
            return position
    return min(len(a), len(b)) if len(a) != len(b) else None


# --- which calls correspond ----------------------------------------------------------------------

Pair = tuple[int | None, int | None]
CallKey = Callable[[OperatorCall], Hashable]

KEYS: tuple[CallKey, ...] = (
    lambda call: (_find_place(call), call.arguments, call.inputs, call.outputs),
    lambda call: (_find_place(call), call.arguments, call.inputs),
    lambda call: (_find_place(call), call.arguments),
    lambda call: _find_place(call),
)
"""The properties in which corresponding calls are equal: as many as possible."""


def _find_place(call: OperatorCall) -> Hashable:
    return call.phase, call.microbatch, call.unit, call.operator


def _pairs(
    a: Sequence[OperatorCall],
    b: Sequence[OperatorCall],
    begin: tuple[int, int] = (0, 0),
    keys: Sequence[CallKey] = KEYS,
) -> Iterator[Pair]:
    """Yield the indices of corresponding calls, in order; None for a call of one side alone.

    Args:
        a: The first calls.
        b: The second calls.
        begin: The indices of the first call of each side.
        keys: What corresponding calls have in common. Where it differs, the next one decides.
    """
    key, *others = keys
    matcher = SequenceMatcher(None, [*map(key, a)], [*map(key, b)], autojunk=False)
    for tag, begin_a, end_a, begin_b, end_b in matcher.get_opcodes():
        first = begin[0] + begin_a, begin[1] + begin_b
        if tag == "equal":
            yield from ((first[0] + n, first[1] + n) for n in range(end_a - begin_a))
        elif tag == "replace" and others:
            yield from _pairs(a[begin_a:end_a], b[begin_b:end_b], first, others)
        else:
            yield from ((first[0] + n, None) for n in range(end_a - begin_a))
            yield from ((None, first[1] + n) for n in range(end_b - begin_b))
