"""Versioned parameters: one copy per host for all ranks, never in the middle of a step.

    memory that all ranks share      version 0 | w | b | ...      version 1 | w | b | ...
    step t begins with version 0     everybody computes with it, nobody writes it

    rank 0                             rank 1
    (0) begun[0] = t                   begun[1] = t
    (1) writes its pieces into 1       writes its pieces into 1
    (2) prepared[0] = t                prepared[1] = t
    (3) ── exchange: did all go well? ──────────────
    (4) decided: open -> committed     the first rank sets the word
    (5) its parameters are version 1   its parameters are version 1

    step t + 1 writes version 0, after an exchange: by then everybody has left it

A rank that learns in (3) that another one died, or that waits until the timeout, decides by
the words alone: if all had prepared, the step is committed, and otherwise it is
aborted. The word is set once, by compare-and-exchange, so that all who are left
conclude alike, and what the dead rank wrote is there, in shared memory. So the
parameters are those before the step or those after it, on every rank the same.

The state of the optimizer has one version. If a step is aborted, it is that before the step
unless some rank has begun to write, which `begun` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.comm.bucket import ALIGNMENT
from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.memory_format import in_layout_of, in_memory_order
from lockstep.comm.shared_memory import (
    atomic_compare_exchange,
    atomic_load,
    atomic_store,
    create_group_tensor,
)
from lockstep.elastic.membership import membership
from lockstep.errors import WorkError
from lockstep.launcher.failure_attribution import is_lost_peer

__all__ = ["VersionedParameters", "allocate", "pass_point"]


def pass_point(point: str) -> None:
    """Do nothing; tests replace it to end a rank at a point of the protocol."""


def allocate(
    sizes: Sequence[tuple[int, torch.dtype]], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return a vector of zeros for each (elements, dtype), shared by all ranks, 64-byte aligned."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
    for dtype in dict.fromkeys(dtype for _, dtype in sizes):
        step = ALIGNMENT // dtype.itemsize
        numbers = [n for n, (_, each) in enumerate(sizes) if each == dtype]
        rooms = [-(-sizes[n][0] // step) * step for n in numbers]
        vectors = create_group_tensor(max(sum(rooms), 1), dtype, group)[: sum(rooms)].split(rooms)
        for number, vector in zip(numbers, vectors, strict=True):
            found[number] = vector[: sizes[number][0]]
    return found


class VersionedParameters:
    """Two versions of `parameters`, which become views of the first one.

    A collective call; the parameters must be equal on all ranks. Those in `stepped`
    have a second version, the others one that is never written.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        stepped: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._parameters, self._group = list(parameters), group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._words = create_group_tensor(
            2 * self._ranks + 2, torch.int64, group
        )  # prepared ..., begun ..., decided: of odd transactions, of even ones
        self._transaction = 0
        self._is_aborted = False
        self.committed = False  # the last step that was written
        first = allocate([(each.numel(), each.dtype) for each in parameters], group)
        if self._rank == 0:
            for vector, parameter in zip(first, parameters, strict=True):
                vector.copy_(in_memory_order(parameter.detach()))
        all_gather_bytes(b"", "sharing the parameters", group)
        for vector, parameter in zip(first, parameters, strict=True):
            parameter.data = in_layout_of(vector, parameter)
        self._now: list[torch.Tensor] = first
        self._next: dict[int, torch.Tensor] = {}
        self.add_second(stepped)

    def add_second(self, numbers: Sequence[int]) -> None:
        """Give the parameters of these numbers a second version; a collective call."""
        kinds = [(self._now[number].numel(), self._now[number].dtype) for number in numbers]
        self._next |= dict(zip(numbers, allocate(kinds, self._group), strict=True))

    @contextmanager
    def exclusive(self, about: str) -> Iterator[None]:
        """Wait until nobody uses the parameters, and after the body until all have written."""
        all_gather_bytes(b"", f"about to begin {about}", self._group)
        yield
        all_gather_bytes(b"", f"done with {about}", self._group)

    def current(self, index: int) -> torch.Tensor:
        """Return a parameter's elements as they are, in memory order."""
        return self._now[index]

    def next(self, index: int) -> torch.Tensor:
        """Return where its elements after this step are written."""
        return self._next[index]

    def write_next(self, body: Callable[[], None], about: str) -> None:
        """Let `body` write this rank's pieces of the next version, then commit on all ranks.

        Raises what `body` raised, WorkError on the other ranks, or what the exchange
        raised; by then the parameters are those that all ranks agree on. In an elastic run,
        the loss of a rank is no error of a step that is committed.
        """
        self._transaction, self.committed = self._transaction + 1, False
        error: Exception | None = None
        try:
            if self._begin():
                body()
            pass_point("written")
            atomic_store(self._words, self._rank, self._transaction)
            pass_point("prepared")
        except Exception as failure:
            error = failure
        try:
            told = f"{type(error).__name__}: {error}" if error else ""
            failures = all_gather_bytes(told.encode(), about, self._group)
            pass_point("agreed")
        except Exception as lost:
            self._decide()
            if not (self.committed and membership() is not None and is_lost_peer(lost)):
                raise
            return
        self._decide()
        if error is not None:
            raise error
        for rank, each in enumerate(failures):
            if each:
                raise WorkError(f"rank {rank}: {each.decode()}; the parameters are as before")

    def has_whole_state(self) -> bool:
        """Return whether the optimizer state in shared memory is that of a single step, too.

        For a rank that has lost another one, outside of `write_next`: a step that is not decided
        is aborted, so that no rank begins to write any more.
        """
        transaction = self._transaction + (not self._is_aborted)
        self._set_decision(transaction, can_commit=False)
        begun = (atomic_load(self._words, self._ranks + rank) for rank in range(self._ranks))
        return all(each < transaction for each in begun)

    def _begin(self) -> bool:
        """Do (0); return whether this rank may write, because the step is not aborted."""
        index = self._ranks + self._rank
        # Not a store: who aborts the step afterwards must see it.
        atomic_compare_exchange(
            self._words, index, atomic_load(self._words, index), self._transaction
        )
        return atomic_load(self._words, self._decision(self._transaction)) < 2 * self._transaction

    def _decision(self, transaction: int) -> int:
        """Return the word with the decision on a step.

        Nobody is two steps ahead, so a rank that is late finds the decision on its own step.
        """
        return 2 * self._ranks + transaction % 2

    def _set_decision(self, transaction: int, can_commit: bool) -> bool:
        """Decide on a step unless that was done, and return whether it is committed."""
        committed, aborted = 2 * transaction, 2 * transaction + 1
        index = self._decision(transaction)
        before = atomic_load(self._words, index)
        while before < committed:
            wanted = committed if can_commit else aborted
            found = atomic_compare_exchange(self._words, index, before, wanted)
            before = wanted if found == before else found
        return before == committed

    def _decide(self) -> None:
        """Do (4) and (5): decide, or learn what was decided, and follow it."""
        ranks = range(self._ranks)
        everybody = all(atomic_load(self._words, rank) == self._transaction for rank in ranks)
        self.committed = self._set_decision(self._transaction, everybody)
        self._is_aborted = not self.committed
        pass_point("decided")
        if self.committed:
            self._switch()
        pass_point("settled")

    def _switch(self) -> None:
        for index, vector in self._next.items():
            parameter = self._parameters[index]
            self._next[index], self._now[index] = self._now[index], vector
            parameter.data = in_layout_of(vector, parameter)
