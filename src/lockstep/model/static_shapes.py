"""Static shapes: the graphs of a step depend only on the shapes of their inputs.

By default torch.compile specializes a graph for the first shapes that it sees, and makes sizes
symbolic when other shapes follow. Which shapes a rank sees first depends on its micro-batches, and
the two graphs may compute different bits. Therefore, during steps and evaluations:

    every shape          gets a graph of its own, as with `dynamic=False`
    a symbolic size      raises an error that names it, if something else asked for it
    too many shapes      raise an error; torch would continue without compilation
    graphs from outside  are not used: what a rank called between steps is its own business
    fall-backs           to eager mode outside of steps end with the next step
    kernels              are chosen deterministically, not by their speed

Graphs of steps differ from others by a guard: they are compiled while the cache of autocast is
disabled, and torch compares this state with that at the compilation whenever it looks for a graph.
The cache is disabled in every step, also without a compiler: a cached cast would add the gradients
of a weight that is used twice in the lower precision, and only where both uses are in one stage.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.foreign_messages import RECOMPILE_LIMIT
from lockstep.kernel.errors import UsageError
from lockstep.model.compilation import count_compiled
from lockstep.portable.arithmetic import has_portable_bits

__all__ = ["TOO_MANY_SHAPES", "StaticShapes", "is_limit_error"]

TOO_MANY_SHAPES = (
    "the compiled model met more different shapes than torch.compile keeps graphs for; pad the "
    "inputs to fewer shapes, or raise torch._dynamo.config.recompile_limit"
)

GRAPHS_PER_SHAPE = 2
"""The number of graphs that a shape may have: one for training and one for evaluation."""

STANCES = ("default", "force_eager", "fail_on_recompile")
"""The stances of `torch.compiler.set_stance` in which a graph does not depend on earlier calls."""

_fall_backs = 0
"""The number of fall-backs to eager mode in this process that are undone."""


class StaticShapes:
    """A context in which graphs depend only on the shapes of their inputs.

    It raises UsageError if a size is symbolic, if there are too many shapes, or if a setting of the
    compiler makes graphs depend on earlier calls.

    Args:
        model: The model that the body calls. torch counts the graphs of all modules of a class
            together, so its limit is multiplied by the number of compiled modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled: int | None = None  # the number of compiled modules, when it is called first
        self._settings = ExitStack()
        self._callbacks: list[Callable[[Any], None]] = []

    def __enter__(self) -> None:
        """Change the settings of the compiler if it is used, or else when it is.

        Changing them takes a tenth of a step of a tiny model.
        """
        self._is_specialized = False
        self._callbacks = []
        # Not imported, which takes a second: if it is not imported yet, nothing is compiled.
        self._frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        if self._frames is not None:
            _check_stance(self._frames._stance.stance)
            if self._compiled is None:
                self._compiled = count_compiled(self._model)
            # torch.compiler.reset() forgets the backends, but not what it compiles again. Without a
            # backend a function is never compiled, such as those of torch.optim.
            if self._compiled or any(self._frames.cached_backends.values()) or _has_graphs():
                self._specialize()
            else:
                callback: Any = sys.modules["torch._dynamo.callback"]
                self._callbacks = callback.callback_handler.start_callbacks
                self._callbacks.append(self._specialize)
        self._has_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def _specialize(self, _: Any = None) -> None:
        """Change the settings of the compiler until the context is left."""
        if not self._is_specialized:
            self._is_specialized = True
            config = sys.modules["torch._dynamo.config"]
            self._settings.enter_context(_specialize(config, self._compiled or 1))

    def __exit__(self, *error: Any) -> bool | None:
        """Restore the settings."""
        torch.set_autocast_cache_enabled(self._has_cache)
        if self._specialize in self._callbacks:  # torch.compiler.reset() removes it
            self._callbacks.remove(self._specialize)
        is_suppressed = self._settings.__exit__(*error) if self._is_specialized else None
        if self._frames is None and error[0] is None and _has_graphs():
            raise UsageError(
                "torch.compile was called for the first time inside of a step: compile the "
                "function or module before training"
            )
        return is_suppressed


