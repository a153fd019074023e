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

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.transfer import all_gather_bytes
from lockstep.data.microbatch import Batch, Microbatch, cut, spans
from lockstep.errors import LossError, UsageError
from lockstep.train.buffers import Buffers
from lockstep.train.forward import check_scalar
from lockstep.train.gradients import Gradients
from lockstep.train.ledger import Entry, Page, peak_memory
from lockstep.train.setting import Setting
from lockstep.train.units import Units
from lockstep.train.weight import ignored_targets, is_sum, shares

__all__ = ["Step"]


@dataclass
class _Result:
    """What the user's code made of one micro-batch."""

    microbatch: Microbatch
    share: float
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> Entry:
        loss = sum(float(loss) for loss in self.losses)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return Entry(self.microbatch.index, self.microbatch.size, self.share, loss, metrics)


class Step:
    """One optimizer step in the making.

    Use it in a `with` statement; leaving it finishes the step on every rank.
    An exception inside leaves weights and buffers as they were before it.
    """

    def __init__(
        self,
        number: int,
        setting: Setting,
        units: Units,
        buffers: Buffers,
        gradients: Gradients,
        finish: Callable[[Step], None],
    ) -> None:
        self.number = number
        self.setting = setting
        self.buffers = buffers
        self.gradients = gradients
        self.batch: Batch | None = None
        self._units = units
        self._finish = finish
        self._iteration: Iterator[Any] | None = None
        self._warnings: list[str] = []
        self._stack = ExitStack()
        self._results: list[_Result] = []
        self._current: _Result | None = None
        self._begun = 0.0
        self._compute = 0.0

    def __enter__(self) -> Step:
        """Begin: generators under our keys, the thread count of the promise."""
        self._begun = time.perf_counter()
        if torch.get_num_threads() != self.setting.threads:
            torch.set_num_threads(self.setting.threads)
        self._stack.enter_context(self._units.seeded())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the step, or undo it where there was an exception."""
        broken = self._current
        if isinstance(self._iteration, Generator):
            self._iteration.close()  # leaves autocast, whoever still holds the generator
        self._stack.close()
        self.buffers.restore()
        if error is not None:
            self.gradients.clear()
            if broken is not None:
                leaf = broken.microbatch.index
                error.add_note(f"in {self.setting.place(self.number, leaf)}")
            return
        if self.batch is None or broken is not None:
            raise UsageError(
                "a step was left before its last micro-batch: go through all of "
                "step.microbatches(batch) inside `with trainer.step() as step`"
            )
        self._compute = time.perf_counter() - self._begun
        self._finish(self)

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
        if not isinstance(batch, Batch):
            batch = cut(batch, setting.microbatches, setting.replicas, setting.replica)
        self.batch = batch
        parts, computed = self._shares(batch)
        announce = partial(all_gather_bytes, b"", self.about, setting.group)
        self.gradients.begin(batch.leaves, announce)
        for microbatch in batch.microbatches:
            leaf = microbatch.index
            if leaf not in parts:
                self.gradients.take(leaf)  # nothing: an absent leaf
                continue
            self._current = _Result(microbatch, parts[leaf])
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
            self._results.append(self._current)
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
        self._check(loss)
        self._current.losses.append(loss.detach())
        self._current.metrics.update(metrics or {})
        with torch.autocast(self.setting.device.type, enabled=False):
            scaled = loss * self._current.share
            with self._watched(scaled) if final else nullcontext():
                scaled.backward(retain_graph=retain_graph)

    def _watched(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Let gradients travel as they arrive, if this is the last micro-batch of this rank."""
        assert self.batch is not None
        assert self._current is not None
        leaf = self._current.microbatch.index
        if not self.gradients.eager or leaf != self.batch.microbatches[-1].index:
            return nullcontext()
        return self.gradients.arrival.watch(loss, leaf)

    @property
    def place(self) -> str:
        """Where the step is: rank, step and micro-batch, for messages."""
        leaf = self._current.microbatch.index if self._current else 0
        return self.setting.place(self.number, leaf)

    @property
    def about(self) -> str:
        """What must be the same of this step on all ranks, in words."""
        assert self.batch is not None
        return (
            f"in step {self.number} of a trainer, with a batch of {self.batch.size} samples "
            f"in {self.batch.leaves} micro-batches"
        )

    def page(self) -> Page:
        """Return what this rank has to say of its micro-batches."""
        assert self.batch is not None
        return Page(
            entries=[result.entry() for result in self._results],
            buffers=self.buffers.findings(alone=self.setting.replicas == 1),
            compute=self._compute,
            data=self.batch.seconds,
            memory=peak_memory(),
            gradients=self.gradients.present(),
            warnings=self._warnings,
            failure=self._failure(),
        )

    def _failure(self) -> str:
        name = self.gradients.arrival.late()
        return name and (
            f"the gradient of {name} came in two parts, and not in the steps before; if a part of "
            "the model is checkpointed, do it with use_reentrant=False"
        )

    def _check(self, loss: torch.Tensor) -> None:
        assert self._current is not None
        place = self.setting.place(self.number, self._current.microbatch.index)
        check_scalar(loss, place)
        if not loss.requires_grad:
            raise LossError(
                f"{place}: the loss depends on no parameter that is trained; all may be frozen, "
                "or the loss was computed under torch.no_grad()"
            )

    def _shares(self, batch: Batch) -> tuple[dict[int, float], int]:
        """Return each micro-batch's part of the loss, and the samples that are computed."""
        setting = self.setting
        sizes = {leaf: len(span) for leaf, span in enumerate(spans(batch.size, batch.leaves))}
        if is_sum(setting.loss):
            return dict.fromkeys(sizes, 1.0), batch.size
        if setting.weight is None:
            self._warn_of_ignored_targets(batch)
            return {leaf: size / batch.size for leaf, size in sizes.items()}, batch.size
        mine = {each.index: self._weight(each) for each in batch.microbatches}
        weights = _exchanged(mine, self.about, setting.group)
        if not sum(weights.values()) > 0:
            raise LossError(
                f"rank {setting.rank}, step {self.number}: the weights of the batch's "
                f"{batch.leaves} micro-batches add up to {sum(weights.values())}; does every "
                "sample of the batch have its target ignored?"
            )
        parts = shares(weights)
        return parts, sum(sizes[leaf] for leaf in parts)

    def _weight(self, microbatch: Microbatch) -> float:
        assert self.setting.weight is not None
        try:
            return float(self.setting.weight(microbatch.data))
        except Exception as error:
            place = self.setting.place(self.number, microbatch.index)
            raise LossError(
                f"{place}: the weight of the micro-batch could not be computed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _warn_of_ignored_targets(self, batch: Batch) -> None:
        for each in batch.microbatches:
            if ignored_targets(self.setting.loss, each.data):
                self._warnings.append(
                    f"{self.setting.place(self.number, each.index)}: some targets are ignored by "
                    "the loss, whose mean is then not one over samples, and the gradient is not "
                    "that of the whole batch; give the trainer weight=lockstep.target_weight(loss)"
                )
                return


def _exchanged(
    mine: Mapping[int, float], about: str, group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Return the weights of all micro-batches, in leaf order, on every rank."""
    text = ",".join(f"{leaf}:{weight.hex()}" for leaf, weight in mine.items())
    pairs = [
        pair.split(":")
        for message in all_gather_bytes(text.encode(), f"weighing {about}", group)
        for pair in message.decode().split(",")
        if pair
    ]
    return {int(leaf): float.fromhex(weight) for leaf, weight in pairs}
