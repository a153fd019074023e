"""The divergence of `lockstep bisect`, derived from fingerprints and operators by pure functions.

fingerprints of both runs   ── find_in_modules ──>   step, micro-batch, module, parameter
operators of that step      ── add_operator ─────>   direction, operator, line
tensors of that operator    ── element ──────────>   first differing element
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.audit.operator_call import OperatorCall
from lockstep.audit.operator_difference import OperatorDifference
from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.tools.check.difference import (
    LayoutDifference,
    RankFingerprint,
    describe_kind,
    first_difference,
)
from lockstep.tools.replay.element_difference import ElementDifference
from lockstep.tools.replay.record_difference import RecordDifference

__all__ = [
    "Direction",
    "Divergence",
    "OperandLocation",
    "add_operator",
    "compare_microbatches",
    "find_in_modules",
    "find_in_records",
    "locate_tensor",
]

Direction = Literal["data", "state", "forward", "backward", "reduction", "optimizer"]
"""Where a difference arises: the data of a step, the state before it, or a phase of the step."""

DIRECTIONS: dict[str, Direction] = {
    "initial": "state", "between": "state", "data": "data", "input": "forward",
    "output": "forward", "forward": "forward", "loss": "forward", "missing": "forward",
    "gradient": "backward", "update": "optimizer", "buffer": "forward",
    "state": "optimizer", "digest": "state",
}  # fmt: skip

AFTER_FORWARD = ("gradient", "update", "buffer", "state", "digest")
"""Kinds of differences that arise after all micro-batches."""

NO_MODULE = ("data", "loss", "optimizer", "script")
"""Values of `LayoutDifference.module` that name no module."""


BEFORE_OPERATORS = ("initial", "between", "data", "missing", "steps")
"""Kinds of differences that no operator of the step made."""


@dataclass(frozen=True)
class OperandLocation:
    """A tensor of one operator in both runs.

    Attributes:
        a: The index of the call in the first run.
        b: The index of the call in the second run.
        is_input: Whether it is an input of the call, not an output.
        position: Its index among these inputs or outputs.
    """

    a: int
    b: int
    is_input: bool
    position: int

    def types(self, a: Sequence[OperatorCall], b: Sequence[OperatorCall]) -> str | None:
        """Return dtype and shape of the tensor; None if they differ or there is no such tensor."""
        known = []
        for call in (a[self.a], b[self.b]):
            types = call.input_types if self.is_input else call.output_types
            known += [description.rpartition(": ")[2] for description in types[self.position :][:1]]
        return known[0] if len(known) == 2 and known[0] == known[1] else None


@dataclass(frozen=True)
class Divergence:
    """The first difference between two runs.

    Attributes:
        step: The step in which it arises; 0 for the initial state.
        direction: Where it arises; None if that cannot be known.
        what: The kind of the difference, in a word: as in `lockstep.tools.check.difference`, or
            the kind of an operator's difference.
        sentence: A sentence that says what differs, without a full stop.
        microbatch: The lowest micro-batch that differs; None if no micro-batch is concerned.
        unit: The module, by its dotted name; None if no module is concerned.
        parameter: The parameter or buffer; None if none is concerned.
        a: The operator in the first run; None if there is none.
        b: The operator in the second run; None if there is none.
        element: The first element that differs; None if no two elements can be compared.
    """

    step: int
    direction: Direction | None
    what: str
    sentence: str
    microbatch: int | None = None
    unit: str | None = None
    parameter: str | None = None
    a: OperatorCall | None = None
    b: OperatorCall | None = None
    element: ElementDifference | None = None

    @property
    def operator(self) -> str | None:
        """The name of the operator; None if no operator made the difference."""
        call = self.a or self.b
        return None if call is None or self.what == "input" else call.operator

    @property
    def source(self) -> str | None:
        """The line of the user's program, such as "train.py:31 in forward"."""
        lines = [call.source for call in (self.a, self.b) if call is not None and call.source]
        return lines[0] if lines else None


