"""The turn: what every step does, however its micro-batches are computed.

with turn:           generators given back as found, the thread count of the promise
    ...              micro-batches: `lockstep.model.step` one after another on this
                     rank, `lockstep.pipeline.passage` through stages
at the end           the trainer adds over the ranks and steps the optimizer
after an exception   weights and buffers are as before
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from lockstep.comm.transfer import all_gather_bytes
from lockstep.data.consistency import require_same_batch
from lockstep.data.microbatch import Batch, Microbatch, split_evenly
from lockstep.data_parallel.gradients import Gradients
from lockstep.errors import LossError, UsageError
from lockstep.model.attempt import Attempt
from lockstep.model.buffers import Buffers
from lockstep.model.compilation import static_shapes
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.model.forward import check_scalar
from lockstep.model.ledger import Entry, Page, peak_memory
from lockstep.model.loss_weight import ignored_targets, is_sum, shares
from lockstep.model.parallel_context import Setting
from lockstep.model.side_effects import SideEffects

__all__ = ["Result", "Turn"]


@dataclass
class Result:
    """What was made of one micro-batch."""

    microbatch: Microbatch
    share: float
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> Entry:
        """Return its line of the ledger."""
        loss = sum(float(loss) for loss in self.losses)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return Entry(self.microbatch.index, self.microbatch.size, self.share, loss, metrics)


class Turn:
    """One optimizer step in the making; `finish` is what the trainer does at its end."""

    fingerprinter: Fingerprinter | None = None
    """Records what the step computes, under `lockstep check`."""

    def __init__(
        self,
        attempt: Attempt,
        setting: Setting,
        side_effects: SideEffects,
        finish: Callable[[Turn], None],
    ) -> None:
        self.attempt = attempt
        self.number = attempt.step
        self.setting = setting
        self.side_effects = side_effects
        self.batch: Batch | None = None
        self.error: Exception | None = None
        self.results: list[Result] = []
        self.times: tuple[float, ...] = ()
        """When the ledger was read, the gradients were added, the optimizer was done."""
        self._finish = finish
        self._warnings: list[str] = []
        self._stack = ExitStack()
        self._begun = 0.0
        self._compute = 0.0
        self._idle = 0.0

    def parts(self) -> list[tuple[Gradients, Buffers]]:
        """Return gradients and buffers of each part of the model that this rank holds."""
        raise NotImplementedError

    def share_tied(self) -> None:
        """Give the sums of parameters that stages share to all of them."""

    def __enter__(self) -> Any:
        """Begin: generators under our keys, the thread count of the promise."""
        self._begun = time.perf_counter()
        if torch.get_num_threads() != self.setting.threads:
            torch.set_num_threads(self.setting.threads)
        self.side_effects.begin(self.number)
        self._stack.enter_context(static_shapes())
        self._seed(self._stack)
        if self.fingerprinter is not None:
            recording = self.fingerprinter.recording(self.number, self.position)
            self._stack.enter_context(recording)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the step, or undo it where there was an exception."""
        try:
            self._exit(error)
        except BaseException as failure:
            self.attempt.fail(failure)
            raise
        if error is not None:
            self.attempt.fail(error)

    def _exit(self, error: BaseException | None) -> None:
        unfinished = self._leave(error)
        self._stack.close()
        for _, buffers in self.parts():
            buffers.restore()
        if error is not None or self.error is not None:
            for gradients, _ in self.parts():
                gradients.clear()
        if error is not None:
            return
        if self.batch is None or unfinished:
            raise UsageError(
                "a step was left before its last micro-batch: go through all of "
                "step.microbatches(batch) inside `with trainer.step() as step`"
            )
        self._compute = time.perf_counter() - self._begun - self._idle
        self._finish(self)

    def _seed(self, stack: ExitStack) -> None:
        """Enter what seeds the generators during the step."""
        raise NotImplementedError

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage that are being computed; None between them."""
        return None

    def _leave(self, error: BaseException | None) -> bool:
        """Return whether a micro-batch was begun and not finished."""
        return False

    @property
    def about(self) -> str:
        """What must be the same of this step on all ranks, in words."""
        assert self.batch is not None
        return (
            f"{self.attempt}, with a batch of {self.batch.size} samples in {self.batch.leaves} "
            "micro-batches"
        )

    def page(self) -> Page:
        """Return what this rank has to say of its micro-batches."""
        assert self.batch is not None
        alone = self.setting.replicas == 1
        effects = self.side_effects
        effects.finish()
        place = f"rank {self.setting.rank}, step {self.number}"
        self._warnings += [f"{place}: {sentence}" for sentence in effects.warnings]
        side_effect, weights = effects.failure, effects.summary
        if self.fingerprinter is not None:  # lockstep check goes on, to compare the layouts
            self.fingerprinter.record_refusal(side_effect)
            side_effect = weights = ""
        return Page(
            entries=[result.entry() for result in self.results],
            buffers=[buffers.findings(alone) for _, buffers in self.parts()],
            compute=self._compute,
            data=self.batch.seconds,
            memory=peak_memory(),
            gradients=[gradients.present() for gradients, _ in self.parts()],
            warnings=self._warnings,
            failure=self._failure(),
            side_effect=side_effect,
            weights=weights,
            idle=self._idle,
            batch=self.batch.identity.pack(),
        )

    def announce(self) -> None:
        """Tell the other ranks which step and batch this is, before gradients are added early.

        Raises DisagreementError on every rank where it is not the same on all.
        """
        assert self.batch is not None
        line = self.batch.identity.pack().encode()
        everyone = all_gather_bytes(
            line, self.about, self.setting.group, self.attempt.previous_failure
        )
        require_same_batch([each.decode() for each in everyone], self.number)

    def _failure(self) -> str:
        """Return what went wrong here that stops the step on every rank."""
        return ""

    # --- the batch --------------------------------------------------------------------------

    def _cut(self, batch: Any) -> Batch:
        """Return this rank's part of a batch, which may be a whole one."""
        self.batch = self.setting.cut(batch)
        if self.fingerprinter is not None:
            self.fingerprinter.record_data(self.batch)
        return self.batch

    def _check(self, loss: torch.Tensor, place: str) -> None:
        check_scalar(loss, place)
        if not loss.requires_grad:
            raise LossError(
                f"{place}: the loss depends on no parameter that is trained; all may be frozen, "
                "or the loss was computed under torch.no_grad()"
            )

    def _shares(self, batch: Batch) -> tuple[dict[int, float], int]:
        """Return each micro-batch's part of the loss, and the samples that are computed."""
        setting = self.setting
        sizes = {
            leaf: len(span) for leaf, span in enumerate(split_evenly(batch.size, batch.leaves))
        }
        if is_sum(setting.loss):
            return dict.fromkeys(sizes, 1.0), batch.size
        if setting.weight is None:
            self._warn_of_ignored_targets(batch)
            return {leaf: size / batch.size for leaf, size in sizes.items()}, batch.size
        mine = {
            each.index: self._weight(each)
            for each in batch.microbatches
            if each.data is not None  # a stage in between needs none
        }
        weights = self._exchanged(mine)
        if not sum(weights.values()) > 0:
            raise LossError(
                f"rank {setting.rank}, step {self.number}: the weights of the batch's "
                f"{batch.leaves} micro-batches add up to {sum(weights.values())}; does every "
                "sample of the batch have its target ignored?"
            )
        parts = shares(weights)
        return parts, sum(sizes[leaf] for leaf in parts)

    def _exchanged(self, mine: Mapping[int, float]) -> dict[int, float]:
        """Return the weights of all micro-batches, in leaf order, on every rank."""
        text = ",".join(f"{leaf}:{weight.hex()}" for leaf, weight in mine.items())
        about, remark = f"weighing {self.about}", self.attempt.previous_failure
        pairs = [
            pair.split(":")
            for message in all_gather_bytes(text.encode(), about, self.setting.group, remark)
            for pair in message.decode().split(",")
            if pair
        ]
        return {int(leaf): float.fromhex(weight) for leaf, weight in pairs}

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