@contextmanager
def _specialize(config: Any, modules: int) -> Iterator[None]:
    """Change the settings of the compiler for some compiled modules, and watch it, in the body."""
    _undo_fall_backs()
    factor = GRAPHS_PER_SHAPE * modules
    changes = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
        "recompile_limit": config.recompile_limit * factor,
        "accumulated_recompile_limit": config.accumulated_recompile_limit * factor,
    }
    symbols: list[str] = []
    with ExitStack() as stack:
        stack.callback(_change(config, changes))
        stack.enter_context(_deterministic_kernels())
        stack.enter_context(_collect_symbols(symbols))
        try:
            yield
        except Exception as error:
            if is_limit_error(error):
                raise UsageError(TOO_MANY_SHAPES) from error
            raise
    if symbols:
        raise UsageError(
            f"torch.compile made a graph for several sizes of {symbols[0]}, and the bits of such a "
            "graph depend on the shapes that a rank sees first: leave out dynamic=True, "
            "torch._dynamo.mark_dynamic and the variables TORCH_COMPILE_DYNAMIC_SOURCES and "
            "TORCH_COMPILE_DYNAMIC_VALUES"
        )


def is_limit_error(error: Exception) -> bool:
    """Return whether an error was raised because a function was compiled for too many shapes."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def _change(config: Any, changes: Mapping[str, Any]) -> Callable[[], None]:
    """Change settings, and return a function that restores them."""
    current = ((name, getattr(config, name)) for name in changes)
    before = {name: value for name, value in current if value != changes[name]}
    for name in before:
        setattr(config, name, changes[name])

    def restore() -> None:
        for name, value in before.items():
            setattr(config, name, value)

    return restore


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    """Let inductor choose no kernels by their speed or threads while the body runs."""
    from torch._dynamo.callback import callback_handler

    callbacks = callback_handler.start_callbacks
    with ExitStack() as stack:

        def choose(compiled: Any = None) -> None:
            if compiled is not None and has_portable_bits():
                # Bits must not depend on the number of threads, which inductor asks for by itself.
                inductor = importlib.import_module("torch._inductor.config")
                stack.callback(_change(inductor.cpp, {"threads": 1}))
            if (loaded := sys.modules.get("torch._inductor.config")) is not None:
                stack.callback(_change(loaded, {"deterministic": True}))

        choose()
        # Each compilation ends with torch.use_deterministic_algorithms, which changes this, too.
        callbacks.append(choose)
        try:
            yield
        finally:
            if choose in callbacks:  # torch.compiler.reset() removes it
                callbacks.remove(choose)


def _has_graphs() -> bool:
    """Return whether torch has compiled a function since the last reset."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.FRAME_COUNTER)


def _check_stance(stance: str) -> None:
    """Raise UsageError for a stance in which what is compiled depends on earlier calls."""
    if stance not in STANCES:
        raise UsageError(
            f'torch.compiler.set_stance("{stance}") makes the bits of a compiled model depend on '
            "the shapes that a rank sees first: train with the default stance"
        )


def _undo_fall_backs() -> None:
    """Let functions be compiled again for which there were too many shapes outside of steps.

    torch would run them without compilation for every new shape, also in steps, without an error.
    """
    global _fall_backs
    dynamo: Any = sys.modules["torch._dynamo"]
    reasons = dynamo.utils.counters["unimplemented"]
    count = sum(n for reason, n in reasons.items() if reason.startswith(RECOMPILE_LIMIT))
    if count == _fall_backs:
        return
    _fall_backs = count
    default = dynamo.types.FrameAction.DEFAULT
    for reference in dynamo.convert_frame.input_codes.seen:
        if (code := reference()) is not None:
            strategy = dynamo.types.FrameExecStrategy(default, default)
            dynamo.eval_frame.set_code_exec_strategy(code, strategy)


@contextmanager
def _collect_symbols(symbols: list[str]) -> Iterator[None]:
    """Append the names of all sizes to `symbols` that torch.compile makes symbolic in the body."""
    from torch._guards import CompileContext
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    kind: Any = ShapeEnv
    create = kind.create_symbol

    @functools.wraps(create)
    def create_symbol(self: Any, value: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        symbol = create(self, value, source, *args, **kwargs)
        is_compiling = CompileContext.current_compile_id() is not None
        if not symbol.is_number and is_compiling and not _is_outside_of_graphs(source.name):
            symbols.append(source.name)
        return symbol

    kind.create_symbol = create_symbol
    try:
        yield
    finally:
        kind.create_symbol = create


def _is_outside_of_graphs(source: str) -> bool:
    """Return whether a size is one that the compiler inspects and never computes with.

    Such are the sizes of the gradient of an input and of the tensor of which an input is a view,
    and the value of a tensor with one integer, such as the number of batches of a batch norm.
    """
    return "._base." in source or ".grad." in source or source.endswith(".item()")
