"""Functions that run around the calls of a module, without torch's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lockstep.kernel.rng_scopes import hook_calls

__all__ = ["intercept_calls"]


def intercept_calls(
    module: nn.Module, before: Callable[[], None] | None, after: Callable[[], None] | None
) -> Callable[[], None]:
    """Call `before` and `after` around every call of `module`, until the result is called."""
    if "dynamo_ctx" in vars(module):  # torch.compile(module) forwards attributes to its module
        return hook_calls(module, before, after)

    # Without hooks: torch calls modules with hooks on a slower path, and would recompile the hooks
    # of a module that was compiled in place for every seed.
    attributes = vars(module)
    replaced = attributes.get("_compiled_call_impl")
    inner = module._call_impl if replaced is None else replaced

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = inner(*args, **kwargs)
        if after is not None:
            after()
        return output

    def remove_call() -> None:
        if replaced is None:
            del attributes["_compiled_call_impl"]
        else:
            attributes["_compiled_call_impl"] = replaced

    # Whether a module is compiled in place is asked of its call (`lockstep.model.compilation`).
    vars(call)["is_plain"] = replaced is None or getattr(replaced, "is_plain", False)
    attributes["_compiled_call_impl"] = call
    return remove_call
