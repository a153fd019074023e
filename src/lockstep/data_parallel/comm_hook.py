"""Communication hooks: buckets that user code averages.

A hook is called as torch's DistributedDataParallel calls it: `hook(state, bucket)` returns
a future of the bucket's means. The hook of the next bucket is called when the previous future is
done, so that hooks with several exchanges make them in the same order on all ranks.

    launch 0   hook 0 ───────────────> means 0
    launch 1   (compute)               hook 1 ───────────────> means 1
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import Bucket, parts
from lockstep.comm.shared_memory import empty_shared
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node

__all__ = ["CommHook", "CommHookReduction", "GradBucket"]


class GradBucket:
    """The bucket that a hook receives, with the methods of `torch.distributed.GradBucket`.

    torch's own class cannot be constructed in Python. `buffer()` is a vector of all gradients,
    each on a 64-byte boundary with zeros between them; `gradients()` are views of it in the shapes
    of `parameters()`. The gradient of a parameter without one is zeros.
    """

    def __init__(
        self, bucket: Bucket, index: int, last: bool, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._bucket, self._index, self._last = bucket, index, last
        self._parameters = parameters
        shared = parameters[bucket.members[0].index].device.type == "cpu"
        device = parameters[bucket.members[0].index].device
        self.memory = (
            empty_shared(bucket.length, dtype=bucket.dtype)
            if shared
            else torch.empty(bucket.length, dtype=bucket.dtype, device=device)
        ).zero_()
        self._buffer = self.memory

    def index(self) -> int:
        """Return the index of the bucket, 0 for the one that is averaged first."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Return the vector of all gradients; it may be written to."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer for this backward pass."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer, in memory order."""
        return [
            self._buffer[member.offset : member.offset + member.numel].view(parameter.shape)
            for member, parameter in zip(self._bucket.members, self.parameters(), strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the same order."""
        return [self._parameters[member.index] for member in self._bucket.members]


CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class CommHookReduction:
    """Averages one bucket with a hook; has the methods of `ReproducibleAllReduce`."""

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        last: bool,
        parameters: Sequence[torch.Tensor],
        comm_hook: CommHook,
        state: object,
        previous: CommHookReduction | None,
    ) -> None:
        self._layout, self._previous = bucket, previous
        self._comm_hook, self._state = comm_hook, state
        self._bucket = GradBucket(bucket, index, last, parameters)
        self._future: torch.futures.Future[Any] | None = None
        self._means: torch.Tensor | None = None

    def launch(
        self,
        held: Mapping[Node, Mapping[int, torch.Tensor | None]],
        unused: Container[int] = (),
    ) -> None:
        """Copy the gradients into the bucket, zeros if absent, and call the hook."""
        (values,) = held.values()
        memory = self._bucket.memory
        for member in self._layout.members:
            part, value = memory[member.offset : member.offset + member.numel], values[member.index]
            if value is None:
                part.zero_()
            elif value.data_ptr() != part.data_ptr():
                part.copy_(in_memory_order(value))
        self._bucket.set_buffer(memory)
        if self._previous is not None:
            self._previous.combine()
        self._future = self._comm_hook(self._state, self._bucket)

    def combine(self) -> None:
        """Wait for the hook's means; only then may the next bucket's hook be called."""
        if self._future is None:
            return
        with Waiting("averaging gradients by a hook"):
            means = self._future.wait()
        self._future = None
        self._means = means if isinstance(means, torch.Tensor) else means[0]

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Return (index, mean) for every member; the means are views of the hook's result."""
        self.combine()
        means, self._means = self._means, None
        assert means is not None
        means = means.view(-1).to(self._layout.dtype)
        return parts(self._layout, means, [True] * len(self._layout.members))
