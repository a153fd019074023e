"""Buffers of numpy, for MPI's ranks and for the memory copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.bench.measure import CannotError, Order
from lockstep.bench.pattern import Numbers

__all__ = ["CopyLibrary", "NumpyBuffers"]

Vector = npt.NDArray[Any]


class NumpyBuffers:
    """Buffers are arrays."""

    def new(self, count: int, order: Order) -> Vector:
        """Return a vector of zeros, its pages touched."""
        made = np.empty(count, dtype_of(order))
        made[:] = 0
        return made

    def block(self, numbers: Numbers, order: Order) -> Vector:
        """Return numbers in the order's dtype."""
        return numbers.astype(dtype_of(order))

    def copy(self, target: Vector, source: Vector) -> None:
        """Copy, with broadcasting."""
        np.copyto(target, source)

    def wrong(self, got: Vector, expected: Vector, is_mean: bool) -> int:
        """Count elements that differ."""
        if is_mean and got.dtype.kind == "f":
            limit = 2 * np.finfo(got.dtype).eps * np.abs(expected)
            return int(np.count_nonzero(np.abs(got - expected) > limit))
        return int(np.count_nonzero(got != expected))


class CopyLibrary(NumpyBuffers):
    """One thread copies a message from here to there: what memory itself can do."""

    def new(self, count: int, order: Order) -> Vector:
        """Return a vector of zeros; any dtype will do, its bytes are only copied."""
        return super().new(count, order)

    def call(self, order: Order, send: Vector, receive: Vector) -> Callable[[], object]:
        """Return the copy."""
        return partial(np.copyto, receive, send)


def dtype_of(order: Order) -> np.dtype[Any]:
    """Return numpy's dtype of that name; CannotError where it has none."""
    try:
        return np.dtype(order.dtype)
    except TypeError:
        raise CannotError(f"numpy has no {order.dtype}") from None
