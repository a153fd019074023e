"""Communication hooks: a bucket that is averaged as the user says.

A hook is called as DistributedDataParallel calls it: `hook(state, bucket)` returns a
future of the bucket's means. The next bucket's hook is called after the one before is
done, so that a hook of several exchanges makes them in one order on all ranks.

    launch 0   hook 0 ───────────────> means 0
    launch 1   (compute)               hook 1 ───────────────> means 1
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from lockstep.comm.bucket import Bucket, parts
from lockstep.comm.dense import in_memory_order
from lockstep.comm.memory import empty
from lockstep.comm.tree import Node

__all__ = ["GradBucket", "Hook", "HookedSum"]


class GradBucket:
    """What a hook is given: the calls of `torch.distributed.GradBucket`, which no one can make.

    `buffer()` is a vector of all gradients, each on a 64-byte boundary with zeros
    between, `gradients()` are its views in the shapes of `parameters()`. A parameter
    without a gradient has zeros there.
    """

    def __init__(
        self, bucket: Bucket, index: int, last: bool, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._bucket, self._index, self._last = bucket, index, last
        self._parameters = parameters
        shared = parameters[bucket.members[0].index].device.type == "cpu"
        device = parameters[bucket.members[0].index].device
        self.memory = (
            empty(bucket.length, dtype=bucket.dtype)
            if shared
            else torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        ).zero_()
        self._buffer = self.memory

    def index(self) -> int:
        """Return the bucket's number, 0 for the one that is averaged first."""
        return self._index

    def is_last(self) -> bool:
        """Tell whether this bucket ends the backward."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Return the vector of all gradients; it may be written to."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of the buffer, for this backward."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer, in the order of memory."""
        return [
            self._buffer[each.offset : each.offset + each.numel].view(shape.shape)
            for each, shape in zip(self._bucket.members, self.parameters(), strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the same order."""
        return [self._parameters[member.index] for member in self._bucket.members]


Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class HookedSum:
    """One bucket that a hook averages; the calls of `lockstep.comm.exact.ExactSum`."""

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        last: bool,
        parameters: Sequence[torch.Tensor],
        hook: Hook,
        state: object,
        before: HookedSum | None,
    ) -> None:
        self._plan, self._hook, self._state, self._before = bucket, hook, state, before
        self._bucket = GradBucket(bucket, index, last, parameters)
        self._future: torch.futures.Future[Any] | None = None
        self._means: torch.Tensor | None = None

    def launch(
        self, held: Mapping[Node, Mapping[int, torch.Tensor | None]], stale: Container[int] = ()
    ) -> None:
        """Bring the gradients into the bucket, zeros where there is none, and call the hook."""
        (values,) = held.values()
        memory = self._bucket.memory
        for member in self._plan.members:
            part, value = memory[member.offset : member.offset + member.numel], values[member.index]
            if value is None:
                part.zero_()
            elif value.data_ptr() != part.data_ptr():
                part.copy_(in_memory_order(value))
        self._bucket.set_buffer(memory)
        if self._before is not None:
            self._before.combine()
        self._future = self._hook(self._state, self._bucket)

    def combine(self) -> None:
        """Wait for the hook's means: the next bucket's hook must not overtake them."""
        if self._future is None:
            return
        means = self._future.wait()
        self._future = None
        self._means = means if isinstance(means, torch.Tensor) else means[0]

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Return (index, mean) of every member, views of what the hook gave."""
        self.combine()
        means, self._means = self._means, None
        assert means is not None
        means = means.view(-1).to(self._plan.dtype)
        return parts(self._plan, means, [True] * len(self._plan.members))
