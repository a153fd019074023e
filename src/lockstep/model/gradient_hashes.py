"""Hashes of the gradients of a repeated micro-batch, which hold one gradient at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from lockstep.checksum import checksum
from lockstep.malloc import returning_large_blocks
from lockstep.model.backward_hooks import may_read_gradients, noticing_callbacks

__all__ = ["NO_HASHES", "LateCallbackError", "hash_gradients", "hashing_gradients"]

NO_HASHES: Mapping[str, int] = MappingProxyType({})


def hash_gradients(
    parameters: Iterable[tuple[str, torch.Tensor]], hashed: Mapping[str, int] = NO_HASHES
) -> dict[str, int]:
    """Return the hashes of the gradients in `.grad` by name, with those that were freed.

    Args:
        parameters: The parameters by name.
        hashed: The hashes of the gradients that were freed.
    """
    return {
        name: hashed[name] if parameter.grad is None else checksum(parameter.grad)
        for name, parameter in parameters
        if name in hashed or parameter.grad is not None
    }


class LateCallbackError(Exception):
    """A callback was queued for the end of backward when gradients were freed already."""


@contextmanager
def hashing_gradients(
    parameters: Iterable[tuple[str, torch.Tensor]],
    roots: Iterable[torch.Tensor],
    modules: Iterable[nn.Module],
) -> Iterator[dict[str, int]]:
    """Yield the hashes of gradients by name; each gradient is freed as soon as it is complete.

    The gradients of the step are held meanwhile: a repetition that held its own, too, would need
    as much memory again. No gradient is freed, and none is among the hashes, if something may
    read or change it later: hooks, a callback at the end of backward, or a function of the user's
    own, which may run a backward pass in its backward, as reentrant checkpoints do.

    Args:
        parameters: The parameters by name; their `.grad` is None.
        roots: Where the backward pass in the body begins.
        modules: The modules that are called.

    Raises:
        LateCallbackError: A callback was queued after the first gradient. The body has to be run
            again outside of this context.
    """
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    hashes: dict[str, int] = {}
    hooks: list[Any] = []
    if not named or _has_own_functions(roots) or may_read_gradients(modules, dict(named).values()):
        yield hashes
        return
    is_late = False

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert name not in hashes
        hashes[name] = checksum(parameter.grad)
        parameter.grad = None

    def keep_gradients() -> None:
        nonlocal is_late
        is_late |= bool(hashes)
        while hooks:
            hooks.pop().remove()

    hooks += [one.register_post_accumulate_grad_hook(partial(note, name)) for name, one in named]
    try:
        with noticing_callbacks(keep_gradients), returning_large_blocks():
            yield hashes
    except Exception as error:
        if is_late:  # it has missed a gradient, perhaps
            raise LateCallbackError from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
    if is_late:
        raise LateCallbackError


def _has_own_functions(roots: Iterable[torch.Tensor]) -> bool:
    """Return whether a graph contains a `torch.autograd.Function`."""
    seen = set[Any]()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        stack += [before for before, _ in node.next_functions]
    return False
