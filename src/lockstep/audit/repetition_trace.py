"""Why two computations of a micro-batch differ: their operators, and what they left behind.

An operator that gets the same values on both sides and returns others is faulty, or draws from a
generator of its own. If its inputs differ, and no operator wrote them, they come from outside: an
attribute, a global name, a closure. What has changed there between the two is named.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lockstep.audit.operator_call import OperatorCall
from lockstep.audit.operator_difference import (
    OperatorDifference,
    first_operator_difference,
    is_constant,
)
from lockstep.audit.operator_tracer import OperatorTracer
from lockstep.audit.verdict import Evidence, describe_difference
from lockstep.model.call_site import class_name
from lockstep.model.python_state import find_python_state

__all__ = [
    "RepetitionTrace",
    "StateWatch",
    "TraceDifference",
    "find_trace_difference",
    "read_changes",
]

TORCHS = ("aten.", "prims.")
"""The namespaces of torch's own operators, which are deterministic in a step."""


class StateWatch:
    """Objects to which the modules of a step refer in Python, compared between two moments.

    Args:
        modules: The modules, by name; the name of the model is "".
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        kinds = {name or class_name(module): module for name, module in modules.items()}
        self._states = [find_python_state(module, name) for name, module in kinds.items()]
        self._before: list[Mapping[Any, Any]] = []

    def begin(self) -> None:
        """Note the first moment."""
        self._before = [state.snapshot() for state in self._states]

    def list_changes(self) -> list[str]:
        """Return the names of what has changed since; none if there was no first moment."""
        pairs = zip(self._states, self._before, strict=False)
        return [name for state, before in pairs for name in state.list_changes(before)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the attributes that were assigned since; keep the body's own assignments."""
        with ExitStack() as stack:
            for state, before in zip(self._states, self._before, strict=True):
                stack.enter_context(state.restore_assigned(state.find_assigned(before)))
            yield


class RepetitionTrace:
    """The operators of a micro-batch, in its turn and once more after the others.

    Args:
        modules: The modules that a step calls, by name; the name of the model is "".
        position: A function that returns the micro-batch and the stage being computed.
        watch: What the modules referred to in its turn; None: `note_turn` will be called.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        position: Callable[[], tuple[int, int] | None],
        watch: StateWatch | None = None,
    ) -> None:
        self._modules = modules
        self._position = position
        self._tracers: list[OperatorTracer] = []
        self._watch = watch or StateWatch(modules)
        self._changed: list[str] = []

    def note_turn(self) -> None:
        """Note what the modules refer to, when the micro-batch begins in its turn."""
        self._watch.begin()

    @contextmanager
    def recording(self, microbatch: int | None = None) -> Iterator[None]:
        """Record the operators of the body: all, or those of the repetition of a micro-batch."""
        self._changed = self._watch.list_changes()
        tracer = OperatorTracer(self._modules)
        self._tracers.append(tracer)
        position = self._position if microbatch is None else lambda: (microbatch, 0)
        with tracer.tracing("forward", position):
            yield

    def encode(self, microbatch: int) -> bytes:
        """Return the calls in both computations, and what has changed meanwhile, to send."""
        runs = [_select(tracer.calls, microbatch) for tracer in self._tracers]
        return pickle.dumps((runs, self._changed))


def _select(calls: Sequence[OperatorCall], microbatch: int) -> list[OperatorCall]:
    """Return the calls of one micro-batch, before its gradients are added to others."""
    chosen = [
        index
        for index, call in enumerate(calls)
        if call.microbatch == microbatch and call.phase != "reduction"
    ]
    numbers = {index: number for number, index in enumerate(chosen)}
    return [
        replace(
            calls[index],
            producers=tuple(numbers.get(producer, -1) for producer in calls[index].producers),
            earlier=tuple(numbers[one] for one in calls[index].earlier if one in numbers),
        )
        for index in chosen
    ]


@dataclass(frozen=True)
class TraceDifference:
    """The operator that made two computations differ.

    Attributes:
        evidence: What it says about the cause.
        module: The module that called it; None outside of modules.
        operator: Its name; None if no operator was found.
        source: The line of the user's program.
    """

    evidence: Evidence
    module: str | None
    operator: str | None
    source: str

    @property
    def where(self) -> str:
        """The operator, its module and its line, for messages; "" if there is none."""
        if self.operator is None:
            return ""
        return describe_difference(self.operator, self.module, self.source)


NOTHING = TraceDifference("none", None, None, "")
"""No operator with another result was found."""


def find_trace_difference(owner: bytes, repeater: bytes) -> TraceDifference:
    """Return the operator that made the owner's computations differ, or those of two ranks."""
    runs: list[list[OperatorCall]] = [*pickle.loads(owner)[0], *pickle.loads(repeater)[0][1:]]
    first, *others = runs
    for other in others:
        difference = first_operator_difference(first, other)
        if difference is None:
            continue
        call = first[difference.a] if difference.a is not None else other[difference.b or 0]
        evidence = _weigh(difference, call)
        return TraceDifference(evidence, call.unit or None, call.operator, call.source)
    return NOTHING


def _weigh(difference: OperatorDifference, call: OperatorCall) -> Evidence:
    """Return what a difference between two calls of an operator says about its cause."""
    # Other values that the program made, as in torch.tensor(self.count), are no result.
    if difference.kind != "output" or is_constant(call):
        return "program"
    # An operator that may draw random numbers got the same state of the generator: otherwise the
    # difference is of the kind "generator".
    is_torchs = call.operator.startswith(TORCHS)
    is_known = all(call.inputs) and not call.is_opaque
    return "processor" if is_torchs and is_known else "either"


def read_changes(encoded: bytes) -> list[str]:
    """Return the names of what has changed in Python, from `RepetitionTrace.encode`."""
    changed: list[str] = pickle.loads(encoded)[1]
    return changed
