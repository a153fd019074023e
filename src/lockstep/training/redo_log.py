"""The step log: an optimizer step on shared parameters is finished even if a rank is killed.

Every rank steps its own chunks of the parameters in place. Words in memory that all ranks share
contain the progress of each rank, and the decision on the step:

    prepare    reduce, norm, clip, merge buffers                undone if a rank is lost
    (0)        ready[r] = t                                     the gradients of r are complete
    (1)        barrier
    (2)        decided: open -> committed                       or aborted, if a rank is lost
                                                                and not all are ready
    for each chunk c of rank r:
    (3)          saved area of r <- the chunk;                  saved[r] = (t, c)
    (4)          the optimizer steps the chunk in place;        progress[r] = (t, c + 1)
    (5)        exchange: did all ranks succeed?

Nothing has been written at (2), so an aborted step changes nothing. A committed step is always
completed: if the exchange (5) finds that a rank was lost, a survivor finishes its chunks.

    r is killed   owner[r]: r -> survivor s, by compare-and-exchange
                  saved[r] == (t, c) == progress[r]: s restores chunk c, which r may have stepped
                  s does (4) for it, then (3) and (4) for the chunks that follow
    s is killed   owner[r]: s -> another survivor, which continues from the same words
    the others    wait until all chunks are done, with the timeout of the group

The gradients of r are in memory that its peers have mapped, and step t + 1 overwrites gradients
only after (5). A survivor takes over only when all threads of the process have ended: a process
that is only suspended (SIGSTOP) may continue at any moment.

An optimizer that raises in (4) leaves the step half done, as in a single process. Then `torn` is
set, all ranks raise, and nothing is saved or handed over until a whole state has been loaded.
`torn` is also set if a rank is lost while the ranks load a state.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT
from lockstep.comm.collectives import all_gather_bytes, all_reduce_messages
from lockstep.comm.shared_memory import (
    atomic_compare_exchange,
    atomic_load,
    atomic_store,
    create_group_tensor,
)
from lockstep.kernel.errors import WorkError
from lockstep.launcher.failure_attribution import is_lost_peer
from lockstep.launcher.world import get_timeout

__all__ = ["RedoLog", "count_saved_bytes", "pass_point"]

CHUNKS = 1 << 32
"""An upper bound of chunks per rank: chunk c of step t has the number t * CHUNKS + c."""

TORN = (
    "the shared parameters are only partly updated by a step of the optimizer, or by loading a "
    "state: load a saved state (trainer.load_state_dict), or run again with --resume"
)

POLL_SECONDS = 0.01
"""The interval at which a rank polls the progress of a rank that has taken over chunks."""


def pass_point(point: str) -> None:
    """Do nothing; tests replace it to end a rank at a point of the protocol."""


def count_saved_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes up in a saved chunk."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


class RedoLog:
    """The progress of the ranks of a group in their steps on shared parameters.

    Constructing it is a collective call.

    Attributes:
        is_elastic: Whether a run continues without a rank that is lost.
        is_committed: Whether the last step was committed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self.is_elastic = group, False
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        words = create_group_tensor(4 * self._ranks + 2, torch.int64, group)
        parts = words.split([self._ranks] * 4 + [2])
        self._ready, self._saved, self._progress, self._owner, self._common = parts
        self._areas = torch.empty(self._ranks, 0, dtype=torch.uint8)
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._step, self._chunks, self.is_committed = 0, [0] * self._ranks, False
        self._lost: Exception | None = None
        pids = all_gather_bytes(str(os.getpid()).encode(), "at the processes of the ranks", group)
        self._processes = [_open_process(int(pid)) for pid in pids]
        opened = [descriptor for descriptor in self._processes if descriptor is not None]
        weakref.finalize(self, _close_all, opened)

    def reserve(self, chunk_bytes: int) -> None:
        """Allocate memory for saved chunks of up to `chunk_bytes`; a collective call."""
        if self._areas.shape[1] < chunk_bytes:
            shape = self._ranks, chunk_bytes
            self._areas = create_group_tensor(shape, torch.uint8, self._group)
        self._views = {}

    # --- a step, from top to bottom ------------------------------------------------------------

    def begin(self, chunks: Sequence[int], about: str) -> None:
        """Do (0) to (2); raise, with nothing written, if the step is not committed.

        Args:
            chunks: The number of chunks of each rank.
            about: A description of the step, for messages.
        """
        # Counted from the last decision, since this rank may have been interrupted before it.
        self._step = atomic_load(self._common, 0) // 2 + 1
        self._chunks, self.is_committed, self._lost = list(chunks), False, None
        atomic_store(self._ready, self._rank, self._step)
        pass_point("ready")
        try:
            with Waiting(f"barrier, {about}"):
                dist.barrier(self._group)
            pass_point("passed")
        except Exception as lost:
            self._lost = lost
        all_ready = all(atomic_load(self._ready, r) == self._step for r in range(self._ranks))
        self.is_committed = self._decide(all_ready)
        pass_point("decided")
        if not self.is_committed:
            raise self._lost or WorkError(f"another rank gave up the step {about}")

    def find_start(self, rank: int) -> tuple[int, bool]:
        """Return the chunk at which a rank has to continue, and whether to restore it first."""
        done = max(atomic_load(self._progress, rank), self._number(0))
        return done - self._number(0), atomic_load(self._saved, rank) == done

    def save(self, rank: int, chunk: int, tensors: Sequence[torch.Tensor]) -> None:
        """Do (3) for a chunk, which consists of these tensors."""
        torch._foreach_copy_(self._saved_chunk(rank, chunk, tensors), list(tensors))
        pass_point("copied")
        atomic_store(self._saved, rank, self._number(chunk))
        pass_point("saved")

    def restore(self, rank: int, chunk: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values that `save` has saved back to these tensors."""
        torch._foreach_copy_(list(tensors), self._saved_chunk(rank, chunk, tensors))
        pass_point("restored")

    def note_progress(self, rank: int, chunk: int) -> None:
        """Note that a chunk is done."""
        pass_point("stepped")
        atomic_store(self._progress, rank, self._number(chunk + 1))
        pass_point("chunk")

    def mark_torn(self) -> None:
        """Note that a chunk was left half updated, or a state half loaded."""
        atomic_store(self._common, 1, 1)

    def finish(self, failure: Exception | None, about: str) -> Iterator[int]:
        """Do (5); yield each rank whose chunks this one has to finish.

        In an elastic run, a step that could be finished raises no error for the loss of a rank.

        Args:
            failure: The error of the optimizer on this rank; None: there is none.
            about: A description of the step, for messages.
        """
        deadline, lost = time.monotonic() + get_timeout(), self._lost
        told = f"rank {self._rank}: {type(failure).__name__}: {failure}" if failure else ""
        pass_point("written")
        if lost is None:
            try:
                told = all_reduce_messages(
                    told,
                    lambda left, right: left or right,
                    str.encode,
                    bytes.decode,
                    about,
                    self._group,
                )
                pass_point("agreed")
            except Exception as error:
                lost = error
        if told:
            raise WorkError(f"{told}, {about}: {TORN}") from failure
        if lost is None:
            return
        yield from self._claim_unfinished(deadline, about)
        pass_point("finished")
        if not self.is_elastic or not is_lost_peer(lost):
            raise lost

    def _claim_unfinished(self, deadline: float, about: str) -> Iterator[int]:
        """Yield dead ranks with unfinished chunks; return when all chunks are done."""
        while unfinished := [r for r in range(self._ranks) if not self._is_finished(r)]:
            if atomic_load(self._common, 1):
                raise WorkError(f"the optimizer failed on another rank, {about}: {TORN}")
            claimed = next((rank for rank in unfinished if self._claim(rank)), None)
            if claimed is not None:
                pass_point("claimed")
                yield claimed
            elif time.monotonic() > deadline:
                raise WorkError(
                    f"rank {self._holder(unfinished[0])} does not continue {about}, and has "
                    "updated only some of its part of the parameters and optimizer state: they are "
                    "complete if it continues; otherwise load a saved state"
                )
            else:
                self._await_death([self._holder(rank) for rank in unfinished])

    # --- afterwards ----------------------------------------------------------------------------

    def has_whole_state(self) -> bool:
        """Return whether parameters and optimizer state are those of a single step.

        An undecided step is aborted, so that no rank can begin to write.
        """
        if atomic_load(self._common, 1):
            return False
        return not self._decide(False) or all(map(self._is_finished, range(self._ranks)))

    def require_whole_state(self) -> None:
        """Raise WorkError unless parameters and optimizer state are those of a single step."""
        if not self.has_whole_state():
            raise WorkError(TORN)

    def mark_whole(self) -> None:
        """Note that all ranks have loaded a whole state; every rank calls it before a step."""
        self._decide(False)
        for rank, chunks in enumerate(self._chunks):
            atomic_store(self._progress, rank, self._number(chunks))
        atomic_store(self._common, 1, 0)

    # --- words ---------------------------------------------------------------------------------

    def _number(self, chunk: int) -> int:
        return self._step * CHUNKS + chunk

    def _decide(self, can_commit: bool) -> bool:
        """Decide the step unless it is decided, and return whether it is committed.

        A later step is decided only after this one is finished or aborted.
        """
        committed, aborted = 2 * self._step, 2 * self._step + 1
        wanted = committed if can_commit else aborted
        before = atomic_load(self._common, 0)
        if self._step and before < committed:
            current = atomic_compare_exchange(self._common, 0, before, wanted)
            before = wanted if current == before else current
        return before == committed

    def _is_finished(self, rank: int) -> bool:
        return atomic_load(self._progress, rank) >= self._number(self._chunks[rank])

    def _saved_chunk(
        self, rank: int, chunk: int, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the memory in which a chunk is saved, as one view per tensor."""
        views = self._views.get((rank, chunk))
        if views is None:
            area, offset, views = self._areas[rank], 0, []
            for tensor in tensors:
                part = area[offset : offset + tensor.nbytes].view(tensor.dtype)
                views.append(part.view(tensor.shape))
                offset += count_saved_bytes(tensor)
            self._views[rank, chunk] = views
        return views

    # --- taking over chunks --------------------------------------------------------------------

    def _holder(self, rank: int) -> int:
        """Return the rank that finishes the chunks of `rank`: itself, or the one that took over."""
        taken = atomic_load(self._owner, rank)
        return taken - 1 if taken else rank

    def _claim(self, rank: int) -> bool:
        """Take over a rank's chunks if the rank that has to finish them is dead; return whether."""
        before = atomic_load(self._owner, rank)
        if not self._has_died(before - 1 if before else rank):
            return False
        return atomic_compare_exchange(self._owner, rank, before, self._rank + 1) == before

    def _has_died(self, rank: int) -> bool:
        return rank != self._rank and self._await_death([rank], 0)

    def _await_death(self, ranks: Sequence[int], seconds: float = POLL_SECONDS) -> bool:
        """Return whether one of these processes ends within the given seconds."""
        watched = select.poll()
        for rank in {*ranks} - {self._rank}:
            process = self._processes[rank]
            if process is None:
                return True
            watched.register(process, select.POLLIN)
        return bool(watched.poll(seconds * 1000))


def _open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when all threads of a process have ended.

    None if the process has ended already.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
