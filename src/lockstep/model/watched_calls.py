"""Calls of modules, watched from outside: their arguments before, their outputs afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.kernel.buffers import Buffers
from lockstep.kernel.rng_scopes import RngScopes, is_in_backward
from lockstep.model.compilation import is_plain_call

__all__ = [
    "Arguments",
    "BeginCall",
    "ComputeAgain",
    "EndCall",
    "Hashing",
    "ShardedModel",
    "WatchedCalls",
    "intercept_calls",
    "output_tensors",
    "watch_calls",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""

BeginCall = Callable[[Arguments], Arguments | None]
"""A function that is called with the arguments of a call; it returns them, or others.

If it returns None, the call is not watched.
"""

EndCall = Callable[[Any], None]
"""A function that is called with the outputs of a call."""


Hashing = Callable[[torch.Tensor], AbstractContextManager[Mapping[str, int]]]
"""Returns, for the root of a backward pass, its context, with the hashes of gradients it frees."""

ComputeAgain = Callable[[Hashing], tuple[Mapping[str, int], torch.Tensor]]
"""Computes a micro-batch; returns the hashes of what was freed, and the loss."""


class ShardedModel(Protocol):
    """The gradients of a model whose parameters all ranks gather together."""

    def computing(self) -> AbstractContextManager[None]:
        """Free the parameters that are gathered; return the context of a step's micro-batches."""

    def hashing(self) -> AbstractContextManager[None]:
        """Return a context in which the gradients of a micro-batch are hashed."""

    def hash_current(self) -> dict[str, int]:
        """Return the hashes of a micro-batch's whole gradients."""

    def discard(self) -> None:
        """Forget a micro-batch that was computed again."""

    def find_any(self, value: bool) -> bool:
        """Return whether a value is true on any rank."""


@dataclass(frozen=True)
class WatchedCalls:
    """The calls of one module, or of the blocks of one stage, in a step.

    Attributes:
        stage: The number of the stage; 0 without stages.
        modules: The modules, by the prefix of their tensors' names.
        scopes: The RNG scopes of the step.
        buffers: The buffers of the modules.
        call: What repeats a call, given its arguments.
        watch: The context in which two functions are called around each call.
        obstacle: Why calls cannot be repeated; "" if they can.
        sharded: The gradients, if the modules are sharded.
        input_gradients: A function that returns the gradients of the inputs in the last backward;
            none if they are not known.
    """

    stage: int
    modules: Mapping[str, nn.Module]
    scopes: RngScopes
    buffers: Buffers
    call: Callable[..., Any]
    watch: Callable[[BeginCall, EndCall], AbstractContextManager[None]]
    obstacle: str = ""
    sharded: ShardedModel | None = None
    input_gradients: Callable[[], Sequence[torch.Tensor | None]] = tuple


def intercept_calls(module: nn.Module, begin: BeginCall, end: EndCall) -> Any:
    """Watch all calls of a module from now on, except for recomputations in backward.

    Not by hooks, which would become a part of a compiled model, and make every call slower.

    Returns:
        What was called before in place of `forward`; None for nothing.
    """
    replaced = vars(module).get("_compiled_call_impl")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = None if is_in_backward() else begin((args, kwargs))
        if given is None:
            return (replaced or module._call_impl)(*args, **kwargs)
        outputs = (replaced or module._call_impl)(*given[0], **given[1])
        end(outputs)
        return outputs

    vars(call)["is_plain"] = is_plain_call(replaced)
    vars(module)["_compiled_call_impl"] = call
    return replaced


@contextmanager
def watch_calls(module: nn.Module, begin: BeginCall, end: EndCall) -> Iterator[None]:
    """Watch the calls of a module in the body."""
    replaced = intercept_calls(module, begin, end)
    try:
        yield
    finally:
        del vars(module)["_compiled_call_impl"]
        if replaced is not None:
            vars(module)["_compiled_call_impl"] = replaced


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
