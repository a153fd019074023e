"""An epoch of a trainer: its batches, which a resumed script continues where they were left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.data.loader import Batches
from lockstep.data.microbatch import Batch
from lockstep.training.history import History
from lockstep.training.optimization import Optimization
from lockstep.training.resumable_run import Finish, ResumableRun, stopping

__all__ = ["Epoch"]


class Epoch(Batches):
    """The global batches of one epoch; begins and ends it in the history and the schedule.

    Args:
        run: Answers for what was trained before; saves checkpoints between two batches.
        history: Collects the steps of the epoch.
        optimization: Has the schedule.
        finish: Ends the training, if it stops on request.
        arguments: Those of `Batches`.
        options: Those of `Batches`.
    """

    def __init__(
        self,
        run: ResumableRun,
        history: History,
        optimization: Optimization,
        finish: Finish,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._run, self._history, self._optimization = run, history, optimization
        self._finish = finish

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over what is left of the epoch."""
        with stopping(self._finish, self._run.abandon):
            self._run.use_sampler(self)
            epoch = self._run.begin_epoch(self)
            if epoch is None:
                return
            try:
                self._history.begin_epoch(self.epoch, self._count_batches(), self._start)
                self._run.reach_safe_point(epoch, ask=True)
                for batch in super().__iter__():
                    self._run.yielded(epoch)
                    yield batch
                    self._run.trained(epoch)
                self._end()
            finally:
                self._run.end_epoch(epoch)
            self._run.reach_safe_point()

    def _count_batches(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # of a dataset or sampler without a length
            return None

    def _end(self) -> None:
        result = self._history.end_epoch(self.epoch)
        if result is not None:
            self._optimization.end_epoch(result.loss)  # first: a callback may save the state
            self._history.notify(result)
