"""Kept weights, compared tensor by tensor, as bytes: the first that differs, and by how much.

Reads the safetensors layout itself, so that every dtype is compared and no
tensor is copied whole:

    8 bytes little-endian n │ n bytes of JSON {name: {dtype, shape, data_offsets}} │ data
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import FileError

__all__ = ["Difference", "common_weights", "first_difference"]

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
HEADER_AT_MOST = 100 << 20


@dataclass(frozen=True)
class Difference:
    """Where two files of weights part.

    `tensor` is the first that differs in order of names, `how` says in words how
    it differs; `count` of `total` tensors differ.
    """

    file: str
    tensor: str
    how: str
    count: int
    total: int


def common_weights(first: Path, second: Path) -> str | None:
    """Return the name of a file of weights that two run folders both keep, the last by name."""
    names = {file.name for file in first.glob("*.safetensors")}
    names &= {file.name for file in second.glob("*.safetensors")}
    return max(names, key=natural, default=None)


def first_difference(first: Path, second: Path) -> Difference | None:
    """Compare two files of weights; None where all tensors are the same bytes.

    Raises:
        FileError: a file that cannot be read or is no safetensors file.
    """
    ours, theirs = Weights(first), Weights(second)
    names = sorted({*ours.tensors, *theirs.tensors}, key=natural)
    found = [(name, how) for name in names if (how := difference(ours, theirs, name))]
    if not found:
        return None
    return Difference(first.name, *found[0], count=len(found), total=len(names))


class Weights:
    """A safetensors file: its tensors' entries, and their bytes."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length if length < HEADER_AT_MOST else 0))
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            if 8 + length + max(ends, default=0) != len(self._data):
                raise ValueError("cut off")
        except OSError as error:
            raise FileError(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, AttributeError, LookupError, TypeError):
            raise FileError(f"{path} is damaged, or no safetensors file") from None
        self.tensors: dict[str, dict[str, Any]] = header
        self._start = 8 + length

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of one tensor."""
        begin, end = self.tensors[name]["data_offsets"]
        return memoryview(self._data)[self._start + begin : self._start + end]


def difference(ours: Weights, theirs: Weights, name: str) -> str:
    """Say how a tensor differs between two files; "" if it does not."""
    for weights, which in ((ours, "first"), (theirs, "second")):
        if name not in weights.tensors:
            return f"is not in the {which} run"
    a, b = ours.tensors[name], theirs.tensors[name]
    for what in ("dtype", "shape"):
        if a[what] != b[what]:
            return f"has {what} {a[what]} in the first run and {b[what]} in the second"
    if ours.bytes_of(name) == theirs.bytes_of(name):
        return ""
    return how_far(ours.bytes_of(name), theirs.bytes_of(name), a["dtype"])


def how_far(ours: memoryview, theirs: memoryview, dtype: str) -> str:
    """Say how far two tensors of one dtype and shape are apart."""
    if dtype not in FLOATS:
        return "differs"
    a, b = (np.frombuffer(data, FLOATS[dtype]).astype(np.float64) for data in (ours, theirs))
    apart = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not apart.any():
        return "differs in the sign of a zero or the bits of a NaN"
    with np.errstate(invalid="ignore"):
        most = float(np.nanmax(np.abs(np.where(apart, a - b, 0.0))))
    return f"differs in {apart.sum():,} of {len(a):,} elements, by {most:.3g} at most"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Order names as people do: layer 2 before layer 10."""
    parts: Iterator[str] = filter(None, re.split(r"(\d+)", name))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
