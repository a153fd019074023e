"""Descriptions: the settings that determine results, as flat tables that ranks can compare.

    entry                                       value
    model.1                                     torch.nn.modules.dropout.Dropout
    model.1 (Dropout).p                         0.2
    model.0.weight.shape                        (8, 6)
    loss (CrossEntropyLoss).label_smoothing     0.0
    optimizer.param_groups[0].betas             (0.9, 0.999)
    scheduler.gamma                             0.9

Values are strings without memory addresses, device indices or file paths, so ranks with the same
settings have equal tables. Objects without a canonical string are described by their type.
Attributes that may differ between ranks are excluded if the object or its class lists them in
an attribute `lockstep_ignore`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    NoneType,
)
from typing import Any

import numpy
import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checksum import checksum
from lockstep.devices import device_names
from lockstep.kernel.buffer_rules import describe_buffer_rules
from lockstep.portable.arithmetic import has_portable_bits, measure_arithmetic
from lockstep.version import VERSION

__all__ = [
    "ARITHMETIC",
    "MACHINERY",
    "PLAIN",
    "THREADS",
    "Description",
    "Difference",
    "describe",
    "describe_arithmetic",
    "describe_module",
    "describe_optimizer",
    "describe_options",
    "describe_tensors",
    "describe_torch_settings",
    "describe_value",
    "find_difference",
    "ignored_attributes",
    "iterate_attributes",
]

MACHINERY = frozenset(vars(nn.Module()))
"""The attributes that torch sets in every module."""

Description = dict[str, str]
"""Values by entry, in the order in which a program sets them."""

PLAIN = frozenset({bool, int, float, complex, NoneType})
"""Types whose `repr` is the same in every process; strings may name a device."""

UNKNOWN = "unknown"
"""The value for the content of a tensor on the meta device, which is not compared."""

LONGEST = 160  # characters of a value; longer values are compared by hash
DEEPEST = 8  # levels of nested containers

NAMED = (type, BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType)
"""Types whose objects have a name that is the same in all processes."""

SETTINGS = (Enum, torch.dtype, torch.layout, torch.memory_format, range, bytes, slice)
"""Types whose `repr` has no address."""

INDEXED_DEVICE = re.compile(r"(cuda|xpu|hpu|mps|npu|xla|privateuseone):\d+")

ARITHMETIC = "arithmetic"
"""The entry with the fingerprint of the bits that a process computes."""

THREADS = "torch.get_num_threads()"
"""The entry with the number of intra-op threads, if bits depend on it."""

HIDDEN_OF_MODULES = MACHINERY - {"training"}


# --- objects and their entries ----------------------------------------------------------------


def describe(path: str, value: Any, within: Collection[int] = ()) -> Description:
    """Describe one argument of a training.

    Args:
        path: The prefix of its entries.
        value: A module, a function, a mapping or sequence of them, or a plain value.
        within: The ids of the enclosing objects.

    Returns:
        For a module, its tree; for a function, its name, bound arguments, code and closure; for
        another callable or a scheduler, its type and attributes; otherwise one entry.
    """
    if isinstance(value, nn.Module):
        return describe_module(path, value)
    if id(value) in within or not _has_parts(value):
        return {path: describe_value(value)}
    if isinstance(value, Mapping):
        entries = {}
        members = {f"[{key!r}]": member for key, member in value.items()}
    elif isinstance(value, (list, tuple)):
        entries = {path: f"{type(value).__name__} of {len(value)}"}
        members = {f"[{number}]": member for number, member in enumerate(value)}
    elif isinstance(value, partial):
        entries = describe(path, value.func, within)
        members = {f".args[{number}]": argument for number, argument in enumerate(value.args)}
        members |= {f".{name}": argument for name, argument in value.keywords.items()}
    elif isinstance(value, FunctionType):
        entries = {path: describe_value(value)}
        members = _parts_of_function(value)
    else:
        entries = {path: describe_value(type(value))}
        # The numbers of hooks count all hooks of the process, so they may differ.
        attributes = ((n, part) for n, part in _compared(value) if not n.endswith("hooks"))
        members = {f".{name}": attribute for name, attribute in attributes}
    for name, member in members.items():
        entries |= describe(path + name, member, [*within, id(value)])
    return entries


def describe_module(path: str, module: nn.Module) -> Description:
    """Describe every module of a tree: type, attributes, parameters and buffers."""
    entries: Description = {}
    tensors: dict[int, str] = {}
    for own_path, part, first in _tree(path, module, {}):
        if first != own_path:
            entries[own_path] = f"the same module as {first}"
            continue
        entries[own_path] = describe_value(type(part))
        for name, value in iterate_attributes(part):
            entries[f"{own_path} ({type(part).__name__}).{name}"] = describe_value(value)
        if rules := describe_buffer_rules(part):
            entries[f"{own_path} ({type(part).__name__}).lockstep_buffer_rules"] = describe_value(
                rules
            )
        entries |= {
            f"{own_path}.{name}": "None" for name, child in part._modules.items() if child is None
        }
        entries |= _describe_tensors(own_path, part, tensors)
    return entries


def describe_tensors(path: str, module: nn.Module) -> Description:
    """Describe the parameters and buffers of a tree, without the modules' attributes."""
    tensors: dict[int, str] = {}
    entries: Description = {}
    for own_path, part, first in _tree(path, module, {}):
        if first == own_path:
            entries |= _describe_tensors(own_path, part, tensors)
    return entries


def describe_optimizer(
    path: str, optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> Description:
    """Describe an optimizer: its type and each parameter group.

    Args:
        path: The prefix of the entries.
        optimizer: The optimizer, before its first step.
        names: The names of the model's parameters.
    """
    entries = {path: describe_value(type(optimizer))} | describe_options(path, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            entry = f"{path}.param_groups[{number}].params[{index}]"
            entries[entry] = names.get(parameter, "a tensor that is not a parameter of the model")
    return entries


def describe_options(path: str, optimizer: Optimizer) -> Description:
    """Describe the options of each parameter group: learning rate, betas and so on."""
    return {
        f"{path}.param_groups[{number}].{name}": describe_value(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def describe_torch_settings() -> Description:
    """Describe the settings of torch that determine results."""
    entries = {
        "lockstep.__version__": VERSION,
        "torch.__version__": torch.__version__,
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": str(
            torch.are_deterministic_algorithms_enabled()
        ),
        "torch.backends.mkldnn.enabled": str(torch.backends.mkldnn.enabled),
        **describe_arithmetic(),
    }
    if not has_portable_bits():
        entries[THREADS] = str(torch.get_num_threads())
    if names := device_names():
        # Another model of accelerator rounds otherwise, and so does another precision of float32.
        entries["accelerator"] = names[torch.accelerator.current_device_index()]
        entries["torch.backends.cudnn.allow_tf32"] = str(torch.backends.cudnn.allow_tf32)
    return entries


def describe_arithmetic() -> Description:
    """Describe the bits that this process computes."""
    return {ARITHMETIC: measure_arithmetic()}


def iterate_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the attributes of one module that ranks must share.

    Excluded are torch's own attributes and tensors that require a gradient: parameters are
    described as such, and other such tensors are activations.
    """
    if type(module).__module__.startswith("torch._"):  # a compiled wrapper, which holds addresses
        return
    for name, value in _compared(module):
        trained = isinstance(value, torch.Tensor) and value.requires_grad
        if name not in HIDDEN_OF_MODULES and not trained:
            yield name, value


def _compared(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes of an object, except those in `lockstep_ignore`."""
    ignored = ignored_attributes(value)
    for name, attribute in getattr(value, "__dict__", {}).items():
        if name not in ignored:
            yield name, attribute


def ignored_attributes(value: Any) -> set[str]:
    """Return the names of the attributes that may differ between ranks."""
    named: Any = getattr(value, "__dict__", {}).get("lockstep_ignore")
    named = getattr(type(value), "lockstep_ignore", ()) if named is None else named
    return {"lockstep_ignore"} | ({named} if isinstance(named, str) else set(named))


def _has_parts(value: Any) -> bool:
    """Return whether the parts of a value are described one by one."""
    # Asked first, because the first question whether a class is a Mapping visits hundreds of
    # classes, each in memory that a forked rank then copies.
    if isinstance(value, (nn.Module, FunctionType, partial)):
        return True
    if type(value) in PLAIN | {str} or isinstance(value, (*NAMED, torch.Tensor)):
        return False
    if isinstance(value, (list, tuple)):
        return any(map(_has_parts, value))
    if isinstance(value, Mapping):
        return any(map(_has_parts, value.values()))
    return callable(value) or isinstance(value, LRScheduler)


def _tree(
    path: str, module: nn.Module, seen: dict[int, str]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Return the modules of a tree with their paths, and the first path of each module."""
    first = seen.setdefault(id(module), path)
    yield path, module, first
    if first == path:
        for name, child in module._modules.items():
            if child is not None:
                yield from _tree(f"{path}.{name}", child, seen)


def _describe_tensors(path: str, module: nn.Module, seen: dict[int, str]) -> Description:
    entries = {}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        entry = f"{path}.{name}"
        if tensor is None:
            entries[entry] = "None"
            continue
        first = seen.setdefault(id(tensor), entry)
        if first != entry:
            entries[entry] = f"the same tensor as {first}"
            continue
        entries[entry] = "buffer" if name in module._buffers else "parameter"
        if name in module._buffers:
            entries[f"{entry}.persistent"] = str(name not in module._non_persistent_buffers_set)
        if is_lazy(tensor):
            entries[f"{entry}.shape"] = "not known yet"
            continue
        entries[f"{entry}.shape"] = str(tuple(tensor.shape))
        entries[f"{entry}.dtype"] = str(tensor.dtype)
        strided = tensor.layout is torch.strided
        entries[f"{entry}.stride()"] = str(tensor.stride() if strided else tensor.layout)
        entries[f"{entry}.requires_grad"] = str(tensor.requires_grad)
    return entries


def _parts_of_function(function: FunctionType) -> dict[str, Any]:
    """Return the code of a function and the values of its closure, by a suffix that names them.

    Functions of torch are compared by its version.
    """
    if (function.__module__ or "").partition(".")[0] == "torch":
        return {}
    ignored = ignored_attributes(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {" (hash of its code)": _hash(_code_text(function.__code__))} | {
        f" (variable {name})": cell.cell_contents
        for name, cell in cells
        if name not in ignored and cell != CellType()  # an empty cell has no value yet
    }


def _code_text(code: CodeType) -> str:
    """Return the content of code, and of the functions defined within it, without its location."""
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else describe_value(constant)
        for constant in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


# --- values as strings ------------------------------------------------------------------------


def describe_value(value: Any) -> str:
    """Return a short string that is the same for equal values in every process."""
    if type(value) in PLAIN:
        return repr(value)
    text = _text(value, 0)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text)} characters, hash {_hash(text)})"


def _text(value: Any, depth: int) -> str:
    inner = partial(_text, depth=depth + 1)
    if depth > DEEPEST:
        return "..."
    if isinstance(value, str):
        return repr(value.partition(":")[0] if INDEXED_DEVICE.fullmatch(value) else str(value))
    if isinstance(value, numpy.generic):
        value = value.item()
    if type(value) in PLAIN or isinstance(value, SETTINGS):
        return repr(value)
    is_released = isinstance(value, torch.Tensor) and value.is_meta  # in another stage
    if type(value) in (torch.Tensor, nn.Parameter) or is_released:
        return _tensor_text(value, depth)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{inner(k)}: {inner(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(inner, value))}{',' * (len(value) == 1)})"
    if isinstance(value, NAMED):
        return _qualified_name(value)
    return f"an instance of {_qualified_name(type(value))}"


def _qualified_name(value: Any) -> str:
    name: str = value.__qualname__
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        file = PurePath(value.__code__.co_filename).name
        return f"the lambda at {file}:{value.__code__.co_firstlineno}"
    module = getattr(value, "__module__", None)
    return name if module in (None, "builtins") else f"{module}.{name}"


def _tensor_text(tensor: torch.Tensor, depth: int) -> str:
    if tensor.numel() == 1 and not (tensor.is_meta or tensor.requires_grad):
        return repr(tensor.item())
    if depth:
        return "a tensor"
    if tensor.is_meta:
        return UNKNOWN
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} with checksum {checksum(tensor):016x}"


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))


# --- comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first entry in which ranks differ, and the clause that describes it.

    Attributes:
        entry: The entry.
        clause: The clause.
        odd: The first rank that differs from the majority.
        other: A rank of the majority.
    """

    entry: str
    clause: str
    odd: int
    other: int

    def format_message(self, advice: str, when: str = "") -> str:
        """Return the message; `advice` says how to make the entry the same on all ranks."""
        is_attribute = re.search(r"\)\.\w+$", self.entry)
        hint = ", or name it in the module's lockstep_ignore if it may differ"
        return f"{self.clause}{when}; {advice}{hint if is_attribute else ''}"


def find_difference(descriptions: Sequence[Mapping[str, str]]) -> Difference | None:
    """Find the first entry in which ranks differ.

    Args:
        descriptions: The descriptions of all ranks, in rank order.

    Returns:
        The entry with its values on the first rank that differs from the majority (or from the
        lowest rank, if there is none) and on one of the others; None if all ranks agree.
    """
    for entry in dict.fromkeys(entry for description in descriptions for entry in description):
        values = [description.get(entry) for description in descriptions]
        known = [rank for rank, value in enumerate(values) if value != UNKNOWN]
        common = Counter(values[rank] for rank in known).most_common(1)[0][0] if known else None
        odd = next((rank for rank in known if values[rank] != common), None)
        if odd is None:
            continue
        other = next(rank for rank in known if values[rank] == common)
        if values[odd] is None:
            clause = f"rank {odd} has no {entry}, which is {common} on rank {other}"
        elif common is None:
            clause = f"rank {odd}: {entry} is {values[odd]}, and rank {other} has none"
        else:
            clause = f"rank {odd}: {entry} is {values[odd]}, on rank {other} it is {common}"
        return Difference(entry, clause, odd, other)
    return None
