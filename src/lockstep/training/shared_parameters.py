"""Shared parameters: one copy per host, which all ranks read and write in place.

    memory that all ranks share    | w | b | ...        of parameters, and of the optimizer's state
    forward and backward           every rank reads all of it
    the optimizer's step           every rank writes its pieces, between two exchanges

`redo_log.py` has the protocol of the step, which a killed rank does not leave half done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.comm.bucket import ALIGNMENT
from lockstep.comm.collectives import broadcast_bytes
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.shared_memory import create_group_tensor
from lockstep.kernel.norm import in_memory_order

__all__ = ["SharedParameters", "allocate"]


def allocate(
    sizes: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return a vector of zeros per (elements, dtype), shared by all ranks and 64-byte aligned."""
    views: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
    for dtype in dict.fromkeys(dtype for _, dtype in sizes):
        step = ALIGNMENT // dtype.itemsize
        numbers = [n for n, (_, element_type) in enumerate(sizes) if element_type == dtype]
        rooms = [-(-sizes[n][0] // step) * step for n in numbers]
        vectors = create_group_tensor(max(sum(rooms), 1), dtype, group)[: sum(rooms)].split(rooms)
        for number, vector in zip(numbers, vectors, strict=True):
            views[number] = vector[: sizes[number][0]]
    return views


class SharedParameters:
    """Parameters in memory that all ranks share; `parameters` become views of it.

    Constructing it is a collective call; the parameters must be equal on all ranks.

    Attributes:
        vectors: The elements of each parameter, in memory order.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self.vectors = allocate(
            [(parameter.numel(), parameter.dtype) for parameter in parameters], group
        )
        if dist.get_rank(group) == 0:
            for vector, parameter in zip(self.vectors, parameters, strict=True):
                vector.copy_(in_memory_order(parameter.detach()))
        broadcast_bytes(b"", "sharing the parameters", group)
        for vector, parameter in zip(self.vectors, parameters, strict=True):
            parameter.data = in_layout_of(vector, parameter)

    @contextmanager
    def exclusive(self, about: str) -> Iterator[None]:
        """Wait for all ranks before the body, which may write, and again after it."""
        broadcast_bytes(b"", f"about to begin {about}", self._group)
        yield
        broadcast_bytes(b"", f"done with {about}", self._group)
