"""The layout as a step needs it: the place of this rank, its arithmetic, messages of all ranks.

The engine implements these protocols; the kernel imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import BufferExchange
from lockstep.kernel.loss_scale import LossScale
from lockstep.kernel.tree import Node

__all__ = ["Messages", "StepLayout"]

Value = TypeVar("Value")


class Messages(Protocol):
    """Messages between all ranks of a training, each a collective call.

    `about` describes the call; an error is raised if it differs between ranks. `remark` is added to
    that error.
    """

    def gather(self, message: bytes, about: str, remark: str = "") -> list[bytes]:
        """Return the messages of all ranks."""

    def reduce(
        self,
        value: Value,
        merge: Callable[[Value, Value], Value],
        pack: Callable[[Value], bytes],
        unpack: Callable[[bytes], Value],
        about: str,
        remark: str = "",
    ) -> Value:
        """Return the merged values of all ranks, in rank order."""

    def require_same_batch(self, batch: str, about: str, step: int, remark: str) -> None:
        """Raise DisagreementError, on every rank, if the identity of the batch differs."""


class StepLayout(Protocol):
    """The layout, the loss and the arithmetic of a trainer, as seen by this rank."""

    rank: int
    replica: int
    replicas: int
    stages: int
    position: int
    device: torch.device
    threads: int
    loss: Callable[..., Any] | None
    loss_weight: Callable[[Any], float] | None
    loss_scale: LossScale | None
    autocast_dtype: torch.dtype | None
    group: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None
    messages: Messages

    @property
    def make_buffer_exchange(self) -> Callable[[], BufferExchange]:
        """A function that returns the exchange of the ranks that hold the same buffers."""

    def split(self, batch: Any) -> Batch:
        """Return this rank's part of a batch from a loader, or of a whole batch."""

    def assign_nodes(self, leaves: int) -> Sequence[Sequence[Node]]:
        """Return, for each replica, the nodes of the tree that cover its micro-batches."""

    def weigh(self, microbatch: Microbatch, place: str) -> float:
        """Return what `loss_weight` returns for a micro-batch; `place` is for messages."""
