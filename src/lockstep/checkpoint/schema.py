"""Schema: what the manifest and the state of a checkpoint contain.

    a class               a value of this class; True and False are no integers
    a range               an integer in it
    a pattern             a string that matches as a whole
    a set                 one of these strings
    a dict                these entries, and any others: newer versions add some.
                          "name?" may be missing. {str: x}: any names, each with an x
    [x], (x, y)           a list of any number of x; a tuple of x and y
    OneOf(x, y)           x or y; None stands for itself

Where a user or torch decides the form, as for the entries of an optimizer, any value is accepted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["FRACTION", "MANIFEST_SCHEMA", "STATE_SCHEMA", "find_mismatch", "is_alike"]


class OneOf(tuple[Any, ...]):
    """A choice between schemas."""

    __slots__ = ()

    def __new__(cls, *choices: Any) -> OneOf:
        """Return a choice."""
        return super().__new__(cls, choices)


MISSING = object()
COUNT = range(1 << 53)  # of steps, samples or bytes; more is damage
NUMBER = OneOf(float, range(-(1 << 53), 1 << 53))
FRACTION = re.compile(r"-?[0-9]{1,4000}(/[1-9][0-9]{,4000})?")
CHECKSUM = re.compile(r"[0-9a-f]{32}")
FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

MANIFEST_SCHEMA = {
    "format": COUNT,
    "step": COUNT,
    "files": {FILE_NAME: {"bytes": COUNT, "xxh3": CHECKSUM}},
}

METRICS = {str: NUMBER}
EVALUATION = {"loss": NUMBER, "metrics": METRICS, "samples": COUNT}
EPOCH = {"epoch": COUNT, "seconds": NUMBER, "evaluation": OneOf(None, EVALUATION), **EVALUATION}
STEP = {
    "step": COUNT, "epoch": COUNT, "lr": NUMBER, "seconds": NUMBER, "ranks": [[NUMBER]],
    "norm": NUMBER, "loss_scale?": OneOf(None, NUMBER), "is_skipped?": OneOf(None, bool),
    "losses?": [OneOf(None, NUMBER)], "batch?": OneOf(None, str),
    "rank_summary?": OneOf(None, dict), **EVALUATION,
}  # fmt: skip
SUMS = {
    "loss": FRACTION, "metrics": {str: OneOf([OneOf(FRACTION, COUNT)])}, "samples": COUNT,
    "seconds": NUMBER,
}  # fmt: skip
HISTORY = {
    "open": SUMS, "pending?": OneOf(None, EPOCH), "last?": OneOf(None, STEP), "samples?": COUNT,
    "epochs?": COUNT,
}  # fmt: skip
BATCHES = {
    "samples": OneOf(None, COUNT), "batch_size": OneOf(None, COUNT), "seed": int, "shuffle": bool,
    "drop_last?": bool, "position?": COUNT, "order?": str, "sampler?": dict,
}  # fmt: skip
CALL = OneOf(
    {"kind": {"save", "manual"}, "steps": COUNT},
    {"kind": {"steps"}, "steps": COUNT, "losses": bytes, "batches": str},
    {"kind": {"evaluation"}, "steps": COUNT, "samples": OneOf(None, COUNT), "result": EVALUATION},
    {
        "kind": {"epoch"},
        "steps": COUNT,
        "epoch": COUNT,
        "complete": bool,
        "state": BATCHES,
        "last?": OneOf(None, STEP),
    },
)
GENERATORS = {
    "torch?": torch.Tensor,
    "random?": (int, tuple, OneOf(None, float)),
    "numpy?": (str, object, range(625), int, float),
}
STATE_SCHEMA = {
    "model": dict, "optimizer": {str: dict},
    "parameter_groups": [{"params": [str], "lr?": OneOf(NUMBER, torch.Tensor)}],
    "scheduler": OneOf(None, dict), "ema": OneOf(None, dict),
    "ema_updates": OneOf(None, torch.Tensor), "buffers?": {str: {str: torch.Tensor}},
    "module_settings?": {"values": {str: object}, "opaque": {str: str}, "hooks": {str: str}},
    "generators": GENERATORS, "stateful": dict,
    "history": HISTORY,
    "samplers?": [{"number": COUNT, "epoch": COUNT, "before": dict, "after": dict}],
    "known_samplers": {int: dict}, "script": {"entries": [CALL], "digests": {str: str}},
    "steps": COUNT, "epoch": COUNT, "seed": int, "microbatches": COUNT, "trainer": COUNT,
    "loss_scale?": OneOf(None, {"value": NUMBER, "finite_steps": COUNT}), "time?": float,
    "settings": {str: str}, "environment": dict, "sources": {str: str},
}  # fmt: skip


def find_mismatch(value: Any, schema: Any, path: str = "it") -> str:
    """Return in words where a value differs from a schema first; "" if it does not."""
    if isinstance(schema, OneOf):
        mismatches = [find_mismatch(value, choice, path) for choice in schema]
        return "" if "" in mismatches else max(mismatches, key=len)
    if isinstance(schema, dict) and isinstance(value, dict):
        pairs = _pair_entries(value, schema, path)
    elif isinstance(schema, list) and isinstance(value, list):
        pairs = ((entry, schema[0], f"{path}[{at}]") for at, entry in enumerate(value))
    elif isinstance(schema, tuple) and isinstance(value, tuple) and len(value) == len(schema):
        pairs = ((value[at], schema[at], f"{path}[{at}]") for at in range(len(schema)))
    else:
        return "" if _is_simple(value, schema) else f"{path} is {_describe(value)}"
    return next(filter(None, (find_mismatch(*pair) for pair in pairs)), "")


def is_alike(saved: Any, here: Any) -> bool:
    """Return whether saved values have the kinds of those here: numbers, flags, lists, dicts.

    Flags and entries that are None may be missing, since an older version of torch lacks some.
    """
    if isinstance(here, bool):
        return isinstance(saved, bool)
    if isinstance(here, (int, float)):
        return not find_mismatch(saved, OneOf(NUMBER, torch.Tensor))
    if isinstance(here, dict):
        return isinstance(saved, dict) and all(
            is_alike(saved[name], value) if name in saved else type(value) in (bool, type(None))
            for name, value in here.items()
        )
    if isinstance(here, (list, tuple)):
        return (
            type(saved) is type(here)
            and len(saved) == len(here)
            and all(map(is_alike, saved, here))
        )
    return True


def _pair_entries(
    value: dict[Any, Any], schema: dict[Any, Any], path: str
) -> Iterator[tuple[Any, Any, str]]:
    """Yield the entries of a dict, and the names where any are allowed, with their schemas."""
    for name, inner in schema.items():
        if not isinstance(name, str):
            for key, entry in value.items():
                yield key, name, f"a name in {path}"
                yield entry, inner, f"{path}.{key}"
        elif name.removesuffix("?") in value:
            yield value[name.removesuffix("?")], inner, f"{path}.{name.removesuffix('?')}"
        elif not name.endswith("?"):
            yield MISSING, None, f"{path}.{name}"


def _is_simple(value: Any, schema: Any) -> bool:
    """Return whether a value fits a schema that has no parts."""
    if isinstance(schema, re.Pattern):
        return isinstance(value, str) and schema.fullmatch(value) is not None
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, set):
        return isinstance(value, str) and value in schema
    if isinstance(schema, type):
        return isinstance(value, schema) and (type(value) is not bool or schema in (bool, object))
    return value is None and schema is None


def _describe(value: Any) -> str:
    return "missing" if value is MISSING else reprlib.repr(value)