def find_in_modules(a: StepFingerprint, b: StepFingerprint) -> Divergence | None:
    """Return the first difference between the same step of two runs, each on one rank."""
    parameters = tuple(dict.fromkeys((*a.gradients, *b.gradients)))
    ours, theirs = (_rank(step, parameters) for step in (a, b))
    difference = first_difference([ours], [theirs], is_complete=False)
    alone = a.losses.keys() ^ b.losses.keys()
    if alone and (difference is None or difference.what in AFTER_FORWARD):
        difference = LayoutDifference("script", None, "missing", min(alone), step=a.step)
    if difference is None:
        return None
    owner = (difference.parameter or "").rpartition(".")[0] or None
    divergence = Divergence(
        step=difference.step,
        direction=DIRECTIONS.get(difference.what),
        what=difference.what,
        sentence=describe_kind(difference),
        microbatch=difference.microbatch,
        unit=owner if difference.module in NO_MODULE else difference.module,
        parameter=difference.parameter,
    )
    return divergence if difference.what != "gradient" else _locate_gradient(divergence, a, b)


def find_in_records(recorded: RecordDifference | None, first: int, last: int) -> Divergence:
    """Return the divergence that two records alone show, without a replay.

    Args:
        recorded: The first step that differs; None if only digests do.
        first: The first of the steps among which the difference arises.
        last: The last of them.
    """
    if recorded is None or recorded.step > last:
        where = f"in one of the steps {first} to {last}" if first < last else f"in step {last}"
        sentence = f"the digests after step {last} differ, and the change came {where}"
        return Divergence(last, None, "digest", sentence)
    if recorded.what == "batch":
        return Divergence(recorded.step, "data", "data", "the batch has other samples")
    number = f" {recorded.microbatch}" if recorded.microbatch is not None else ""
    sentence = (
        f"the {recorded.what}{number} is {recorded.a} in the first run and {recorded.b} in the "
        "second"
    )
    if recorded.what == "norm":
        sentence = f"the losses agree, and {sentence}"
    what = "norm" if recorded.what == "norm" else "loss"
    return Divergence(recorded.step, None, what, sentence, recorded.microbatch)


def compare_microbatches(
    a: int | None, b: int | None, recorded: RecordDifference | None
) -> Divergence:
    """Return the divergence about runs with unequal numbers of micro-batches.

    Args:
        a: The number of micro-batches of the first run.
        b: The number of micro-batches of the second run.
        recorded: The first step that differs; None if no step does.
    """
    has_other_samples = recorded is not None and recorded.what == "batch"
    return Divergence(
        0 if recorded is None else recorded.step,
        "data" if has_other_samples else None,
        "microbatches",
        f"the first run splits its batches into {a} micro-batches and the second into {b}, so the "
        "order of additions differs from the first step on",
    )


def _locate_gradient(divergence: Divergence, a: StepFingerprint, b: StepFingerprint) -> Divergence:
    """Add the micro-batch and the module to a divergence about a gradient."""
    for microbatch, gradients in sorted(a.leaf_gradients.items()):
        before = None  # the module whose backward ran last
        theirs = b.backward.get(microbatch, {})
        for key, value in a.backward.get(microbatch, {}).items():
            if theirs.get(key, value) != value:
                return replace(divergence, microbatch=microbatch, unit=before, parameter=None)
            before = key[0]
        other = b.leaf_gradients.get(microbatch, {})
        for name in reversed(gradients):
            if other.get(name) != gradients[name]:
                owner = name.rpartition(".")[0] or None
                return replace(divergence, microbatch=microbatch, unit=owner, parameter=name)
    sentence = (
        f"the sum of the gradients of `{divergence.parameter}` differs, although those of all "
        "micro-batches agree"
    )
    return replace(divergence, direction="reduction", sentence=sentence)


def _rank(step: StepFingerprint, parameters: tuple[str, ...]) -> RankFingerprint:
    """Return the fingerprint of a rank, from a step of one trainer."""
    initial = step.before if step.step == 0 else {}
    trainer = TrainerFingerprint("model", "", parameters, initial)
    return RankFingerprint([trainer], [replace(step, trainer=0)])


