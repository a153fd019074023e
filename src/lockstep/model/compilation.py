"""Compilation: compiled graphs that depend only on the shapes of their inputs.

By default torch.compile specializes a graph for the first shapes that it sees, and makes sizes
symbolic when other shapes follow. Which shapes a rank sees first depends on its micro-batches, and
the two graphs may compute different bits. Therefore every shape gets a separate graph during a
step, as with `dynamic=False`. If there are too many shapes, compilation fails instead of falling
back to uncompiled code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.errors import UsageError

__all__ = [
    "check_static",
    "is_compiled",
    "is_compiled_in_place",
    "is_limit_error",
    "mark_as_plain",
    "static_shapes",
]


@contextmanager
def static_shapes() -> Iterator[None]:
    """Make torch.compile specialize every graph for its shapes while the body runs."""
    # Not imported, which takes a second: if it is not imported yet, nothing is compiled.
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        yield
        return
    before = config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit
    config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = False, True
    try:
        yield
    finally:
        config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = before


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by `torch.compile(module)` or `module.compile()`."""
    return "dynamo_ctx" in vars(module) or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module was compiled by `module.compile()`."""
    call = vars(module).get("_compiled_call_impl")
    return call is not None and not getattr(call, "is_plain", False)


def mark_as_plain(call: Any, replaced: Any) -> None:
    """Mark a function that replaces a module's `_compiled_call_impl`, unless that is compiled."""
    call.is_plain = replaced is None or getattr(replaced, "is_plain", False)


def check_static(model: nn.Module) -> None:
    """Raise UsageError for a model that was compiled with `dynamic=True`, or has such a part."""
    for name, module in model.named_modules():
        # torch.compile(module) has the context as an attribute, module.compile() in a closure.
        context: Any = vars(module).get("dynamo_ctx")
        wrapper: Any = vars(module).get("_compiled_call_impl")
        if context is None and wrapper is not None:
            variables = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
            context = {name: cell.cell_contents for name, cell in variables}.get("self")
        if getattr(context, "_dynamic", None) is True:
            raise UsageError(
                f"{name or 'the model'} is compiled with dynamic=True: one graph then serves "
                "several shapes, and its bits depend on the shapes that a rank sees first; "
                "compile it with dynamic=False or leave dynamic out"
            )


def is_limit_error(error: Exception) -> bool:
    """Return whether an error was raised because a function was compiled for too many shapes."""
    return type(error).__name__ == "FailOnRecompileLimitHit"
