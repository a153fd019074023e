"""Hashes of the gradients of a repeated micro-batch, which hold one gradient at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from lockstep.checksum import checksum
from lockstep.launcher.malloc import returning_large_blocks

__all__ = ["NO_HASHES", "hash_gradients", "hashing_gradients"]

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


@contextmanager
def hashing_gradients(
    parameters: Iterable[tuple[str, torch.Tensor]], roots: Iterable[torch.Tensor]
) -> Iterator[dict[str, int]]:
    """Yield the hashes of gradients by name; each gradient is freed as soon as it is complete.

    The gradients of the step are held meanwhile: a repetition that held its own, too, would need
    as much memory again. A function of the user's own may run a backward pass in its backward, as
    reentrant checkpoints do, and gradients may then come in several parts: if there is one, no
    gradient is freed, and none is among the hashes.

    Args:
        parameters: The parameters by name; their `.grad` is None.
        roots: Where the backward pass in the body begins.
    """
    hashes: dict[str, int] = {}
    hooks: list[Any] = []

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert name not in hashes
        hashes[name] = checksum(parameter.grad)
        parameter.grad = None

    if not _has_own_functions(roots):
        for name, parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(note, name))
                hooks.append(hook)
    try:
        with returning_large_blocks() if hooks else nullcontext():
            yield hashes
    finally:
        for hook in hooks:
            hook.remove()


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
