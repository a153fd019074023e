"""Compiled modules: which they are, how they were compiled, and what cannot be trained.

    torch.compile(module)    a wrapper, which has the context of the compiler as an attribute
    module.compile()         the module itself, with the context in the closure of a function

A compiled module is a single block: its parts are not called one by one, so they have no seeds of
their own, and no stage can begin inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

from torch import nn

from lockstep.compiled_wrapper import remove_wrappers
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.model.description import describe_value

__all__ = [
    "check_blocks_of",
    "check_compilation",
    "count_compiled",
    "describe_compilation",
    "find_compiled",
    "is_compiled",
    "is_compiled_in_place",
    "is_plain_call",
]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by `torch.compile(module)` or `module.compile()`."""
    return "dynamo_ctx" in vars(module) or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module was compiled by `module.compile()`."""
    return not is_plain_call(vars(module).get("_compiled_call_impl"))


def is_plain_call(call: Any) -> bool:
    """Return whether what torch calls instead of a module's own call compiles nothing."""
    return call is None or getattr(call, "is_plain", isinstance(call, BuiltinFunctionType))


def find_compiled(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the compiled modules of a model with their names in the model before compilation."""
    for name, module in model.named_modules():
        if is_compiled(module):
            yield remove_wrappers(name), module


def count_compiled(model: nn.Module) -> int:
    """Return the number of modules whose forward is compiled by itself.

    The forward of torch's own containers is not, if they were compiled in place: torch.compile
    compiles their children.
    """
    compiled: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        if children and type(module).__module__.startswith("torch.nn."):
            for child in children:
                visit(child)
        else:
            compiled.add(module)

    for _, module in find_compiled(model):
        visit(module)
    return len(compiled)


def check_compilation(model: nn.Module) -> None:
    """Raise UsageError for a model with a part whose compiled bits would depend on the layout."""
    for name, module in find_compiled(model):
        context = _find_context(module)
        if getattr(context, "_dynamic", None) is True:
            raise UsageError(
                f"{name or 'the model'} is compiled with dynamic=True: one graph then serves "
                "several shapes, and its bits depend on the shapes that a rank sees first; "
                "compile it with dynamic=False or leave dynamic out"
            )
        options = getattr(_find_backend(context), "config", {})
        if options.get("deterministic") is False:
            raise UsageError(
                f"{name or 'the model'} is compiled with options={{'deterministic': False}}: "
                "inductor then chooses kernels by their speed, which differs between ranks; leave "
                "the option out"
            )


def check_blocks_of(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise LayoutError if a block is a part of a compiled module."""
    compiled = [name for name, _ in find_compiled(model)]
    for block in map(remove_wrappers, blocks):
        for name in compiled:
            if block != name and f"{block}.".startswith(f"{name}." if name else ""):
                raise LayoutError(
                    f"block {block} is a part of {name or 'the model'}, which is compiled, so it "
                    "is not called by itself: compile the blocks one by one instead, for instance "
                    "by block.compile()"
                )


def describe_compilation(model: nn.Module) -> dict[str, str]:
    """Describe how the parts of a model are compiled: backend and options."""
    entries = {}
    for name, module in find_compiled(model):
        context = _find_context(module)
        backend = _find_backend(context)
        kind = getattr(backend, "compiler_name", None)
        if kind not in ("inductor", "aotinductor"):
            kind = describe_value(getattr(backend, "compiler_fn", backend))
        options = getattr(backend, "config", None) or getattr(backend, "kwargs", {})
        entries[f"torch.compile({name or 'model'})"] = ", ".join(
            [
                kind,
                *(f"{key}={describe_value(value)}" for key, value in sorted(options.items())),
                f"fullgraph={getattr(context, 'fullgraph', False)}",
            ]
        )
    return entries


def _find_context(module: nn.Module) -> Any:
    """Return the compiler's context of a compiled module."""
    context: Any = vars(module).get("dynamo_ctx")
    wrapper: Any = vars(module).get("_compiled_call_impl")
    if context is None and wrapper is not None:
        variables = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
        context = {name: cell.cell_contents for name, cell in variables}.get("self")
    return context


def _find_backend(context: Any) -> Any:
    """Return the backend of a context, without the compiler's wrappers."""
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend
