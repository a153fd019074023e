"""Encoding: a nested state as JSON and named tensors, without pickle.

    {"lr": 0.1, "betas": (0.9, 0.999)}     {"lr": 0.1, "betas": {"$tuple": [0.9, 0.999]}}
    {"exp_avg": tensor}                    {"exp_avg": {"$tensor": "optimizer/w/exp_avg"}}

Reading a checkpoint therefore runs no code from it, unlike unpickling, which
`torch.distributed.checkpoint.load` does with `.metadata`. Types are preserved:
tuples stay tuples, dicts keep their order and the types of their keys, non-finite floats and
strides of tensors survive.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy
import torch

from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.kernel.errors import UsageError

__all__ = ["decode", "encode"]

FRACTION = re.compile(r"-?[0-9]{1,4000}(/[1-9][0-9]{,4000})?")
MAPPINGS: dict[str, type] = {"$ordered": OrderedDict, "$counter": Counter}
SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, None: None}
NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ARRAY_DTYPES = {numpy.dtype(order + kind) for order in "<>" for kind in NUMBERS}


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """Return `value` as JSON values, and add its tensors to `tensors`.

    Tensors on the meta device, which other ranks hold, are left out of their dict.

    Args:
        value: Nested dicts, lists, tuples, sets, numbers, strings, bytes, tensors, numpy arrays.
        tensors: Receives the tensors by name, without copying them.
        path: The first part of the tensors' names, such as "optimizer".

    Raises:
        UsageError: The state holds an object of another type; the message names its position.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, str) and not isinstance(value, Enum):
        return str(value)  # such as torch's version
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, path)
    if (kind is numpy.ndarray or isinstance(value, numpy.generic)) and value.dtype in ARRAY_DTYPES:
        name = "$array" if isinstance(value, numpy.ndarray) else "$number"
        native = value.astype(value.dtype.newbyteorder("="), order="C")  # a copy: it is writable
        tensor = torch.from_numpy(numpy.asarray(native))
        return {name: _encode_tensor(tensor, tensors, path)}
    if kind is dict:
        return _encode_dict(value, tensors, path)
    if kind is list:
        return [encode(entry, tensors, f"{path}/{index}") for index, entry in enumerate(value)]
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            ordered = list(value) if kind is tuple else sorted(value, key=_sort_key)
            return {name: encode(ordered, tensors, path)}
    for name, mapping in MAPPINGS.items():
        if kind is mapping:
            return {name: _encode_pairs(value, tensors, path)}
    if kind is deque:
        return {"$deque": [encode(list(value), tensors, path), value.maxlen]}
    if kind is defaultdict and value.default_factory in FACTORIES.values():
        factory = getattr(value.default_factory, "__name__", None)
        return {"$defaultdict": [factory, _encode_pairs(value, tensors, path)]}
    return _encode_leaf(value, path)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` was given; its tensors are copies.

    Tensors on the meta device stand for tensors whose values are not needed.

    Raises:
        Exception: `encode` does not return such a value; its class depends on the value.
    """
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if not any(name.startswith("$") for name in value):
        return {key: decode(entry, tensors) for key, entry in value.items()}
    ((kind, content),) = value.items()
    if kind in SEQUENCES:
        return SEQUENCES[kind](_decode_list(content, tensors))
    if kind in MAPPINGS:
        return MAPPINGS[kind](_decode_pairs(content, tensors))
    match kind, content:
        case "$tensor", _:
            return _decode_tensor(content, tensors)
        case "$sparse", _:
            indices, values = (decode(content[entry], tensors) for entry in ("indices", "values"))
            return torch.sparse_coo_tensor(
                indices,
                values,
                content["shape"],
                check_invariants=not indices.is_meta,
                is_coalesced=content["coalesced"],
            )
        case "$array", _:
            return _decode_array(content, tensors)
        case "$number", _:
            return _decode_array(content, tensors)[()]
        case "$float", "nan" | "inf" | "-inf":
            return float(content)
        case "$dict", _:
            return _decode_pairs(content, tensors)
        case "$deque", [elements, None | int() as length]:
            return deque(_decode_list(elements, tensors), length)
        case "$defaultdict", [name, pairs]:
            return defaultdict(FACTORIES[name], _decode_pairs(pairs, tensors))
        case "$bytes", _:
            return base64.b64decode(content, validate=True)
        case "$complex", [_, _]:
            return complex(*(decode(entry, tensors) for entry in content))
        case "$fraction", str() if FRACTION.fullmatch(content):
            return Fraction(content)
        case "$torch", str():
            constant = getattr(torch, content, None)
            if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                return constant
        case "$device", str():
            return torch.device(content)
        case "$size", [*_]:
            return torch.Size(content)
    raise ValueError(f"{kind} has an unknown type or content")


def _encode_dict(value: dict[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    if not all(type(key) is str and not key.startswith("$") for key in value):
        return {"$dict": _encode_pairs(value, tensors, path)}
    return {
        key: encode(entry, tensors, f"{path}/{key}")
        for key, entry in value.items()
        if not _is_elsewhere(entry)
    }


def _encode_pairs(
    value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], path: str
) -> list[list[Any]]:
    return [
        [encode(key, tensors, f"{path} (a key)"), encode(entry, tensors, f"{path}/{key}")]
        for key, entry in value.items()
        if not _is_elsewhere(entry)
    ]


def _decode_array(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return an array; one without values if the tensors have none."""
    tensor = decode(content, tensors)
    return numpy.empty(tensor.shape) if tensor.is_meta else tensor.numpy()


def _decode_list(content: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("the elements are not a list")
    return [decode(entry, tensors) for entry in content]


def _decode_pairs(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    pairs = dict(_decode_list(content, tensors))
    if len(pairs) < len(content):
        raise ValueError("an entry occurs twice")
    return pairs


def _sort_key(element: Any) -> tuple[str, str]:
    """Return a key that sorts a set alike in all processes; its own order depends on hashes."""
    return type(element).__name__, repr(element)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _encode_leaf(value: Any, path: str) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [encode(part, {}, path) for part in (value.real, value.imag)]}
    if type(value) is Fraction:
        return {"$fraction": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"$torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, PurePath):
        return str(value)
    raise UsageError(
        f"{path.replace('/', '.')} is a {type(value).__module__}.{type(value).__qualname__}, which "
        "a checkpoint cannot hold: a state_dict() must consist of tensors, arrays, numbers, "
        "strings, and dicts, lists, tuples and sets of them"
    )


def _encode_tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """Return the reference to a tensor: its name, and properties that its file cannot store."""
    if value.layout is torch.sparse_coo:  # such as SGD's momentum of a sparse gradient
        parts: dict[str, Any] = {"shape": list(value.shape), "coalesced": value.is_coalesced()}
        for name, part in (("indices", value._indices()), ("values", value._values())):
            parts[name] = encode(part, tensors, f"{path}/{name}")
        return {"$sparse": parts}
    if value.layout is not torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout)
        raise UsageError(
            f"{path.replace('/', '.')} is a {kind} tensor, which a checkpoint cannot hold: return "
            "its parts as dense tensors from state_dict()"
        )
    value = value.detach().resolve_conj().resolve_neg()
    reference: dict[str, Any] = {}
    contiguous = torch.empty(value.shape, device="meta").stride()
    if value.stride() != contiguous:
        strides = torch.empty_like(value, device="meta").stride()  # in its memory format
        if strides != contiguous:
            reference["strides"] = list(strides)
    if value.dtype is torch.complex128:  # safetensors has no such dtype
        value = torch.view_as_real(value.contiguous())
        reference["complex"] = True
    if value.dtype not in DTYPES:
        raise UsageError(
            f"{path.replace('/', '.')} has the dtype {value.dtype}, which a checkpoint cannot hold"
        )
    name = path
    while name in tensors and tensors[name] is not value:
        name += "'"
    tensors[name] = value
    return {"$tensor": [name, reference] if reference else name}


def _decode_tensor(content: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name, reference = (content, {}) if isinstance(content, str) else content
    saved = tensors[name].clone()
    if reference.get("complex"):
        saved = torch.view_as_complex(saved)
    if "strides" in reference:
        strides = reference["strides"]
        size = 1
        for step, length in sorted(zip(strides, saved.shape, strict=True)):
            if length > 1 and step != size and saved.numel():
                raise ValueError(f"the tensor {name} has strides that leave gaps or overlap")
            size *= length
        made = torch.empty_strided(saved.shape, strides, dtype=saved.dtype, device=saved.device)
        return made.copy_(saved)
    return saved
