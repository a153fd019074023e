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
from lockstep.audit.operator_difference import first_operator_difference
from lockstep.audit.operator_tracer import OperatorTracer
from lockstep.model.call_site import class_name
from lockstep.pipeline.python_state import find_python_state

__all__ = [
    "RepetitionTrace",
    "StateWatch",
    "TraceDifference",
    "explain_state",
    "find_difference",
    "join_names",
]

LISTED = 3
"""The number of changed attributes that a message names."""

ADVICE = (
    "register a buffer for what forward keeps, with a rule in lockstep_buffer_rules; draw from "
    "torch's default generator, which is seeded for each micro-batch; or pass audit=False to train "
    "with bits that depend on the layout"
)


class StateWatch:
    """What the modules of a step refer to in Python, compared between two moments.

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
        self._modules, self._position = modules, position
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
        is_fault: Whether it got the same values both times.
        module: The module that called it; None outside of modules.
        operator: Its name.
        source: The line of the user's program.
    """

    is_fault: bool
    module: str | None
    operator: str
    source: str

    @property
    def where(self) -> str:
        """The operator, its module and its line, for messages."""
        module = "" if self.module is None else f" of {self.module}"
        line = f" ({self.source})" if self.source else ""
        return f", first in {self.operator}{module}{line}"


def find_difference(owner: bytes, repeater: bytes) -> TraceDifference | None:
    """Return the operator that made the owner's computations differ, or those of two ranks."""
    runs: list[list[OperatorCall]] = [*pickle.loads(owner)[0], *pickle.loads(repeater)[0][1:]]
    first, *others = runs
    for other in others:
        if (difference := first_operator_difference(first, other)) is None:
            continue
        call = first[difference.a] if difference.a is not None else other[difference.b or 0]
        return TraceDifference(
            difference.kind == "output" and call.generator == (0, 0),
            call.unit or None,
            call.operator,
            call.source,
        )
    return None


def explain_state(owner: bytes, difference: TraceDifference | None) -> str:
    """Return the sentence about a computation that depends on more than its inputs."""
    where = "" if difference is None else difference.where
    again = f"computed again with the same inputs, weights, buffers and seeds, it differs{where}"
    if difference is not None and difference.is_fault:
        return (
            f"{again}, which got the same inputs every time, and returned other values: the "
            "operator is not deterministic, or this processor core is faulty"
        )
    names = join_names(pickle.loads(owner)[1])
    cause = f"; {names} changed meanwhile" if names else ""
    return (
        f"{again}{cause}. The bits of the training would depend on which rank computes which "
        f"micro-batch: {ADVICE}"
    )


def join_names(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others, for messages."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
