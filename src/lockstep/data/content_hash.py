"""Content hashes: 64 bits of nested data, to compare batches and samples across ranks.

A hash covers the dtype, shape, strides and bits of tensors, the dtype, shape and bits of arrays,
and the values of numbers and strings. (Kernels select their code path by strides, so strides
affect the bits of a result.) For other objects it covers only their tensors and arrays: other
attributes, such as paths, times and caches, may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
import xxhash

from lockstep.checksum import checksum

__all__ = ["hash_content", "hash_sample"]

NUMBERS = {bool, int, float, complex, type(None)}
STRINGS = {str, bytes}
LIMIT = 1000
"""The maximum number of objects that are searched for tensors."""


def hash_content(data: Any) -> str:
    """Return the hash of `data` as 16 hexadecimal digits.

    Args:
        data: Tensors, arrays, numbers and strings, nested in tuples, lists, mappings and other
            objects. The order of a mapping's entries does not affect the hash.
    """
    return _hash(_pieces(data, with_strings=True, seen=set()))


def hash_sample(sample: Any) -> str:
    """Return the hash of a sample, to compare it across ranks.

    Strings are ignored if the sample has tensors or arrays: in such samples they are often paths,
    which may differ between hosts.
    """
    pieces = list(_pieces(sample, with_strings=False, seen=set()))
    return _hash(iter(pieces)) if any(map(_is_array, pieces)) else hash_content(sample)


def _hash(pieces: Iterator[bytes]) -> str:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(len(piece).to_bytes(8, "little"))
        hasher.update(piece)
    return hasher.hexdigest()


def _is_array(piece: bytes) -> bool:
    return piece.startswith(b"array ")


def _pieces(data: Any, with_strings: bool, seen: set[int]) -> Iterator[bytes]:
    """Yield the parts of `data` to hash, in the same order on every rank."""
    if isinstance(data, torch.Tensor) and not data.is_nested:
        yield b"array %016x " % checksum(data) + _strides(data)
    elif isinstance(data, numpy.ndarray) and data.dtype.kind not in "OUS":
        described = f"{data.dtype.str}{data.shape}".encode()
        octets = numpy.ascontiguousarray(data).reshape(-1).view(numpy.uint8)
        yield b"array " + described + xxhash.xxh3_64_digest(octets.data)
    elif isinstance(data, (*NUMBERS, numpy.generic)):
        yield repr(data).encode()
    elif isinstance(data, (*STRINGS,)):
        yield repr(data).encode() if with_strings else b"text"
    elif isinstance(data, Mapping):
        for key in sorted(data, key=repr):
            yield repr(key).encode()
            yield from _pieces(data[key], with_strings, seen)
    elif is_dataclass(data) and not isinstance(data, type):
        values = {entry.name: getattr(data, entry.name, None) for entry in fields(data)}
        yield from _pieces(values, with_strings, seen)
    elif isinstance(data, (tuple, list)):
        yield b"%d parts" % len(data)
        if set(map(type, data)) <= (NUMBERS | STRINGS if with_strings else NUMBERS):
            yield repr(data).encode()  # in one call, because such lists can be long
        else:
            for part in data:
                yield from _pieces(part, with_strings, seen)
    elif isinstance(data, numpy.ndarray):
        yield from _pieces(data.tolist(), with_strings, seen)
    elif isinstance(data, torch.Tensor):
        yield from _pieces(list(data.unbind()), with_strings, seen)
    elif hasattr(data, "tobytes"):  # a PIL image
        described = f"{getattr(data, 'mode', '')}{getattr(data, 'size', '')}".encode()
        yield b"array " + described + xxhash.xxh3_64_digest(data.tobytes())
    else:
        yield type(data).__qualname__.encode()
        yield from _attributes(data, with_strings, seen)


def _strides(tensor: torch.Tensor) -> bytes:
    """Return the strides of dimensions larger than 1; the others do not matter."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout).encode()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return repr([stride for size, stride in pairs if size > 1]).encode()


def _attributes(data: Any, with_strings: bool, seen: set[int]) -> Iterator[bytes]:
    """Yield the tensors and arrays among the attributes of an object, at any depth."""
    if id(data) in seen or len(seen) >= LIMIT or isinstance(data, type) or callable(data):
        return
    seen.add(id(data))
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        arrays = [piece for piece in _pieces(value, with_strings, seen) if _is_array(piece)]
        if arrays:
            yield name.encode()
            yield from arrays
