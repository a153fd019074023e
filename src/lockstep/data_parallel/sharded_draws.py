"""Random numbers in sharded tensors, as in the whole tensor.

    whole       | r0 r1 r2 r3 r4 r5 |     the numbers of a seeded generator, in order
    rank 0      | r0 r1 r2 |              each rank draws all of them, and keeps its rows
    rank 1               | r3 r4 r5 |

torch draws as many numbers as a rank has elements: on a CPU, the rows of all ranks would get the
same numbers, and the generators would be elsewhere than after drawing for the whole tensor. A
script that initializes weights between steps, or an optimizer that draws, has the bits of one rank.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from lockstep.kernel.errors import UsageError
from lockstep.sharded_tensors import local_part, local_rows

__all__ = ["draw_alike"]

_meshes: WeakSet[Any] = WeakSet()
"""The meshes of models that Lockstep trains; other sharded tensors stay as in torch."""


def draw_alike(mesh: Any) -> None:
    """Draw the numbers of whole tensors for those that are sharded over a mesh."""
    from torch.distributed.tensor import DTensor

    aten = torch.ops.aten
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    filling = (aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float)
    alike = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
             aten.randint_like.low_dtype)  # fmt: skip
    refused = (aten.bernoulli.default, aten.native_dropout.default)
    for operators, draw in ((filling, _fill), (alike, _make_like), (refused, _refuse)):
        for operator in operators:
            if operator not in handlers:
                handlers[operator] = _Handler(draw, handlers)
    _meshes.add(mesh)


class _Handler:
    """The function that torch calls for an operator on sharded tensors."""

    def __init__(self, draw: Any, handlers: dict[Any, Any]) -> None:
        self._draw = draw
        self._handlers = handlers

    def __call__(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if args[0].device_mesh in _meshes:
            return self._draw(operator, args, kwargs)
        del self._handlers[operator]
        try:
            return operator(*args, **kwargs)
        finally:
            self._handlers[operator] = self


def _fill(operator: Any, args: Any, kwargs: Any) -> Any:
    """Fill a tensor with its rows of the numbers of the whole."""
    sharded, *others = args
    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=local_part(sharded).device)
    operator(whole, *others, **kwargs)
    local_part(sharded).copy_(whole[_find_rows(sharded)])
    return sharded


def _make_like(operator: Any, args: Any, kwargs: Any) -> Any:
    """Return a tensor with its rows of the numbers of the whole."""
    from torch.distributed.tensor import DTensor

    sharded, *others = args
    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=local_part(sharded).device)
    drawn = operator(whole, *others, **kwargs)
    rows = drawn[_find_rows(sharded)].clone()
    mesh = sharded.device_mesh
    placements = sharded.placements
    shape = drawn.shape
    stride = drawn.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def _refuse(operator: Any, args: Any, kwargs: Any) -> Any:
    raise UsageError(
        f"{operator.name()} on a sharded tensor of shape {tuple(args[0].shape)} would draw other "
        "random numbers on other numbers of ranks: draw them with torch.rand_like(tensor), or "
        "before the model is sharded"
    )


def _find_rows(sharded: Any) -> slice:
    """Return the rows that this rank has; all of them if every rank has the whole tensor."""
    last = sharded.placements[-1]
    if not all(one.is_replicate() for one in sharded.placements[:-1]) or not (
        last.is_replicate() or last.is_shard(0)
    ):
        raise UsageError(
            f"random numbers cannot be drawn in a tensor with the placements {sharded.placements}: "
            "draw them in the parameter itself"
        )
    return slice(None) if last.is_replicate() else local_rows(sharded)
