"""Fingerprints: a 64-bit hash of nested data, to compare batches and samples across ranks.

Tensors count with dtype, shape, strides and bits (kernels choose their path by strides,
so they decide on the bits of a result), arrays without strides, numbers and texts with
their values.
Of an object that is neither these nor a container of them only its tensors and arrays
count: other attributes may rightly differ between ranks (paths, times, caches).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
import xxhash

from lockstep.checksum import checksum

__all__ = ["fingerprint", "sample_fingerprint"]

NUMBERS = {bool, int, float, complex, type(None)}
TEXTS = {str, bytes}
LIMIT = 1000
"""Objects that are searched for tensors, at most."""


def fingerprint(data: Any) -> str:
    """Return the hash of `data` as 16 hexadecimal digits.

    Args:
        data: Tensors, arrays, numbers and texts, nested in tuples, lists, mappings and
            other objects. The order of a mapping's entries does not count.
    """
    return _hash(_pieces(data, texts=True, seen=set()))


def sample_fingerprint(sample: Any) -> str:
    """Return the hash of a sample, for a comparison between ranks.

    Texts count only where the sample holds no tensor and no array: beside pictures they are
    often paths, which may differ between hosts.
    """
    pieces = list(_pieces(sample, texts=False, seen=set()))
    return _hash(iter(pieces)) if any(map(_is_array, pieces)) else fingerprint(sample)


def _hash(pieces: Iterator[bytes]) -> str:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(len(piece).to_bytes(8, "little"))
        hasher.update(piece)
    return hasher.hexdigest()


def _is_array(piece: bytes) -> bool:
    return piece.startswith(b"array ")


def _pieces(data: Any, texts: bool, seen: set[int]) -> Iterator[bytes]:
    """Give the parts of `data` that count, in an order that is the same on every rank."""
    if isinstance(data, torch.Tensor) and not data.is_nested:
        yield b"array %016x " % checksum(data) + _strides(data)
    elif isinstance(data, numpy.ndarray) and data.dtype.kind not in "OUS":
        described = f"{data.dtype.str}{data.shape}".encode()
        octets = numpy.ascontiguousarray(data).reshape(-1).view(numpy.uint8)
        yield b"array " + described + xxhash.xxh3_64_digest(octets.data)
    elif isinstance(data, (*NUMBERS, numpy.generic)):
        yield repr(data).encode()
    elif isinstance(data, (*TEXTS,)):
        yield repr(data).encode() if texts else b"text"
    elif isinstance(data, Mapping):
        for key in sorted(data, key=repr):
            yield repr(key).encode()
            yield from _pieces(data[key], texts, seen)
    elif is_dataclass(data) and not isinstance(data, type):
        values = {each.name: getattr(data, each.name, None) for each in fields(data)}
        yield from _pieces(values, texts, seen)
    elif isinstance(data, (tuple, list)):
        yield b"%d parts" % len(data)
        if set(map(type, data)) <= (NUMBERS | TEXTS if texts else NUMBERS):
            yield repr(data).encode()  # in one call, because such lists can be long
        else:
            for part in data:
                yield from _pieces(part, texts, seen)
    elif isinstance(data, numpy.ndarray):
        yield from _pieces(data.tolist(), texts, seen)
    elif isinstance(data, torch.Tensor):
        yield from _pieces(list(data.unbind()), texts, seen)
    elif hasattr(data, "tobytes"):  # a picture of PIL
        described = f"{getattr(data, 'mode', '')}{getattr(data, 'size', '')}".encode()
        yield b"array " + described + xxhash.xxh3_64_digest(data.tobytes())
    else:
        yield type(data).__qualname__.encode()
        yield from _attributes(data, texts, seen)


def _strides(tensor: torch.Tensor) -> bytes:
    """Describe how the elements lie; the stride of a dimension of size 1 means nothing."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout).encode()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return repr([stride for size, stride in pairs if size > 1]).encode()


def _attributes(data: Any, texts: bool, seen: set[int]) -> Iterator[bytes]:
    """Give the tensors and arrays among the attributes of an object, at any depth."""
    if id(data) in seen or len(seen) >= LIMIT or isinstance(data, type) or callable(data):
        return
    seen.add(id(data))
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        arrays = [each for each in _pieces(value, texts, seen) if _is_array(each)]
        if arrays:
            yield name.encode()
            yield from arrays
