"""Tracker of ready buckets: detects complete gradients and buckets while backward runs.

    backward pass              ... layer 6 ─> layer 5 ─> layer 4 ...
    post-accumulate hooks          w6, b6     w5, b5
    bucket 0 = {w6, b6}            complete: may be launched
    bucket 1 = {w5, b5}                       complete, and so is bucket 0: may be launched

Buckets are launched in a fixed order, the same on every rank, so each rank may launch a bucket at
a different time. A gradient is complete when its hook runs, except in these passes:

- The first one only shows how gradients arrive.
- Reentrant activation checkpointing runs a backward pass inside the outer one for each segment, so
  that a gradient may arrive in parts. After the first such pass, none is complete before the end.
- Inside `watch`, the caller moves complete gradients out of `.grad`. None is complete if user code
  could read it there: if a module has backward hooks, if a parameter has post-accumulate hooks of
  other code, or once a callback has been queued for the end of a backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.model.backward_hooks import may_read_gradients, noticing_callbacks

__all__ = ["BucketReadyTracker"]


class BucketReadyTracker:
    """Tracks one backward pass at a time, and counts the complete members of each bucket.

    The hooks on the parameters hold weak references, and have no effect once this object is freed.

    Args:
        parameters: The parameters, which are identified by their index.
        on_gradient: A bound method, called with a parameter's index each time autograd has added
            to its `.grad` inside `watch`. Its object is referenced weakly.
        modules: Modules whose backward hooks could read `.grad`.

    Attributes:
        modules: The modules whose backward hooks may read `.grad`.
        complete_buckets: The number of leading buckets that may be launched in this pass.
        has_late_callback: Whether a callback was queued, for the first time, in the last watched
            pass after gradients had been complete.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        on_gradient: Callable[[int], None],
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._parameters = list(parameters)
        self.modules = list(modules)
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._hooked: set[int] = set()
        self._buckets: list[frozenset[int]] = []
        self._has_watched = False
        self._has_inner_passes = False
        self._has_callbacks = False
        # The current pass: autograd's number of the outermost one, and what is complete.
        self._is_watching = False
        self._counts = False
        self._outermost = -1
        self._complete: set[int] = set()
        self.complete_buckets = 0
        self.has_late_callback = False

    def set_buckets(self, members: Sequence[Collection[int]]) -> None:
        """Set the indices of the parameters in each bucket, in launch order."""
        self._buckets = [frozenset(bucket) for bucket in members]

    @contextmanager
    def watch(self, loss: torch.Tensor) -> Iterator[bool]:
        """Track the backward pass from `loss` that the body runs, once.

        Yields:
            Whether gradients may become complete before the end of the pass.
        """
        self._register_hooks()
        self._complete = set()
        self.complete_buckets = 0
        self.has_late_callback = False
        is_plain = not (self._has_inner_passes or self._has_callbacks or self.is_observed())
        self._counts = self._has_watched and is_plain
        handle = loss.register_hook(self._enter)
        self._is_watching = True
        try:
            with noticing_callbacks(self._note_callback):
                yield self._counts
        finally:
            self._is_watching = False
            self._has_watched = True
            handle.remove()

    def mark(self, index: int) -> bool:
        """Record that autograd has added to a gradient; call this from `on_gradient`.

        Returns:
            Whether no further part of it is expected in this pass.
        """
        # An inner backward is detected here, by comparison with the id of the outermost one. A
        # callback at its end cannot be used: there torch still returns the id of that backward,
        # nested or not, and runs callbacks that are queued there immediately.
        if torch._C._current_graph_task_id() != self._outermost:
            self._has_inner_passes = True
            self._counts = False
        if not self._counts:
            return False
        self._complete.add(index)
        for bucket in self._buckets[self.complete_buckets :]:
            if not bucket <= self._complete:
                break
            self.complete_buckets += 1
        return True

    def is_late(self, index: int) -> bool:
        """Return whether a part of a gradient arrived after it was complete."""
        if index in self._complete:
            self._has_inner_passes = True
        return index in self._complete

    def is_observed(self) -> bool:
        """Return whether user code may read `.grad` while a backward pass runs."""
        return may_read_gradients(self.modules, self._parameters)

    def _note_callback(self) -> None:
        self._has_callbacks = True
        self.has_late_callback |= bool(self._complete)

    def _enter(self, *_: torch.Tensor) -> None:
        self._outermost = torch._C._current_graph_task_id()

    def _register_hooks(self) -> None:
        """Register a hook on every parameter that requires a gradient, once per parameter."""
        this = weakref.ref(self)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._hooked:
                parameter.register_post_accumulate_grad_hook(_Hook(this, index))
                self._hooked.add(index)


class _Hook:
    """A post-accumulate hook of a parameter; has no effect once its BucketReadyTracker is freed."""

    is_own = True

    def __init__(self, owner: weakref.ref[BucketReadyTracker], index: int) -> None:
        self._owner = owner
        self._index = index

    def __call__(self, parameter: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None and owner._is_watching:
            on_gradient = owner._on_gradient()
            if on_gradient is not None:
                on_gradient(self._index)
