"""The reads, writes and random draws of operators, from their schemas and a list of exceptions.

aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
    reads self and other, writes self, has the argument alpha
aten::copy_(Tensor(a!) self, Tensor src, ...)       reads only src, despite a similar schema
aten::mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out)          does not read out
aten::lift_fresh(Tensor(a) self) -> Tensor(a)       reads nothing: its values come from Python
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["OperatorSchema", "describe_operator", "format_value", "tensors_in"]

OVERWRITING = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
    "_foreach_copy_",
    "_foreach_zero_",
}
"""The operators that overwrite every element of the tensors that they write, and read none."""

EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""The operators that return uninitialized memory."""

IDENTITIES = {"alias", "detach", "detach_"}
"""The views that are equal to their input; a step has hundreds of them."""

CONSTANTS = {"lift_fresh"}
"""The operators that return their input, a tensor of values from outside torch.

`torch.tensor([1.0, 0.0])` and `torch.from_numpy(array)` call them, so these values enter a step
here.
"""

UNDECLARED_WRITES = {
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "native_batch_norm": ("running_mean", "running_var"),
    "native_batch_norm.out": ("running_mean", "running_var"),
}
"""The arguments that operators write although their schemas do not say so."""

ASYNCHRONOUS = ("_c10d_functional", "c10d")
"""The namespaces of operators that return before their results are complete."""

MAX_TEXT = 400
"""The largest number of characters kept of the arguments of one call."""


@dataclass(frozen=True)
class OperatorSchema:
    """The known properties of an operator.

    Attributes:
        name: Its name, with the overload unless that is the default one.
        arguments: The names of its arguments, in order.
        written: The names of the arguments that it writes to.
        unread: The names of the written arguments that it does not read.
        is_view: Whether it only returns or changes views, and computes nothing.
        makes_empty: Whether it returns uninitialized memory.
        is_random: Whether it may draw random numbers.
        is_asynchronous: Whether it returns before its results are complete, like a collective.
        is_opaque: Whether its written arguments are unknown.
        is_ignored: Whether it is not recorded: it returns its input, or is a mark for a profiler.
    """

    name: str
    arguments: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    is_view: bool = False
    makes_empty: bool = False
    is_random: bool = False
    is_asynchronous: bool = False
    is_opaque: bool = False
    is_ignored: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in the order of the schema."""
        if self.is_opaque:
            return {"": tree_leaves([args, kwargs])}
        given = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        return {name: given[name] for name in self.arguments if name in given}

    def tensors(
        self, values: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that a call reads, that it also writes, and that it overwrites."""
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        overwritten: list[torch.Tensor] = []
        for name, value in values.items():
            tensors = tensors_in([value])
            if name in self.unread:
                overwritten += tensors
            else:
                read += tensors
                written += tensors if name in self.written else []
        return read, written, overwritten

    def format_arguments(self, values: Mapping[str, Any]) -> str:
        """Return the arguments of a call that are not tensors, such as "dim=1, keepdim=True"."""
        if self.is_opaque:
            return ""
        parts = [
            f"{name}={text}"
            for name, value in values.items()
            if value is not None and (text := format_value(value))
        ]
        return ", ".join(parts)[:MAX_TEXT]


@cache
def describe_operator(operator: Any) -> OperatorSchema:
    """Return the known properties of an operator of torch, or of a higher-order operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        name = getattr(operator, "compile_region_name", None) or operator.name()
        return OperatorSchema(name, is_opaque=True, is_random=True)
    schema = operator._schema
    namespace = operator.namespace
    plain = schema.name.rpartition("::")[2]
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    writable = [
        argument
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written = [argument.name for argument in writable]
    written += UNDECLARED_WRITES.get(plain, ()) if namespace == "aten" else ()
    is_overwriting = plain in OVERWRITING
    tags = set(operator.tags)
    is_constant = namespace == "aten" and plain in CONSTANTS
    return OperatorSchema(
        name=f"{namespace}.{plain}{overload}",
        arguments=() if is_constant else tuple(argument.name for argument in schema.arguments),
        written=tuple(written),
        unread=frozenset(
            argument.name for argument in writable if is_overwriting or argument.is_out
        ),
        is_view=not is_constant and (operator.is_view or torch.Tag.inplace_view in tags),
        makes_empty=namespace == "aten" and plain in EMPTY,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_asynchronous=namespace in ASYNCHRONOUS,
        is_ignored=namespace == "profiler" or (namespace == "aten" and plain in IDENTITIES),
    )


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, which may be lists of tensors."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def format_value(value: Any) -> str:
    """Return a number or setting as text, the same in every process; "" for other objects."""
    if isinstance(value, (list, tuple)):
        parts = [format_value(item) for item in value]
        return f"[{', '.join(parts)}]" if any(parts) or not parts else ""
    plain = (
        bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format
    )  # fmt: skip
    return str(value) if isinstance(value, plain) else ""