def add_operator(
    divergence: Divergence,
    difference: OperatorDifference,
    a: Sequence[OperatorCall],
    b: Sequence[OperatorCall],
) -> Divergence:
    """Add the operator that made the difference to a divergence.

    Args:
        divergence: The difference between the modules.
        difference: The difference between the operators of the same step.
        a: All operators of the step in the first run.
        b: All operators of the step in the second run.
    """
    ours = None if difference.a is None else a[difference.a]
    theirs = None if difference.b is None else b[difference.b]
    call = ours or theirs
    assert call is not None, "a difference is about an operator"
    if divergence.what in BEFORE_OPERATORS or call.operator == "data":
        return divergence
    names = [side.operator for side in (ours, theirs) if side is not None]
    arguments = [side.arguments for side in (ours, theirs) if side is not None]
    only = "second" if ours is None else "first"
    sentences = {
        "output": f"{names[0]} computes a different result from the same inputs",
        "arguments": f"{names[0]} is called with different arguments: {' and '.join(arguments)}",
        "generator": f"{names[0]} draws different random numbers, because the generator is in a "
        "different state before the call",
        "call": f"{names[0]} is called in the {only} run only",
        "input": f"{names[0]} reads a value that no operator of the step wrote: it was made before "
        "the step, or from outside of torch (by numpy, an extension, or a fault of the machine)",
    }
    if not call.inputs:
        sentences["output"] = (
            f"{names[0]} creates a tensor with different values (numbers in the source, or an "
            "array)"
        )
    if difference.kind == "call" and len(names) == 2:
        sentences["call"] = f"the first run calls {names[0]}, and the second {names[1]}"
    is_input = difference.kind == "input"
    return replace(
        divergence,
        what=difference.kind,
        sentence=sentences[difference.kind],
        direction=_direction(divergence, call) if is_input else call.phase,
        microbatch=call.microbatch if call.microbatch is not None else divergence.microbatch,
        unit=(divergence.unit or call.unit if is_input else call.unit or divergence.unit) or None,
        parameter=divergence.parameter if call.phase == "optimizer" or is_input else None,
        a=ours,
        b=theirs,
    )


def _direction(divergence: Divergence, reader: OperatorCall) -> Direction | None:
    """Return the direction of a value that no operator wrote before `reader` read it."""
    if divergence.what == "gradient" and reader.phase == "optimizer":
        return "reduction"
    return divergence.direction if divergence.direction == "forward" else reader.phase


def locate_tensor(
    divergence: Divergence,
    difference: OperatorDifference | None,
    a: Sequence[OperatorCall],
    b: Sequence[OperatorCall],
) -> OperandLocation | None:
    """Return the operator call at which a replay can compare the tensors of a divergence.

    Args:
        divergence: The divergence.
        difference: The difference between the operators of the step; None if they agree.
        a: All operators of the step in the first run.
        b: All operators of the step in the second run.

    Returns:
        The place; None if the two runs have no tensors of equal dtype and shape there.
    """
    operand = None
    if divergence.what in ("initial", "between"):
        operand = _reader_of(divergence.parameter, a, b)
    elif difference is not None and difference.a is not None and difference.b is not None:
        is_input = difference.kind == "input"
        position = difference.position or 0
        operand = OperandLocation(difference.a, difference.b, is_input, position)
    if operand is None or operand.types(a, b) is None:
        return None
    return operand


def _reader_of(
    parameter: str | None, a: Sequence[OperatorCall], b: Sequence[OperatorCall]
) -> OperandLocation | None:
    """Return the first call that takes a parameter or buffer itself as input."""
    readers = []
    for calls in (a, b):
        for index, call in enumerate(calls):
            names = [types.partition(": ")[0] for types in call.input_types]
            if parameter in names:
                readers.append((index, names.index(parameter)))
                break
    if len(readers) < 2 or readers[0][1] != readers[1][1]:
        return None
    return OperandLocation(readers[0][0], readers[1][0], True, readers[0][1])
