"""The first difference between the fingerprints of two layouts.

The order of the comparison:

    initial state     parameters and buffers before the first step
    each step         parameters and buffers before it
                      data of any micro-batch
                      module calls of the lowest micro-batch that differs, in forward order
                      its loss
                      parameters before the update
                      gradients, in backward order
                      parameters, buffers, optimizer state
                      loss of the batch, digest

All ranks of both layouts are compared, so a rank that diverges from the other ranks of its own
layout is a difference too. A value is compared between the ranks that computed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lockstep.model.fingerprint import Checksums, ModuleCall, StepFingerprint, TrainerFingerprint

__all__ = [
    "LayoutDifference",
    "RankFingerprint",
    "describe_kind",
    "first_difference",
]

Key = TypeVar("Key", bound=Hashable)
Order = Callable[[Iterable[Key]], Sequence[Key]]


KINDS = {
    "initial": "`{parameter}` differs before the first step",
    "between": "`{parameter}` was changed after the step before, outside of the training step",
    "data": "the data of the micro-batch differ",
    "input": "module `{module}` gets different inputs, although all modules before it agree",
    "output": "module `{module}` computes different outputs from the same inputs",
    "forward": "module `{module}` computes different outputs from the same inputs",
    "loss": "the loss differs, although the model computes the same",
    "missing": "the micro-batch is computed in only one of the runs; it has no weight in the other",
    "gradient": "the gradient of `{parameter}` differs, although the forward pass is the same",
    "update": "`{parameter}` differs after the update, although its gradient is the same",
    "buffer": "buffer `{parameter}` differs after the step",
    "state": "the optimizer's state of `{parameter}` differs after the step",
    "digest": "the digest differs, although all parameters and buffers agree",
    "steps": "the script takes different steps",
}
"""The kinds of differences, in the order of a step."""


@dataclass(frozen=True)
class RankFingerprint:
    """The fingerprints of one rank in a run of a script."""

    trainers: list[TrainerFingerprint] = field(default_factory=list)
    steps: list[StepFingerprint] = field(default_factory=list)


@dataclass(frozen=True)
class LayoutDifference:
    """The first difference between two layouts.

    Attributes:
        module: The dotted name of the module, or "data", "loss", "optimizer", "script".
        parameter: The dotted name of the parameter or buffer. None: something else differs.
        what: The kind of value: "initial" state; state "between" steps; "data"; "input" or
            "output" of the module; its "forward" (the input that it passes to a submodule);
            "loss"; "gradient"; "update" of a parameter; "buffer"; "state" of the optimizer;
            "digest"; "steps" that some ranks did not take.
        microbatch: The lowest micro-batch that differs. None: the value belongs to none.
        rank: The first rank of the second layout that differs. None: the value belongs to no
            rank, or the ranks of the first layout already differ.
        step: The number of the step; 0 for the initial state.
        trainer: The number of the trainer, from 0.
    """

    module: str
    parameter: str | None
    what: str
    microbatch: int | None = None
    rank: int | None = None
    step: int = 0
    trainer: int = 0


def describe_kind(difference: LayoutDifference) -> str:
    """Return what differs, without a full stop."""
    return KINDS[difference.what].format(module=difference.module, parameter=difference.parameter)


def first_difference(
    reference: Sequence[RankFingerprint],
    other: Sequence[RankFingerprint],
    is_complete: bool = True,
) -> LayoutDifference | None:
    """Return the first difference between two layouts.

    Args:
        reference: The ranks of the first layout.
        other: The ranks of the second layout.
        is_complete: Whether all ranks of both layouts finished. Otherwise, trainers and steps
            that some ranks lack do not count as a difference.

    Returns:
        The difference. None: all values that can be compared are equal.
    """
    ranks = [*reference, *other]
    size = len(reference)
    if is_complete and len({len(rank.trainers) for rank in ranks}) > 1:
        return LayoutDifference("script", None, "steps")
    trainers = reference[0].trainers
    for number, trainer in enumerate(trainers):
        difference = _tensor("initial", [_initial_state(rank, number) for rank in ranks], trainer)
        if difference is not None:
            return _placed(difference, size, 0, number)
    for position in range(_length(ranks) if is_complete else _length(reference)):
        taken = [step for rank in ranks for step in rank.steps[position : position + 1]]
        number = taken[0].trainer
        step = taken[0].step
        if len({(one.trainer, one.step) for one in taken}) > 1 or (
            is_complete and len(taken) < len(ranks)
        ):
            return _placed(LayoutDifference("script", None, "steps"), size, step, number)
        nothing = StepFingerprint(number, step)
        steps = [[*rank.steps[position : position + 1], nothing][0] for rank in ranks]
        trainer = trainers[number]
        difference = (
            _tensor("between", [one.before for one in steps], trainer)
            or _data(steps)
            or _forward(steps[:size], steps[size:])
            or _gradients(steps, trainer)
            or _state(steps, trainer)
            or _outcome(steps, trainer)
        )
        if difference is not None:
            return _placed(difference, size, step, number)
    return None


def _length(ranks: Sequence[RankFingerprint]) -> int:
    """Return the number of steps of the rank that took the most."""
    return max(len(rank.steps) for rank in ranks)


def _initial_state(rank: RankFingerprint, trainer: int) -> dict[str, int]:
    """Return the initial state of a trainer; empty if the rank did not construct it."""
    return rank.trainers[trainer].initial if trainer < len(rank.trainers) else {}


def _placed(difference: LayoutDifference, size: int, step: int, trainer: int) -> LayoutDifference:
    """Return a difference with its step and trainer, and its rank within the second layout."""
    rank = None if difference.rank is None or difference.rank < size else difference.rank - size
    return replace(difference, rank=rank, step=step, trainer=trainer)


def _tensor(
    what: str,
    columns: Sequence[Mapping[str, int]],
    trainer: TrainerFingerprint,
    order: Order[str] = list,
) -> LayoutDifference | None:
    """Return the first parameter or buffer that differs."""
    mismatch = _mismatch(columns, order)
    if mismatch is None:
        return None
    name, rank = mismatch
    return LayoutDifference(_owner(name, trainer), name, what, rank=rank)


def _data(steps: Sequence[StepFingerprint]) -> LayoutDifference | None:
    mismatch = _mismatch([step.data for step in steps], sorted)
    if mismatch is None:
        return None
    return LayoutDifference("data", None, "data", *mismatch)


def _forward(
    reference: Sequence[StepFingerprint], other: Sequence[StepFingerprint]
) -> LayoutDifference | None:
    """Compare the module calls and the loss of each micro-batch, in order."""
    here = _calls(reference)
    there = _calls(other)
    losses: dict[int, set[str]] = {}
    for step in (*reference, *other):
        for microbatch, loss in step.losses.items():
            losses.setdefault(microbatch, set()).add(loss)
    for microbatch in sorted({*here, *losses}):
        difference = _call_difference(here.get(microbatch, []), there.get(microbatch, []))
        if difference is not None:
            module, what = difference
            return LayoutDifference(module, None, what, microbatch)
        if len(losses.get(microbatch, ())) > 1:
            return LayoutDifference("loss", None, "loss", microbatch)
    return None


def _calls(steps: Iterable[StepFingerprint]) -> dict[int, list[ModuleCall]]:
    """Return the calls of each micro-batch, in the order of the stages."""
    parts = sorted((key, calls) for step in steps for key, calls in step.calls.items())
    by_microbatch: dict[int, list[ModuleCall]] = {}
    for (microbatch, _), calls in parts:
        by_microbatch.setdefault(microbatch, []).extend(calls)
    return by_microbatch


def _call_difference(
    reference: Iterable[ModuleCall], other: Iterable[ModuleCall]
) -> tuple[str, str] | None:
    """Return the module that causes the first difference, and the kind of value that differs.

    If the inputs of a call are the first values that differ, the enclosing module computed them
    and is the cause; unless `other` did not call that module as a whole.
    """
    theirs = dict(_numbered(other))
    around: list[str] = []
    for key, values in _numbered(reference):
        kind, module, _ = key
        differs = theirs.get(key, values) != values
        if kind == "enter":
            if differs:
                called = [name for name in around if ("enter", name, 0) in theirs]
                return (called[-1], "forward") if called else (module, "input")
            around.append(module)
            continue
        while around and around.pop() != module:
            pass  # a module that raised was not left
        if differs:
            return module, "output"
    return None


def _numbered(calls: Iterable[ModuleCall]) -> Iterator[tuple[tuple[str, str, int], Checksums]]:
    """Yield each call with its number among the calls of the same kind and module."""
    counts: Counter[tuple[str, str]] = Counter()
    for kind, module, values in calls:
        yield (kind, module, counts[kind, module]), values
        counts[kind, module] += 1


def _gradients(
    steps: Sequence[StepFingerprint], trainer: TrainerFingerprint
) -> LayoutDifference | None:
    backward = {name: number for number, name in enumerate(reversed(trainer.parameters))}
    gradients = [step.gradients for step in steps]
    order = partial(sorted, key=backward.__getitem__)
    return _tensor("gradient", gradients, trainer, order)


def _state(
    steps: Sequence[StepFingerprint], trainer: TrainerFingerprint
) -> LayoutDifference | None:
    difference = _tensor("buffer", [step.state for step in steps], trainer)
    if difference is not None and difference.parameter in trainer.parameters:
        return replace(difference, module="optimizer", what="update")
    mismatch = _mismatch([step.optimizer for step in steps])
    if difference is not None or mismatch is None:
        return difference
    name, rank = mismatch
    return LayoutDifference("optimizer", name.rpartition("/")[0], "state", rank=rank)


def _outcome(
    steps: Sequence[StepFingerprint], trainer: TrainerFingerprint
) -> LayoutDifference | None:
    outcomes = [{"loss": step.loss, "digest": step.digest} for step in steps]
    mismatch = _mismatch(
        [{what: value for what, value in outcome.items() if value} for outcome in outcomes]
    )
    if mismatch is None:
        return None
    what, rank = mismatch
    module = {"loss": "loss", "digest": trainer.model}[what]
    return LayoutDifference(module, None, what, rank=rank)


def _mismatch(
    columns: Sequence[Mapping[Key, Any]],
    order: Order[Key] = list,
) -> tuple[Key, int] | None:
    """Return the first name with differing values, and the first column that differs."""
    for name in order(dict.fromkeys(name for column in columns for name in column)):
        values = [(rank, column[name]) for rank, column in enumerate(columns) if name in column]
        for rank, value in values:
            if value != values[0][1]:
                return name, rank
    return None


def _owner(name: str, trainer: TrainerFingerprint) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0] or trainer.model
