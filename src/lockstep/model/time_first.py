"""A warning for batches with time in their first dimension, which is split as if it were samples.

    trainer.step((x, y)), x of (time, samples, features)     split into parts of the time
    GRU, LSTM, RNN, MultiheadAttention, batch_first=False    get (time, samples, features)

A module that gets as many time steps as the micro-batch has samples, and another number of samples,
shows this. A model that transposes its inputs first is right, and is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.model.compilation import is_compiled
from lockstep.model.step_context import Position, StepContext

__all__ = ["watch_time_first"]

NAMED = "has batch_first=False and gets as many time steps as the micro-batch has samples"


@contextmanager
def watch_time_first(model: nn.Module, step: StepContext, position: Position) -> Iterator[None]:
    """Warn in the body if a recurrent or attention module takes samples for time steps.

    A compiled model is not watched, since hooks would change its graphs.
    """
    handles: list[RemovableHandle] = []

    def check(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        here = position()
        shape: Any = getattr(given[0] if given else None, "shape", ())
        if here is None or step.batch is None or len(shape) != 3:
            return
        size = next(each.size for each in step.batch.microbatches if each.index == here[0])
        if shape[0] == size != shape[1] and not any(NAMED in each for each in step.warnings):
            step.warnings.append(
                f"{step.place(here[0])}: {type(module).__name__} {name} {NAMED}: the first "
                "dimension of a batch, which is split into micro-batches, must be the samples; "
                "transpose the batch, and pass batch_first=True or transpose it again in forward"
            )

    modules = dict(model.named_modules())
    is_watched = not any(map(is_compiled, modules.values()))
    for name, module in modules.items() if is_watched else ():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
            handles.append(module.register_forward_pre_hook(partial(check, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
