"""Equal bits in a training loop of the script's own: the handle that `ls.exact` returns.

    for batch in exact.batches(dataset, batch_size=128):     exact_batch.py
        for inputs, targets in batch:                        a step: script_steps.py
            batch.backward(loss_function(model(inputs), targets))
        optimizer.step()

    for inputs, targets in exact.microbatches(loader):       flat_loop.py
        exact.weigh(loss_function(model(inputs), targets)).backward()
        if exact.is_complete: optimizer.step()

Both loops take their steps as the trainer does (`lockstep.training.step_operation`), with the same
checks, record, checkpoints and audit. `lockstep.training.script_loop.exact_setup` makes the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import nn

from lockstep.checkpoint.stop_request import stopping
from lockstep.data.dataloader import BatchOptions, EvaluationOptions, resolve_data
from lockstep.data.microbatch_sampler import MicrobatchSampler, MicrobatchSource
from lockstep.kernel.errors import UsageError
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.messages import log
from lockstep.model.evaluation import Evaluation, Scoring
from lockstep.model.forward import Metric
from lockstep.model.predictions import Predictions
from lockstep.model.target_weights import infer_weight_function
from lockstep.training.script_loop.exact_batch import ExactBatch, ExactBatches
from lockstep.training.script_loop.flat_loop import FlatLoop
from lockstep.training.script_loop.script_steps import ScriptSteps
from lockstep.training.services import EngineParts, SavedState, Services

__all__ = ["Exact"]

Item = TypeVar("Item")


# It has many methods: each is one that users call, or stands for one of the trainer.
class Exact(Services):
    """The handle of a training loop with equal bits; `ls.exact` returns it.

    Args:
        engine: The parts of the training.
        steps: The steps of the loop.
        model: The model as the script calls it, perhaps in DistributedDataParallel.
        clip: A function of gradients, the largest norm and the call, for messages, that scales the
            gradients, and returns their norm.
        flat_refusal: Why the loop has to be nested; "" if it need not be.
    """

    def __init__(
        self,
        engine: EngineParts,
        steps: ScriptSteps,
        model: nn.Module,
        clip: Callable[[Sequence[torch.Tensor], float, str], float],
        flat_refusal: str = "",
    ) -> None:
        super().__init__(engine)
        self._script_steps = steps
        self._outer = model
        self._clip = clip
        self._flat_refusal = flat_refusal
        self._flat: FlatLoop | None = None
        self._start = (0, 0)  # the epoch and the batch at which a flat loop begins

    # --- a loop over batches ------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        together: bool = False,
        **options: Unpack[BatchOptions],
    ) -> ExactBatches:
        """Return the batches of one epoch; iterating over each of them computes one step.

        Each rank loads its own micro-batches. The epoch is complete, for the record, when its last
        batch has been trained.

        Args:
            dataset: A map-style or iterable dataset, or a DataLoader, whose options are used.
            batch_size: The number of samples of a batch, over all ranks. Required unless `dataset`
                is a DataLoader, whose batch size is then the one over all ranks.
            seed: The seed of order and augmentation. None: that of the handle.
            epoch: The number of the epoch, from 0, which with `seed` decides order and
                augmentation. None: each iteration is the epoch after the latest one.
            together: Whether the loop over a batch gets the samples of several micro-batches at
                once where this changes no bit, and passes one loss per sample to
                `batch.backward(losses)`. See the guide on exact loops.
            **options: `shuffle` (default True), `sampler`, `batch_sampler`, `drop_last`,
                `num_workers`, `collate_fn` and `pin_memory`, with their meanings in
                `torch.utils.data.DataLoader`. See the guide on data.

        Raises:
            UsageError: An option is unknown, or cannot be combined with another one.
            DisagreementError: While iterating, ranks ask for different batches; raised on every
                rank.
        """
        self._script_steps.settle()
        given = resolve_data(dataset, batch_size, options)
        batches = self.engine.make_batches(given, seed, epoch, self.finish)
        return ExactBatches(batches, self._script_steps, together)

    @overload
    def use(self, source: ExactBatch) -> ExactBatch: ...

    @overload
    def use(self, source: MicrobatchSource) -> None: ...

    def use(self, source: MicrobatchSource | ExactBatch) -> ExactBatch | None:
        """Train on the batch, or on the sampler, of another handle, as in a GAN.

        Args:
            source: A batch that another handle has yielded, or its sampler.

        Returns:
            The batch of this handle, iterating over which computes a step; None for a sampler.
        """
        if isinstance(source, ExactBatch):
            return ExactBatch(source.data, self._script_steps, source.is_together)
        self._open_flat().follow(source)
        return None

    def evaluate(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        loss_weight: WeightFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        **options: Unpack[EvaluationOptions],
    ) -> Evaluation:
        """Return the mean loss and metrics over a dataset, each sample counted once.

        The results are the same floats on every rank, and for any number of ranks. Changes of
        buffers during the evaluation are discarded.

        Args:
            dataset: As for `batches`.
            batch_size: As for `batches`. It affects the bits of the mean.
            loss: A function of (outputs, targets) that returns the mean over the samples. None:
                the model gets the whole micro-batch, and returns its loss.
            loss_weight: A function of the data of a micro-batch that returns its weight. None: the
                number of samples, or what the loss divides by if that is known.
            metrics: Functions of (outputs, targets) by name, each returning a mean over the
                samples; with `loss=None`, of the outputs and the micro-batch. They keep nothing
                between calls, of which each rank makes its own. For other metrics, such as F1 or
                AUC, a `DatasetMetric`.
            **options: As for `batches`, but `shuffle` is False by default.

        Raises:
            UsageError: An option is invalid, or a step is open.
        """
        given = self._select_data("evaluate()", dataset, batch_size, options)
        weight = loss_weight or infer_weight_function(loss)
        parallel = replace(self.parallel, loss=loss, loss_weight=weight)
        begin = partial(Scoring, parallel, metrics or {})
        with stopping(self.finish, self._run.safe_points.abandon):
            evaluation: Evaluation = self.engine.evaluations.evaluate(given, begin, ema=False)
        return evaluation

    def predict(
        self, dataset: Any, batch_size: int | None = None, **options: Unpack[EvaluationOptions]
    ) -> Any:
        """Return the model's outputs in evaluation mode for all samples, in the dataset's order.

        Every rank gets all outputs, as tensors on the CPU. They have the form that the model
        returns, and are joined along dimension 0; a list of mappings has one mapping per sample.
        The last entry of a sample with several is its targets, which the model does not get; a
        mapping has the model's arguments by name.

        Args:
            dataset: As for `batches`.
            batch_size: As for `batches`. It affects the bits of models that compare samples.
            **options: As for `batches`, but `shuffle` is False by default.

        Raises:
            UsageError: The outputs cannot be joined, or a step is open.
        """
        given = self._select_data("predict()", dataset, batch_size, options)
        begin = partial(Predictions, self.parallel, has_targets=True)
        with stopping(self.finish, self._run.safe_points.abandon):
            return self.engine.evaluations.predict(given, begin, ema=False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients to a 2-norm of at most `max_norm`; return their norm before.

        Call it on every rank between the last backward and `optimizer.step()`. The norm has the
        same bits on any number of ranks, also if the model is sharded.

        Raises:
            UsageError: The gradients are not those of a whole batch.
        """
        steps = self._script_steps
        if not steps.is_complete:
            raise UsageError(
                f"{steps.place}: exact.clip_grad_norm_() was called before the last micro-batch of "
                "the batch: call it after the loop over the batch, or if exact.is_complete"
            )
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        about = f"clipping in step {self.steps - 1}"
        norm = self._clip(gradients, max_norm, about)
        steps.note_gradients()
        return norm

    # --- a loop over micro-batches ------------------------------------------------------------

    def sampler(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> MicrobatchSampler:
        """Return a batch sampler of this rank's micro-batches, for a DataLoader.

        Args:
            dataset: The map-style dataset of the DataLoader.
            batch_size: The number of samples of a batch, over all ranks.
            shuffle: Whether each epoch has another order.
            seed: The random seed of the order and of the loading of samples.
            drop_last: Whether a smaller last batch is left out.
        """
        flat = self._open_flat()
        share = self.parallel.share
        sampler = MicrobatchSampler(dataset, batch_size, shuffle, seed, drop_last, share)
        sampler.epoch, sampler.start = flat.next_position
        flat.follow(sampler)
        return sampler

    def microbatches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a loader, each of which is a micro-batch; `begin` each of them.

        Tensors that are views into larger ones are copied, since kernels may round differently
        where memory is not aligned.

        Args:
            loader: A DataLoader with `batch_sampler=exact.sampler(...)`, or items that the script
                has divided over the ranks by itself.

        Raises:
            UsageError: The DataLoader is not divided over the ranks.
        """
        return self._open_flat().iterate(loader)

    def begin(self) -> None:
        """Begin a micro-batch, so that random numbers before the model's forward depend on it.

        With a sampler, a micro-batch also begins at the forward. `microbatches` calls it.

        Raises:
            UsageError: The last micro-batch had no backward, or the sampler has yielded no other.
        """
        self._open_flat().begin()

    def weigh(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        weight: float | None = None,
        divisor: float = 1,
    ) -> torch.Tensor:
        """Return the part of a micro-batch's loss in the loss of the batch; call backward on it.

        Args:
            loss: The mean loss over the samples of the current micro-batch.
            share: The factor of the loss, the same for any number of ranks; None for that of the
                samples, n_m / B, or 1 / M without a sampler.
            weight: What the mean divides by instead of the samples, such as the number of tokens;
                the gradients are divided by the sum of all weights of the batch.
            divisor: The number by which a framework divides the result before backward.

        Raises:
            UsageError: No micro-batch has begun, or dividing by `divisor` cannot be undone exactly.
        """
        return self._open_flat().weigh(loss, share, weight, divisor)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the whole batch are in `.grad`, on every rank.

        From the end of the last micro-batch until the next one begins.
        """
        return self._script_steps.is_complete

    @property
    def steps(self) -> int:
        """The number of complete steps."""
        opened = self._script_steps.opened
        return super().steps + (opened is not None and opened.prepared is not None)

    def _open_flat(self) -> FlatLoop:
        if self._flat is None:
            if self._flat_refusal:
                raise UsageError(self._flat_refusal)
            self._run.begin()
            self._flat = FlatLoop(self._outer, self.parallel, self._script_steps)
            self._flat.go_to(self._start)
        return self._flat

    def leave(self) -> None:
        """Undo a step that was left in the middle of its batch, such as after an exception.

        `microbatches` calls it. A loop that calls `begin` has to call it if it catches exceptions;
        otherwise the step stays open. The next step raises UsageError, unless a state is loaded.
        """
        if self._flat is not None:
            self._flat.leave()
        self._script_steps.settle()

    def refuse_audit(self, reason: str) -> None:
        """Never call the model again, for a loop whose model counts its calls.

        Ranks still compare their weights in audited steps.

        Args:
            reason: Why, such as "the model counts metrics", which rank 0 says.
        """
        self.engine.setup.executor.is_repeatable = False
        if self.parallel.rank == 0:
            log(f"ls.exact: audited steps compare weights, and repeat no micro-batch: {reason}")

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last complete step, for any number of ranks.

        If the handle has optimizers, the state also has what training continues from, under the
        keys of `Trainer.state_dict`.

        Raises:
            UsageError: A step has begun and is not complete.
        """
        self._require_settled("state_dict()")
        epoch, batch = self._next_position
        position = {"step": self.steps, "epoch": epoch, "batch": batch, **self._settings}
        return super().state_dict() | position if self._has_optimizers else position

    @property
    def _next_position(self) -> tuple[int, int]:
        """The epoch and the batch after the last complete step of a flat loop."""
        return self._start if self._flat is None else self._flat.next_position

    @property
    def _has_optimizers(self) -> bool:
        return bool(self.engine.options.has_optimizers)

    def load_state_dict(self, state: SavedState) -> None:
        """Continue at a position; the next iteration over the sampler begins there.

        Raises:
            UsageError: The state was saved with another seed or number of micro-batches.
        """
        self._require_settled("load_state_dict()")
        for name, value in self._settings.items():
            if state[name] != value:
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, and ls.exact has {value}: "
                    "pass the same value, which determines the bits"
                )
        if "model" in state:
            super().load_state_dict(state)
        self._script_steps.forget_left()  # the state says where the training goes on
        if "step" in state:
            self.engine.state.position.steps = state["step"]
            self._start = state["epoch"], state["batch"]
        if self._flat is not None:
            self._flat.go_to(self._start)

    @property
    def _settings(self) -> dict[str, int]:
        return {"microbatches": self.parallel.microbatches, "seed": self.seed}

    def _require_settled(self, call: str) -> None:
        """Commit the last step, and raise UsageError if one is in the middle of a batch."""
        self._script_steps.settle()
        if self._script_steps.opened is not None:
            raise UsageError(
                f"{self._script_steps.place}: exact.{call} was called in the middle of a batch: "
                "call it between two steps"
            )

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """End the run: save the last checkpoint, and write the last line of the record.

        Call it on every rank if the handle has checkpoints, and in elastic runs; or use the handle
        in a `with` statement.

        Args:
            state: How the run ended, for the record: "done", "failed" or "stopped".
            message: Why, for the record.

        If the record or the last checkpoint could not be written, such as on a full disk, the
        script goes on, and the process exits with status 1 at its end.

        Raises:
            UsageError: A resumed script ended before it reached the position of the other run.
        """
        self._script_steps.settle()
        if self._flat is not None:
            self._flat.leave()
        super().finish(state, message)
