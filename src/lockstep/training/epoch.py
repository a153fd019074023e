"""The epoch: batches that tell the trainer when the first and the last of them are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.data.loader import Batches
from lockstep.data.microbatch import Batch

__all__ = ["Epoch"]


class Epoch(Batches):
    """The global batches of one epoch; `begun` and `ended` are told."""

    def __init__(
        self,
        begun: Callable[[], None],
        ended: Callable[[int], None],
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._begun, self._ended = begun, ended

    def __iter__(self) -> Iterator[Batch]:
        """Go through the epoch."""
        if self._start == 0:
            self._begun()
        yield from super().__iter__()
        self._ended(self.epoch)
