"""Views of buckets in which autograd creates large gradients, so that none is copied there.

    first watched backward   allocation 3 of 16 MiB becomes w.grad, which is copied to its bucket
    later ones               allocation 3 of 16 MiB gets the view of w in the bucket: no copy

A model whose backward passes allocate memory in another order only loses the advantage. If the
wrong tensor is created in a view, or user code keeps a reference to a gradient, the view is
*taken*: it must not be written, and its bucket needs new memory. The native module watches the
allocations (`csrc/binding/gradient_places.h`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.comm.native_module import load_native

__all__ = ["SMALLEST", "GradBucketViews", "gets_view"]

SMALLEST = 64 << 10
"""The least bytes of a gradient that gets a view; smaller ones are copied as fast."""


def gets_view(nbytes: int) -> bool:
    """Return whether a gradient of so many bytes gets a view."""
    return nbytes >= SMALLEST


class GradBucketViews:
    """The views for the gradients of one micro-batch.

    Args:
        views: For each parameter the vector in which its gradient should be created, or None.
    """

    def __init__(self, views: Sequence[torch.Tensor | None]) -> None:
        large = [view if view is not None and gets_view(view.nbytes) else None for view in views]
        self._indices = {index for index, view in enumerate(large) if view is not None}
        self._native: Any = load_native().GradientPlaces(large) if self._indices else None
        self._is_used = bool(self._indices)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Create gradients in their views while the body runs backward in this thread."""
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
        """Return whether the view for a gradient must not be written.

        It holds another tensor than `gradient`, or one whose memory other tensors share.
        """
        return index in self._indices and bool(self._native.is_taken(index, gradient))

    def give_up(self, indices: Iterable[int]) -> None:
        """Create no further gradient in any view; these parameters have other memory now."""
        self._is_used = False
        self._indices -= {*indices}
        if self._native is not None:
            self._native.end()
