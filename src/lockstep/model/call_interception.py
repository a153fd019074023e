"""Functions that run around the calls of modules, without torch's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.kernel.rng_scopes import ModuleHooks, WatchedModule
from lockstep.model.compilation import is_plain_call

__all__ = ["InterceptedCalls"]

CALL = "_compiled_call_impl"
"""The attribute with what torch calls instead of a module's own call."""


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
        self._attributes = [vars(module) for module, _, _ in self._watched]
        self._replaced: list[Any] = [None] * len(self._watched)
        self._calls = [_make_call(*entry, None) for entry in self._watched]

    def install(self) -> None:
        """Begin to call the functions."""
        if self._hooks is not None:
            self._hooks.install()
        for number, attributes in enumerate(self._attributes):
            replaced = attributes.get(CALL)
            if replaced is not self._replaced[number]:  # compiled in place since the last step
                self._replaced[number] = replaced
                self._calls[number] = _make_call(*self._watched[number], replaced)
            attributes[CALL] = self._calls[number]

    def remove(self) -> None:
        """Stop calling them."""
        if self._hooks is not None:
            self._hooks.remove()
        # In reverse order: the last module may be one of the others, too.
        for attributes, replaced in zip(self._attributes[::-1], self._replaced[::-1], strict=True):
            if replaced is None:
                attributes.pop(CALL, None)
            else:
                attributes[CALL] = replaced


def _make_call(
    module: nn.Module,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    replaced: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """Return a call of a module, or the call that is replaced, between two functions."""
    if replaced is None and reason_unavailable() is None:
        native_call: Callable[..., Any] = load_native().make_module_call(module, before, after)
        return native_call

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = (replaced or module._call_impl)(*args, **kwargs)
        if after is not None:
            after()
        return output

    vars(call)["is_plain"] = is_plain_call(replaced)
    return call
