"""The batches of one epoch of a trainer; a resumed script continues in the middle of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import TensorDataset

from lockstep.call_checks import check_call
from lockstep.checkpoint.stop_request import Finish, stopping
from lockstep.data.loader import Batches
from lockstep.data.microbatch import Batch
from lockstep.data.repeated_epoch import describe_repetition
from lockstep.training.resume.resumable_run import ResumableRun
from lockstep.training.services import SavedState

__all__ = ["Epoch"]


class Epoch:
    """The global batches of one epoch; begins and ends it in the history and the schedule.

    If no epoch is given, every iteration takes the next one, just as a DataLoader shuffles anew
    in every iteration.

    Args:
        run: The run, which skips what was trained before and saves checkpoints between batches.
        finish: The function that ends the training if it stops on request.
        epoch: The epoch, from 0; None: the next one.
        options: The other options of `Batches`.

    Attributes:
        batches: The batches, without what the training does at their beginning and end.
    """

    def __init__(
        self,
        run: ResumableRun,
        finish: Finish,
        epoch: int | None,
        **options: Any,
    ) -> None:
        self._run = run
        self._position = run.state.position
        self._history = run.state.history
        self._optimization = run.state.optimization
        self._finish = finish
        self._is_given = epoch is not None
        self._is_loaded = False
        number = self._position.next_epoch if epoch is None else epoch
        self.batches = Batches(epoch=number, **options)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self.batches.epoch

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the remaining batches of the epoch."""
        batches = self.batches
        with stopping(self._finish, self._run.safe_points.abandon):
            if not (self._is_given or self._is_loaded):
                batches.epoch = self._position.next_epoch
            self._position.epoch = self.epoch
            self._position.next_epoch = self.epoch + 1
            epoch = self._run.begin_epoch(self, self._load_content)
            self._is_loaded = False
            if epoch is None:
                return
            self._warn_if_repeated()
            agree = batches.agree
            is_caught_up = self._run.is_caught_up(epoch)
            try:
                self._history.begin_epoch(self.epoch, self._count_batches(), batches.start)
                if is_caught_up:
                    batches.agree = None  # the other ranks have already compared their data
                else:
                    self._run.safe_points.reach(epoch, ask=True)
                for batch in batches:
                    self._run.yielded(epoch)
                    yield batch
                    self._run.trained(epoch)
                self._end()
            finally:
                batches.agree = agree
                self._run.end_epoch(epoch)
            self._run.safe_points.reach()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as JSON values, valid for any layout."""
        return self.batches.state_dict()

    @check_call("batches.load_state_dict")
    def load_state_dict(self, state: SavedState) -> None:
        """Resume the next iteration from a saved position, in its epoch if none was given."""
        if not self._is_given:
            self.batches.epoch = state["epoch"]
            self._is_loaded = True
        self.batches.load_state_dict(state)

    def _load_content(self) -> Sequence[str]:
        """Load the first batch, unless the data can be read only once; describe some samples."""
        options = self.batches.options
        if not (options.is_iterable or isinstance(options.given_sampler, Iterator)):
            for _ in self.batches:
                break
        return self.batches.content

    def _count_batches(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # the dataset or sampler has no length
            return None

    def _warn_if_repeated(self) -> None:
        """Warn if the script gives every epoch the same number, and so the same random numbers."""
        options = self.batches.options
        finished = self._position.finished
        if not self._is_given or self.batches.start or finished is None:
            return
        is_same = finished[0] is options.dataset and finished[1:] == (self.epoch, options.seed)
        if is_same and (options.shuffle or type(options.dataset) is not TensorDataset):
            advice = "write batches(..., epoch=epoch), or leave epoch= out"
            place, sentence = describe_repetition(self.epoch, advice, sys._getframe())
            self._history.warn(0, place, sentence, show=self.batches.who == "rank 0")

    def _end(self) -> None:
        options = self.batches.options
        self._position.finished = options.dataset, self.epoch, options.seed
        result = self._history.end_epoch(self.epoch)
        if result is not None:
            self._optimization.end_epoch(result.loss)  # before callbacks, which may save the state
            self._history.notify(result)
