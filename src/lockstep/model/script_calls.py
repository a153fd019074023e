"""The calls of a model by a script, of which only some take part in a micro-batch.

    the model is called                    random numbers           buffers
    in a micro-batch, to be trained        those of the scopes      results of the micro-batch
      in evaluation mode                   restored afterwards      results of the micro-batch
      without gradients                    restored afterwards      writes are discarded
    between two micro-batches of a step    no scope is seeded       writes are discarded
    in the step of another model           no scope is seeded       writes are discarded

So a forward pass that is no part of the training, such as an evaluation in the middle of a batch,
or that of a discriminator while its generator is trained, changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.kernel.buffers import Buffers
from lockstep.kernel.rng_scopes import NO_BACKWARD, RngScopes
from lockstep.kernel.step_context import NOTHING, ComputedMicrobatch
from lockstep.model.compilation import is_plain_call
from lockstep.model.forward import explain_batch_norm
from lockstep.model.watched_calls import Arguments, BeginCall, EndCall

__all__ = ["OpenLoop", "ScriptCalls"]

CALL = "_compiled_call_impl"
"""The attribute with what torch calls instead of a module's own call."""


class OpenLoop(Protocol):
    """The micro-batches of a step that a script computes."""

    buffers: Buffers
    current: ComputedMicrobatch | None
    place: str


class ScriptCalls:
    """Watches the calls of a model whose micro-batches a script computes.

    Args:
        model: The module that is called, perhaps compiled.
        scopes: Its RNG scopes, whose calls are watched already.
        is_in_other_step: A function that returns whether a step of this process is open.

    Attributes:
        loop: The open step of the model; None between steps.
        call_unwatched: Calls the model as if it was not watched.
    """

    def __init__(
        self,
        model: nn.Module,
        scopes: RngScopes,
        is_in_other_step: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._scopes = scopes
        self._is_in_other_step = is_in_other_step
        self._own: Buffers | None = None
        self._replaced: Any = None
        self.loop: OpenLoop | None = None
        self.call_unwatched: Callable[..., Any] = model
        self._begin: BeginCall | None = None
        self._end: EndCall | None = None

    def install(self) -> None:
        """Begin to watch."""
        # Not by hooks, which would become a part of a compiled model, and make every call slower.
        self._replaced = vars(self._model).get(CALL)
        self.call_unwatched = self._replaced or self._model._call_impl
        call = self._make_call(self.call_unwatched)
        vars(call)["is_plain"] = is_plain_call(self._replaced)
        vars(self._model)[CALL] = call

    def remove(self) -> None:
        """Stop watching."""
        if self._replaced is None:
            del vars(self._model)[CALL]
        else:
            vars(self._model)[CALL] = self._replaced

    @contextmanager
    def watch(self, begin: BeginCall, end: EndCall) -> Iterator[None]:
        """Call two functions around the calls of the body that are trained."""
        self._begin = begin
        self._end = end
        try:
            yield
        finally:
            self._begin = None
            self._end = None

    def _make_call(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            loop = self.loop
            # Recomputed activations repeat a call. Without another call, as in every micro-batch.
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                return inner(*args, **kwargs)
            if loop is None:
                with self._discarding_own() if self._is_in_other_step() else NOTHING:
                    return inner(*args, **kwargs)
            if loop.current is None:
                apart = self._apart(loop, keeps_buffers=False, restores=False)
            elif not torch.is_grad_enabled():
                apart = self._apart(loop, keeps_buffers=False, restores=True)
            elif self._model.training:
                return self._train(inner, (args, kwargs), loop)
            else:  # perhaps trained, with batch norm and dropout switched off
                with self._apart(loop, keeps_buffers=True, restores=True):
                    return self._train(inner, (args, kwargs), loop)
            with apart:
                return inner(*args, **kwargs)

        return call

    def _train(self, inner: Callable[..., Any], arguments: Arguments, loop: OpenLoop) -> Any:
        """Call the model as a part of the micro-batch."""
        given = arguments if self._begin is None else self._begin(arguments)
        args, kwargs = given or arguments
        try:
            outputs = inner(*args, **kwargs)
        except ValueError as error:
            current = loop.current
            if current is not None and current.microbatch.size == 1:
                explained = explain_batch_norm(error, loop.place)
                if explained is not None:
                    raise explained from error
            raise
        if self._end is not None and given is not None:
            self._end(outputs)
        return outputs

    @contextmanager
    def _apart(self, loop: OpenLoop, *, keeps_buffers: bool, restores: bool) -> Iterator[None]:
        """Run a call that is no part of the training of the micro-batch."""
        calls = self._scopes.pause()
        restore = self._scopes.remember() if restores else None
        try:
            with NOTHING if keeps_buffers else loop.buffers.discard_writes():
                yield
        finally:
            self._scopes.resume(calls)
            if restore is not None:
                restore()

    def _discarding_own(self) -> AbstractContextManager[None]:
        """Return the context of a call in the step of another model."""
        if self._own is None:
            self._own = Buffers({"": self._model})
        return self._own.discard_writes() if self._own.slots else NOTHING
