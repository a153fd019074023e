"""Places of gradients: autograd creates large gradients directly in their buckets.

    first watched backward   allocation 3 of 16 MiB becomes w.grad, which is copied to its bucket
    later ones               allocation 3 of 16 MiB gets the place of w in the bucket: no copy

A model whose backward passes allocate memory in another order only loses the advantage. If the
wrong tensor is created in a place, or user code keeps a reference to a gradient, the place is
*taken*: it must not be written, and its bucket needs new memory. The native module watches the
allocations (`csrc/binding/gradient_places.h`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.comm import native_module

__all__ = ["SMALLEST", "GradientPlaces", "gets_place"]

SMALLEST = 64 << 10
"""The least bytes of a gradient that gets a place; smaller ones are copied as fast."""


def gets_place(nbytes: int) -> bool:
    """Return whether a gradient of so many bytes gets a place."""
    return nbytes >= SMALLEST


class GradientPlaces:
    """The places of the gradients of one micro-batch.

    Args:
        places: For each parameter the vector in which its gradient should be created, or None.
    """

    def __init__(self, places: Sequence[torch.Tensor | None]) -> None:
        large = [each if each is not None and gets_place(each.nbytes) else None for each in places]
        self._indices = {index for index, place in enumerate(large) if place is not None}
        self._native: Any = native_module.load().GradientPlaces(large) if self._indices else None
        self._is_used = bool(self._indices)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Create gradients in their places while the body runs backward in this thread."""
        if not self._is_used:
            yield
            return
        self._native.begin()
        try:
            yield
        finally:
            self._native.end()

    def note(self, index: int, parameter: torch.Tensor) -> None:
        """Note that the gradient of a parameter has arrived in `parameter.grad`."""
        if index in self._indices:
            self._native.note(index, parameter.grad)

    def is_taken(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Return whether the place of a gradient must not be written.

        It holds another tensor than `gradient`, or one whose memory other tensors share.
        """
        return index in self._indices and bool(self._native.is_taken(index, gradient))

    def give_up(self, indices: Iterable[int]) -> None:
        """Create no further gradient in any place; these parameters have other places now."""
        self._is_used = False
        self._indices -= {*indices}
        if self._native is not None:
            self._native.end()
