"""The step: this rank's micro-batches, forward and backward, one after another.

    with trainer.step() as step:                      the long form
        for inputs, targets in step.microbatches(batch):
            loss = loss_function(model(inputs), targets)
            step.backward(loss)

    before micro-batch m    fresh buffers, generators keyed by (seed, step, m)
    backward                the loss scaled by the micro-batch's share
    after it                gradients become leaf m of the tree, buffers are kept aside
    at the end of `with`    the trainer adds over the ranks and steps the optimizer

`trainer.step(batch)` is these lines with the trainer's own model and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lockstep.data_parallel.gradients import Gradients
from lockstep.errors import UsageError
from lockstep.model.activation_checkpointing import Recomputation
from lockstep.model.attempt import Attempt
from lockstep.model.buffers import Buffers
from lockstep.model.parallel_context import Setting
from lockstep.model.side_effects import SideEffects
from lockstep.model.turn import Result, Turn
from lockstep.model.units import Units

__all__ = ["Step"]


class Step(Turn):
    """One optimizer step in the making.

    Use it in a `with` statement; leaving it finishes the step on every rank.
    An exception inside leaves weights and buffers as they were before it.
    """

    def __init__(
        self,
        attempt: Attempt,
        setting: Setting,
        units: Units,
        buffers: Buffers,
        gradients: Gradients,
        recomputation: Recomputation,
        side_effects: SideEffects,
        finish: Callable[[Turn], None],
    ) -> None:
        super().__init__(attempt, setting, side_effects, finish)
        self.buffers = buffers
        self.gradients = gradients
        self._units = units
        self._recomputation = recomputation
        self._iteration: Iterator[Any] | None = None
        self._current: Result | None = None

    def parts(self) -> list[tuple[Gradients, Buffers]]:
        """Return gradients and buffers of the model."""
        return [(self.gradients, self.buffers)]

    def _seed(self, stack: ExitStack) -> None:
        stack.enter_context(self._units.seeded())
        stack.enter_context(self._recomputation.active(self.buffers))

    def _leave(self, error: BaseException | None) -> bool:
        broken = self._current
        if isinstance(self._iteration, Generator):
            self._iteration.close()  # leaves autocast, whoever still holds the generator
        if error is not None and broken is not None:
            error.add_note(f"in {self.setting.place(self.number, broken.microbatch.index)}")
        return broken is not None

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Give the data of this rank's micro-batches, one after another.

        `batch` comes from `trainer.batches`, or is a whole global batch of tensors,
        the same on every rank, which is cut here. `backward` must be called for
        each micro-batch before the next one is asked for.
        """
        if self._iteration is not None:
            raise UsageError("one step takes one batch: begin another step for the next batch")
        self._iteration = self._microbatches(batch)
        return self._iteration

    def _microbatches(self, batch: Any) -> Iterator[Any]:
        setting = self.setting
        batch = self._cut(batch)
        parts, computed = self._shares(batch)
        self.gradients.begin(batch.leaves, self.announce)
        for microbatch in batch.microbatches:
            leaf = microbatch.index
            if leaf not in parts:
                self.gradients.skip(leaf)
                continue
            self._current = Result(microbatch, parts[leaf])
            self.buffers.enter()
            self._units.begin(self.number, leaf)
            data = setting.moved(microbatch.data)
            with setting.autocast():
                yield data
            if not self._current.losses:
                raise UsageError(
                    f"{setting.place(self.number, leaf)}: step.backward(loss) was not called"
                )
            self.buffers.leave(leaf, microbatch.size / computed)
            self.gradients.take(leaf)
            self.results.append(self._current)
            self._current = None
        self.gradients.launch()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        metrics: Mapping[str, Any] | None = None,
        retain_graph: bool = False,
        final: bool = False,
    ) -> None:
        """Run backward from the loss of the current micro-batch, a scalar mean over its samples.

        May be called several times for one micro-batch: the losses add up.
        `metrics` are means over the micro-batch's samples, for the record. `final`
        promises that this is the only backward of the micro-batch: on the backend
        "lockstep" the gradients of the last one then travel while it runs.
        """
        if self._current is None:
            raise UsageError("step.backward(loss) belongs into the loop over step.microbatches")
        self._check(loss, self.place)
        self._current.losses.append(loss.detach())
        self._current.metrics.update(metrics or {})
        with torch.autocast(self.setting.device.type, enabled=False):
            scaled = loss * self._current.share
            watched = self._watched(scaled) if final else nullcontext()
            with watched, self._recomputation.told():
                scaled.backward(retain_graph=retain_graph)

    def _watched(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Let gradients travel as they arrive, if this is the last micro-batch of this rank."""
        assert self.batch is not None
        assert self._current is not None
        leaf = self._current.microbatch.index
        if not self.gradients.eager or leaf != self.batch.microbatches[-1].index:
            return nullcontext()
        return self.gradients.arrival.watch(loss, leaf)

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch in work, of the only stage."""
        return (self._current.microbatch.index, 0) if self._current else None

    @property
    def place(self) -> str:
        """Where the step is: rank, step and micro-batch, for messages."""
        leaf = self._current.microbatch.index if self._current else 0
        return self.setting.place(self.number, leaf)

    def _failure(self) -> str:
        return self.gradients.arrival.late()
