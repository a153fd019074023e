"""Checks of the arguments of public functions: a wrong one raises a sentence, not a traceback.

    @check_call("ls.partition")
    def partition(dataset: Dataset[Any], fractions: Sequence[float], seed: int = 0)

    ls.partition(dataset, "a")    UsageError: ls.partition(fractions='a'): expected a list

The annotations say what is expected: one is checked if `KINDS` has each of its alternatives, with
or without what is in brackets. What only acts like the annotated class is accepted, such as a
number of numpy.
"""

from __future__ import annotations

import inspect
import operator
import os
import reprlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import NoneType
from typing import Any, ParamSpec, TypeVar

from lockstep.kernel.errors import UsageError
from lockstep.kernel.loss_weights import is_number

__all__ = ["check_call", "check_kinds", "read_kinds"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Kind = tuple[str, Callable[[Any], bool]]


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_", "int", "NoneType")  # bool_ is numpy's


def _is_whole(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and -(2**63) <= operator.index(value) < 2**63
    except TypeError:
        return False


def _is_iterable(value: Any) -> bool:
    has_items = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return has_items and not isinstance(value, str) and getattr(value, "shape", None) != ()


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_parameters") and not isinstance(value, type)


def _is_logger(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) or hasattr(value, "write")


KINDS: dict[str, Kind] = {
    "None": ("None", lambda value: value is None),
    "bool": ("True or False", _is_flag),
    "int": ("a whole number (int64)", _is_whole),
    "float": ("a number", lambda value: is_number(value) and not isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "Path": ("a path", lambda value: isinstance(value, os.PathLike)),
    "Iterable": ("an iterable", _is_iterable),
    "Sequence": ("a list", _is_iterable),
    "Sequence[nn.Module]": (
        "a list of modules",
        lambda value: _is_iterable(value) and all(map(_is_module, value)),
    ),
    "Sequence[LoggerLike]": (
        "a list of these",
        lambda value: isinstance(value, (list, tuple)) and all(map(_is_logger, value)),
    ),
    "Mapping[str, Metric]": (
        "a dict of functions by name",
        lambda value: hasattr(value, "items") and all(map(callable, dict(value).values())),
    ),
    "Mapping": ("a dict of values by name", lambda value: hasattr(value, "items")),
    "Callable": ("a function", callable),
    "WeightFunction": ("a function of a micro-batch", callable),
    "ParameterGroups": ("a function of a parameter's name and the parameter", callable),
    "SchedulerFactory": (
        "a function of the optimizer, such as partial(StepLR, step_size=10)",
        callable,
    ),
    "LoggerLike": ("a folder or a logger", _is_logger),
    "Blocks": (
        "a list of modules, or of their names",
        lambda value: (
            value is None or isinstance(value, str) or _is_module(value) or _is_iterable(value)
        ),
    ),
    "PipelineConfig": ("an ls.PipelineConfig", lambda value: hasattr(value, "stages")),
    "MicrobatchSource": ("a sampler of ls.exact", lambda value: hasattr(value, "attach")),
    "ExactBatch": ("a batch of another handle", lambda value: hasattr(value, "backward")),
    "SavedState": (
        "what state_dict() returned",
        lambda value: hasattr(value, "items") and "seed" in value,
    ),
}
"""What each part of an annotation permits, in words and as a function."""


def read_kinds(annotations: Mapping[str, Any]) -> dict[str, list[Kind]]:
    """Return the kinds that each annotation permits, without those that are not checked."""
    kinds = {}
    for name, annotation in annotations.items():
        text = getattr(annotation, "__forward_arg__", annotation)  # of a TypedDict
        parts = f"{text}".split(" | ")
        parts = [part if part in KINDS else part.partition("[")[0] for part in parts]
        if KINDS.keys() >= set(parts):
            kinds[name] = [KINDS[part] for part in parts]
    return kinds


def check_kinds(about: str, kinds: Mapping[str, list[Kind]], values: Mapping[str, Any]) -> None:
    """Raise UsageError for a value that is of none of the permitted kinds.

    Args:
        about: The call, for the message.
        kinds: The kinds by name, as `read_kinds` returns them.
        values: The arguments by name.
    """
    for name, permitted in kinds.items():
        if name in values and not any(fits(values[name]) for _, fits in permitted):
            value = values[name]
            is_plain = isinstance(value, (str, int, float, NoneType))
            given = reprlib.repr(value) if is_plain else f"<{type(value).__name__}>"
            expected = ", or ".join(words for words, _ in permitted)
            raise UsageError(f"{about}({name}={given}): expected {expected}")


def check_call(
    about: str,
    advice: str = "",
    hints: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that checks the arguments of each call; the signature stays as it is.

    Args:
        about: The function as users write it, for messages.
        advice: The message for arguments that the function does not have; "" for one that names
            the argument.
        hints: The correct argument, by the name of an argument in other libraries.
        options: The annotations of the function's `**options`.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)
        annotations = {name: given.annotation for name, given in signature.parameters.items()}
        others = (options or {}) if "options" in annotations else {}
        kinds = read_kinds({**others, **annotations})

        @wraps(function)
        def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
            try:
                given = signature.bind(*args, **named).arguments
            except TypeError as error:
                known = [name for name in annotations if name != "self"]
                unknown = _explain_unknown(about, named.keys() - set(known), known, hints or {})
                raise UsageError(advice or unknown or f"{about}: {error}") from None
            if kinds:
                check_kinds(about, kinds, given | given.get("options", {}))
            return function(*args, **named)

        return call

    return decorate


def _explain_unknown(
    about: str, unknown: set[str], known: list[str], hints: Mapping[str, str]
) -> str:
    for name in unknown:
        close = get_close_matches(name, known, 1)
        hint = hints.get(name) or (f"{close[0]}=" if close else "")
        advice = f": write {hint}" if hint else f"; its arguments are {', '.join(known)}"
        return f"{about} has no argument {name}{advice}"
    return ""
