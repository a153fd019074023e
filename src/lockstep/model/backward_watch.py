"""Watching the calls of a model, and the backward passes that begin at their outputs.

model(inputs)        before_forward, then hooks on the tensors of the outputs: end_forward
loss.backward()      the first of these hooks runs: begin_backward
its end              a callback in autograd: end_backward
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from lockstep.kernel.errors import UsageError
from lockstep.model.watched_calls import Arguments, intercept_calls, output_tensors

__all__ = ["BackwardWatch", "BackwardWatcher"]


class BackwardWatcher(Protocol):
    """An observer that is called around the forward and backward passes of a model."""

    def before_forward(self, arguments: Arguments) -> Arguments | None:
        """Take part in a forward; return its arguments, or None if its backward is not watched."""

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take part after a forward, given the tensors of its outputs."""

    def begin_backward(self) -> None:
        """Take part in a backward pass before it computes gradients of parameters."""

    def end_backward(self) -> None:
        """Take part in a backward pass that has computed all gradients."""


class BackwardWatch:
    """Calls a watcher around the passes of a model, as long as the model exists.

    Args:
        model: The model that is called; may be compiled.
        watcher: The watcher.
    """

    def __init__(self, model: nn.Module, watcher: BackwardWatcher) -> None:
        self._watcher = watcher
        self._pass: weakref.ref[_Pass] | None = None
        intercept_calls(model, watcher.before_forward, self._watch)

    def _watch(self, outputs: Any) -> None:
        has_graph = False
        tensors = list(output_tensors(outputs))
        for output in tensors:
            if output.requires_grad:
                output.register_hook(self._begin)
                has_graph = True
        if not has_graph:
            raise UsageError(
                "ls.exact finds no tensor with a gradient in the "
                f"{type(outputs).__name__} that the model returned: return a tensor, or a tuple, "
                "list, mapping or dataclass of tensors"
            )
        self._watcher.end_forward(tensors)

    def _begin(self, _: torch.Tensor) -> None:
        """Queue the end of the backward pass that calls this hook, once."""
        if self._pass is not None and self._pass() is not None:
            return
        self._watcher.begin_backward()
        current = _Pass()
        self._pass = weakref.ref(current)
        Variable._execution_engine.queue_callback(partial(self._end, current))

    def _end(self, _: _Pass) -> None:
        self._pass = None
        self._watcher.end_backward()


class _Pass:
    """A running backward pass; only autograd refers to it, and frees it if the pass raises."""
