"""Comparison of saved weights, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lockstep.errors import FileError

if TYPE_CHECKING:
    import torch

__all__ = ["WeightsDifference", "common_weights_file", "first_difference"]


@dataclass(frozen=True)
class WeightsDifference:
    """How two files of weights differ.

    `tensor` is the first differing one in order of names and `how` describes the difference;
    `count` of `total` tensors differ.
    """

    tensor: str
    how: str
    count: int
    total: int


def common_weights_file(first: Path, second: Path) -> str | None:
    """Return the name of a weights file that two run folders both have, the last by name."""
    names = {file.name for file in first.glob("*.safetensors")}
    names &= {file.name for file in second.glob("*.safetensors")}
    return max(names, key=_natural_order, default=None)


def first_difference(first: Path, second: Path) -> WeightsDifference | None:
    """Compare two files of weights; return None if all tensors are bit-identical.

    The tensors are mapped into memory and compared one at a time.

    Raises:
        FileError: A file cannot be read, or is not a complete safetensors file.
    """
    ours, theirs = _open(first), _open(second)
    names = sorted({*ours.keys(), *theirs.keys()}, key=_natural_order)
    found = [(name, how) for name in names if (how := _describe_difference(ours, theirs, name))]
    if not found:
        return None
    return WeightsDifference(*found[0], count=len(found), total=len(names))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror or error})") from None
    except SafetensorError:
        raise FileError(f"{path} is damaged, or not a safetensors file") from None


def _describe_difference(ours: Any, theirs: Any, name: str) -> str:
    """Describe how a tensor differs between two files; "" if it does not."""
    for names, which in ((ours.keys(), "first"), (theirs.keys(), "second")):
        if name not in names:
            return f"is not in the {which} run"
    a, b = ours.get_slice(name), theirs.get_slice(name)
    for what, of in (("dtype", "get_dtype"), ("shape", "get_shape")):
        if (one := getattr(a, of)()) != (other := getattr(b, of)()):
            return f"has {what} {one} in the first run and {other} in the second"
    return _describe_distance(ours.get_tensor(name), theirs.get_tensor(name))


def _describe_distance(a: torch.Tensor, b: torch.Tensor) -> str:
    import torch

    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return ""
    if not a.dtype.is_floating_point:
        return "differs"
    a, b = a.double(), b.double()
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not differs.any():
        return "differs in the sign of a zero or the bits of a NaN"
    distances = (a[differs] - b[differs]).abs()
    largest = distances[~distances.isnan()].max().item() if not distances.isnan().all() else "NaN"
    largest = largest if isinstance(largest, str) else f"{largest:.3g}"
    return f"differs in {int(differs.sum()):,} of {a.numel():,} elements, by at most {largest}"


def _natural_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders layer 2 before layer 10."""
    parts: Iterator[str] = filter(None, re.split(r"(\d+)", name))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
