"""Watching the calls of a model, and the backward passes that begin at their outputs.

model(inputs)        before_forward, then hooks on the tensors of the outputs: end_forward
loss.backward()      the first of these hooks runs: begin_backward
its end              a callback in autograd: end_backward
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import is_in_backward

__all__ = ["Arguments", "BackwardWatch", "BackwardWatcher", "output_tensors"]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""


class BackwardWatcher(Protocol):
    """What is called around the forward and backward passes of a model."""

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
        replaced = vars(model).get("_compiled_call_impl")

        def call(*args: Any, **kwargs: Any) -> Any:
            given = None if is_in_backward() else watcher.before_forward((args, kwargs))
            if given is None:
                return (replaced or model._call_impl)(*args, **kwargs)
            outputs = (replaced or model._call_impl)(*given[0], **given[1])
            self._watch(outputs)
            return outputs

        # A hook would become a part of a compiled model, and torch calls modules with hooks slower.
        vars(call)["is_plain"] = replaced is None or getattr(replaced, "is_plain", False)
        vars(model)["_compiled_call_impl"] = call

    def _watch(self, outputs: Any) -> None:
        has_graph, tensors = False, list(output_tensors(outputs))
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


def output_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the outputs of a model, including lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from output_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from output_tensors(part)
    elif is_dataclass(value):
        yield from output_tensors(vars(value))
