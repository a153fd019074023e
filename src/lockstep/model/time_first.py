"""A warning for batches with time in their first dimension, which is split as if it were samples.

    trainer.step((x, y)), x of (time, samples, features)     split into parts of the time
    GRU, LSTM, RNN, MultiheadAttention, batch_first=False    get (time, samples, features)

A module that gets as many time steps as the micro-batch has samples, and another number of samples,
shows this. A model that transposes its inputs first is right, and is not reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.kernel.step_context import Position, StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.compilation import is_compiled

__all__ = ["TimeFirstWarning"]


class TimeFirstWarning(StepHook):
    """The hook that warns in the first step if a module takes samples for time steps.

    A compiled model is not watched, since hooks would change its graphs.

    Args:
        model: The model, or its compiled wrapper.
        position: A function that returns the micro-batch and the stage that are being computed.
    """

    every = sys.maxsize

    def __init__(self, model: nn.Module, position: Position) -> None:
        self._model = model
        self._position = position

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None]:
        """Watch the recurrent and attention modules of the model."""
        return self._watch(step)

    @contextmanager
    def _watch(self, step: StepContext) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        modules = dict(self._model.named_modules())
        is_watched = not any(map(is_compiled, modules.values()))
        for name, module in modules.items() if is_watched else ():
            if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
                check = partial(self._check, step, name)
                handles.append(module.register_forward_pre_hook(check))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(
        self, step: StepContext, name: str, module: nn.Module, given: tuple[Any, ...]
    ) -> None:
        here = self._position()
        shape: Any = getattr(given[0] if given else None, "shape", ())
        if here is None or step.batch is None or len(shape) != 3:
            return
        size = next(part.size for part in step.batch.microbatches if part.index == here[0])
        if shape[0] == size != shape[1] and not step.has_warned("time_first"):
            step.warn(
                step.place(here[0]),
                f"{type(module).__name__} {name} has batch_first=False and gets as many time steps "
                "as the micro-batch has samples: the first dimension of a batch, which is split "
                "into micro-batches, must be the samples; transpose the batch, and pass "
                "batch_first=True or transpose it again in forward",
                "time_first",
            )
