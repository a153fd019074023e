"""The batches of one epoch of a trainer; a resumed script continues in the middle of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.checkpoint.stop_request import Finish, stopping
from lockstep.data.loader import Batches
from lockstep.data.microbatch import Batch
from lockstep.training.history import History
from lockstep.training.optimization import Optimization
from lockstep.training.resumable_run import ResumableRun
from lockstep.training.state import Position

__all__ = ["Epoch"]


class Epoch(Batches):
    """The global batches of one epoch; begins and ends it in the history and the schedule.

    If no epoch is given, every iteration takes the next one, just as a DataLoader shuffles anew
    in every iteration.

    Args:
        run: The run, which skips what was trained before and saves checkpoints between batches.
        history: The history that collects the steps of the epoch.
        optimization: The optimizer and its schedule.
        position: The position of the training, which has the number of the next epoch.
        finish: The function that ends the training if it stops on request.
        epoch: The epoch, from 0; None: the next one.
        options: The other options of `Batches`.
    """

    def __init__(
        self,
        run: ResumableRun,
        history: History,
        optimization: Optimization,
        position: Position,
        finish: Finish,
        epoch: int | None,
        **options: Any,
    ) -> None:
        super().__init__(epoch=position.next_epoch if epoch is None else epoch, **options)
        self._run, self._history, self._optimization = run, history, optimization
        self._position, self._finish = position, finish
        self._is_given, self._is_loaded = epoch is not None, False

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the remaining batches of the epoch."""
        with stopping(self._finish, self._run.safe_points.abandon):
            if not (self._is_given or self._is_loaded):
                self.epoch = self._position.next_epoch
            self._position.epoch, self._position.next_epoch = self.epoch, self.epoch + 1
            self._run.use_sampler(self)
            epoch = self._run.begin_epoch(self)
            self._is_loaded = False
            if epoch is None:
                return
            agree, is_caught_up = self.agree, self._run.is_caught_up(epoch)
            try:
                self._history.begin_epoch(self.epoch, self._count_batches(), self._start)
                if is_caught_up:
                    self.agree = None  # the other ranks have already compared their data
                else:
                    self._run.safe_points.reach(epoch, ask=True)
                for batch in super().__iter__():
                    self._run.yielded(epoch)
                    yield batch
                    self._run.trained(epoch)
                self._end()
            finally:
                self.agree = agree
                self._run.end_epoch(epoch)
            self._run.safe_points.reach()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a saved position, in its epoch if none was given."""
        if not self._is_given:
            self.epoch, self._is_loaded = state["epoch"], True
        super().load_state_dict(state)

    def _count_batches(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # the dataset or sampler has no length
            return None

    def _end(self) -> None:
        result = self._history.end_epoch(self.epoch)
        if result is not None:
            self._optimization.end_epoch(result.loss)  # before callbacks, which may save the state
            self._history.notify(result)
