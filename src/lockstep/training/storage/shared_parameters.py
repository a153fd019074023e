"""Shared parameters: one copy per host, which all ranks read and write in place.

    memory that all ranks share    | w | b | ...        of parameters, and of the optimizer's state
    forward and backward           every rank reads all of it
    the optimizer's step           every rank writes its pieces, between two exchanges

A step is written by all ranks or by none, unless a rank is lost while they write:

    barrier                   a rank is lost: aborted, nothing is written
    open -> committed         one word for all ranks, so that they decide alike
    each rank writes          a rank is lost, or its optimizer raises: the state is torn
    exchange: all are done

A torn state is not used, saved or handed over until a whole one has been loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT
from lockstep.comm.collectives import all_reduce_messages, broadcast_bytes
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.shared_memory import (
    atomic_compare_exchange,
    atomic_load,
    atomic_store,
    create_group_tensor,
)
from lockstep.kernel.errors import WorkError
from lockstep.kernel.norm import in_memory_order

__all__ = ["SharedParameters", "allocate"]

TORN = (
    "the shared parameters are only partly updated by a step of the optimizer, or by loading a "
    "state: load a saved state (trainer.load_state_dict), or run again with --resume"
)


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
        parameters: The parameters.
        vectors: The elements of each parameter, in memory order.
        is_committed: Whether the last step was committed, so that ranks have begun to write.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self._step = 0
        self.is_committed = False
        self.parameters = list(parameters)
        # Of the latest decision (2 * step if it is committed, one more if it is aborted); torn.
        self._words = create_group_tensor(2, torch.int64, group)
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
    def writing(self, about: str) -> Iterator[None]:
        """Return the context in which every rank writes its pieces; a collective call.

        Args:
            about: A description of the step, for messages.

        Raises:
            WorkError: The body raised on a rank. Raised on every rank.
        """
        # Counted from the last decision, since this rank may have been interrupted before it.
        self._step = atomic_load(self._words, 0) // 2 + 1
        self.is_committed = False
        lost = None
        failure = None
        try:
            with Waiting(f"barrier, {about}"):
                dist.barrier(self._group)
        except Exception as error:
            lost = error
        self.is_committed = self._decide(lost is None)
        if not self.is_committed:
            raise lost or WorkError(f"another rank gave up the step {about}")
        try:
            yield
        except Exception as error:
            failure = error
        rank = dist.get_rank(self._group)

        def choose_first(left: str, right: str) -> str:
            return left or right

        told = f"rank {rank}: {type(failure).__name__}: {failure}" if failure else ""
        try:
            told = all_reduce_messages(
                told, choose_first, str.encode, bytes.decode, about, self._group
            )
        except Exception:
            atomic_store(self._words, 1, 1)
            raise
        if told:
            atomic_store(self._words, 1, 1)
            raise WorkError(f"{told}, {about}: {TORN}") from failure

    def _decide(self, can_commit: bool) -> bool:
        """Decide the step unless another rank has, and return whether it is committed."""
        committed = 2 * self._step
        before = atomic_load(self._words, 0)
        if before < committed:
            wanted = committed if can_commit else committed + 1
            current = atomic_compare_exchange(self._words, 0, before, wanted)
            before = wanted if current == before else current
        return before == committed

    def is_whole(self) -> bool:
        """Return whether parameters and optimizer state are those of a single step."""
        return not atomic_load(self._words, 1)

    def require_whole(self) -> None:
        """Raise WorkError unless parameters and optimizer state are those of a single step."""
        if not self.is_whole():
            raise WorkError(TORN)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return the context in which a rank may write any of the parameters and the state."""
        broadcast_bytes(b"", "about to begin loading a state", self._group)
        yield
        atomic_store(self._words, 1, 1)  # undone below, unless a rank is lost before
        broadcast_bytes(b"", "done with loading a state", self._group)
        atomic_store(self._words, 1, 0)
