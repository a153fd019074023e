"""Functions that run around the calls of modules, without torch's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lockstep.kernel.rng_scopes import ModuleHooks, WatchedModule

__all__ = ["InterceptedCalls"]


class InterceptedCalls:
    """Calls the functions of watched modules, as `ModuleHooks` does, in less time.

    torch calls modules with hooks on a slower path, and would recompile the hooks of a module that
    was compiled in place for every seed. Here the call that torch makes instead of the module's
    own is replaced. The replacements are made once and installed in every step.

    Args:
        watched: The modules, and the functions to call before and after each of their calls.
    """

    def __init__(self, watched: Sequence[WatchedModule]) -> None:
        # torch.compile(module) forwards attributes to its module.
        compiled = [entry for entry in watched if "dynamo_ctx" in vars(entry[0])]
        self._hooks = ModuleHooks(compiled) if compiled else None
        self._watched = [entry for entry in watched if entry not in compiled]
        self._replaced: list[Any] = []
        self._calls: list[Callable[..., Any]] = []

    def install(self) -> None:
        """Begin to call the functions."""
        if self._hooks is not None:
            self._hooks.install()
        for number, (module, before, after) in enumerate(self._watched):
            attributes = vars(module)
            replaced = attributes.get("_compiled_call_impl")
            if number == len(self._calls):
                self._replaced.append(replaced)
                self._calls.append(_make_call(module, replaced, before, after))
            elif replaced is not self._replaced[number]:  # compiled in place since the last step
                self._replaced[number] = replaced
                self._calls[number] = _make_call(module, replaced, before, after)
            attributes["_compiled_call_impl"] = self._calls[number]

    def remove(self) -> None:
        """Stop calling them."""
        if self._hooks is not None:
            self._hooks.remove()
        # In reverse order: the last module may be one of the others, too.
        for (module, _, _), replaced in zip(self._watched[::-1], self._replaced[::-1], strict=True):
            if replaced is None:
                vars(module).pop("_compiled_call_impl", None)
            else:
                vars(module)["_compiled_call_impl"] = replaced


def _make_call(
    module: nn.Module,
    replaced: Callable[..., Any] | None,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
) -> Callable[..., Any]:
    """Return a call of a module, or the call that is replaced, between two functions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = (replaced or module._call_impl)(*args, **kwargs)
        if after is not None:
            after()
        return output

    # Whether a module is compiled in place is asked of its call (`lockstep.model.compilation`).
    vars(call)["is_plain"] = replaced is None or getattr(replaced, "is_plain", False)
    return call
