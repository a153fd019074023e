"""The work of a trainer when a round of an elastic run begins.

every rank      takes the new layout and its new share of the batches; counts attempts anew
a new rank 0    continues the record (the lines that the dead rank 0 has not written), the
                loggers, the display and the checkpoints
a newcomer      gets the state from rank 0, and answers its script's calls from the log
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import torch

from lockstep.checkpoint.encoding import decode, encode
from lockstep.comm.collectives import broadcast_bytes, send_tensors
from lockstep.comm.native_all_reduce import native_backend
from lockstep.data.loader import Batches
from lockstep.elastic.membership import Membership, Round
from lockstep.training.parallel_setup import find_replica_hosts
from lockstep.training.resume.resumable_run import ResumableRun
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["RoundEntry"]


class RoundEntry:
    """A trainer's part in the rounds of an elastic run.

    Args:
        member: This process.
        run: The run, with the state and the script log.
        promote: The function that makes this rank the writer of loggers and display.
    """

    def __init__(
        self,
        member: Membership,
        run: ResumableRun,
        promote: Callable[[], None],
    ) -> None:
        state = run.state
        parallel = state.parallel
        executor = state.executor
        is_native = native_backend(parallel.device, torch.float32, parallel.group) is not None
        is_whole = isinstance(executor, WholeModelExecutor)
        shared = state.optimization.shared
        # Connections between hosts are closed when a rank is lost. On one host, ranks that wait
        # for each other over Gloo would not notice it.
        can_notice = is_native or (member.spans_hosts and parallel.device.type == "cpu")
        can_stay = can_notice and is_whole and shared is None and not parallel.is_sharded
        self._executor = executor if can_stay else None
        self._member = member
        self._parallel = parallel
        self._run = run
        self._position = state.position
        self._history = state.history
        self._promote = promote
        self._batches: WeakSet[Batches] = WeakSet()
        if parallel.rank != 0:
            self._history.keep_backlog()
        run.safe_points.take_part(member, run)
        member.enroll(self)

    def follow(self, batches: Batches) -> None:
        """Update the share of these batches in each round."""
        self._batches.add(batches)

    @property
    def can_stay(self) -> bool:
        """Whether this process can continue in the next round with the state that it has."""
        return self._executor is not None and self._run.has_begun

    @property
    def can_transfer_state(self) -> bool:
        """Whether this rank can write its state now, for a process that replaces it."""
        return self._run.safe_points.can_transfer_state

    @property
    def part(self) -> tuple[int, int]:
        """The part of the state that this rank holds, and the number of parts."""
        return self._parallel.part

    @property
    def microbatches(self) -> int:
        """The number of micro-batches, for ranks that take turns at them; 0 for others."""
        return self._parallel.microbatches if self._parallel.is_sharded else 0

    def transfer_state(self, folder: Path) -> None:
        """Write this rank's part of the state, as it was at the latest safe point."""
        self._run.safe_points.transfer_state(folder)

    def leave(self) -> None:
        """Abandon the checkpoint that is being written, before this process ends."""
        self._run.safe_points.abandon()

    def enter_round(self, new: Round) -> None:
        """Apply the layout of a round whose group this process has joined."""
        assert isinstance(self._executor, WholeModelExecutor), "others are replaced"
        was_rank0 = self._parallel.rank == 0
        parallel = self._parallel
        parallel.enter(new.rank, find_replica_hosts(new.world_size, 1))
        self._executor.enter_group()
        for batches in self._batches:
            batches.enter_share(parallel.share, new.rank)
        self._position.begin_round()
        if new.rank != 0:
            self._history.keep_backlog()  # a newcomer did not know its rank before
        elif not was_rank0:
            self._promote()
            self._history.write_missing(self._history.take_backlog())
        if new.joined:
            self._share_state(new)

    def continue_round(self, new: Round, undone: float | None) -> None:
        """Write the record's line of the round, which continues now.

        The line rewinds the record to the steps that this rank has written: the lost rank 0 may
        have written a step that this rank has yet to commit and write.
        """
        assert isinstance(self._executor, WholeModelExecutor), "others are replaced"
        repeated = self._executor.repeated
        self._executor.repeated = 0
        self._history.write(
            "round",
            round=new.number,
            step=self._history.steps,
            epochs=self._history.epochs,
            world_size=new.world_size,
            lost=list(new.lost),
            joined=list(new.joined),
            left=list(new.left),
            noticed=new.noticed,
            continued=time.time(),
            undone=undone or 0.0,
            repeated_microbatches=0 if undone is None else repeated,
        )

    # --- the state for newcomers ----------------------------------------------------------

    def _share_state(self, new: Round) -> None:
        """Send the state of rank 0, which is no newcomer, to the newcomers."""
        group = self._parallel.group
        about = f"letting members join round {new.number}"
        tensors: dict[str, torch.Tensor] = {}
        message = b""
        if new.rank == 0:
            plain = encode(self._run.collect_state(), tensors, "state")
            shapes = [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in tensors.items()
            ]
            message = json.dumps([plain, shapes]).encode()
        message = broadcast_bytes(message, about, group)
        is_new = new.rank in new.newcomers
        if new.rank and not is_new:
            return
        plain, shapes = json.loads(message)
        if is_new:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, dtype, shape in shapes
            }
        send_tensors([tensors[name] for name, *_ in shapes], group, 0, new.newcomers)
        if is_new:
            self._run.receive_state(decode(plain, tensors))
