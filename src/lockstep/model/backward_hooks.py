"""Code of the user that may run in a backward pass: hooks, and callbacks at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules import module as global_hooks

__all__ = ["has_foreign_hooks", "may_read_gradients", "noticing_callbacks"]


def has_foreign_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a hook after its gradient that is none of Lockstep's.

    Those of Lockstep have an attribute `is_own`.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(hasattr(hook, "is_own") for hook in hooks.values())


def may_read_gradients(modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether hooks of the user may read `.grad` while a backward pass runs.

    Args:
        modules: The modules, whose parts are looked at, too.
        parameters: The parameters.
    """
    return (
        bool(global_hooks._global_backward_hooks)
        or bool(global_hooks._global_backward_pre_hooks)
        or any(
            module._backward_hooks or module._backward_pre_hooks
            for root in modules
            for module in root.modules()
        )
        or any(has_foreign_hooks(parameter) for parameter in parameters)
    )


class _NoticingEngine:
    """A wrapper of autograd's engine that calls `notice` for every queued callback."""

    def __init__(self, engine: Any, notice: Callable[[], None]) -> None:
        self.engine = engine
        self._notice = notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a callback for the end of the current backward pass."""
        self._notice()
        self.engine.queue_callback(callback)


@contextmanager
def noticing_callbacks(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` for each callback that the body queues, because torch does not list them."""
    holder: Any = Variable
    engine = _NoticingEngine(holder._execution_engine, notice)
    holder._execution_engine = engine
    try:
        yield
    finally:
        # A backward pass in another thread may have replaced the engine meanwhile.
        if holder._execution_engine is engine:
            holder._execution_engine = engine.engine
