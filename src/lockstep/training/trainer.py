"""The trainer: takes optimizer steps, with the same bits in every layout.

batches ──> step ──> statuses ──> gradients ──> clip ──> buffers ──> optimizer ──> history
(data)      forward   of all       added along            merged      the same      record and
            backward  ranks        the tree                           everywhere    callbacks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from lockstep.audit.audit_config import AuditConfig, read_audit
from lockstep.checkpoint.save_schedule import CheckpointConfig, read_checkpoint_argument
from lockstep.checkpoint.stop_request import end_call, stopping
from lockstep.data.dataloader import BatchOptions, EvaluationOptions, resolve_data
from lockstep.data.loader import EpochBatches
from lockstep.elastic.membership import membership
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.launcher.world import require_world
from lockstep.model.deferred_init import BlockLike
from lockstep.model.evaluation import Evaluation, Scoring
from lockstep.model.forward import Metric
from lockstep.model.predictions import Predictions
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.training.call_hints import explain_calls, explain_methods
from lockstep.training.engine import Engine, EngineOptions
from lockstep.training.history import Callback, History
from lockstep.training.model_setup import set_up_model
from lockstep.training.optimizer_config import (
    OptimizerConfig,
    OptimizerFactory,
    list_configs,
    list_intervals,
)
from lockstep.training.parallel_setup import make_parallel_context
from lockstep.training.run_record import LoggerLike
from lockstep.training.script_loop.manual_step import ManualStep
from lockstep.training.services import Services
from lockstep.training.session import current_session
from lockstep.training.trainer_arguments import Storage, check_arguments, compare_arguments

__all__ = ["Trainer"]

explain_methods(ManualStep, "step", dict.fromkeys(("backward_whole_batch", "gather", "total"), ""))


# It has many methods: each is one that users call.
@explain_calls
class Trainer(Services):
    """Trains a model on all ranks of the world, with the same bits in every layout.

    For a given model, loss, optimizer, seed, data order, `microbatches`, number of threads, torch
    build and kind of processor, the parameters, buffers, optimizer state and loss are
    bit-identical after every step for any number of ranks.

    Construct it on every rank; it calls `lockstep.init()` if the script has not. Use it in a `with`
    statement, or call `finish` at the end, which saves the last checkpoint. Otherwise the record of
    the run is completed when the process exits.

    Args:
        model: A module, built on every rank. All ranks start with the weights of the lowest rank
            that has them. A list of modules, or of callables that return one, is trained as a
            sequence; if it has as many items as `pipeline.stages`, each item is a stage. Modules
            of a list that are on the meta device get initial weights that depend on `seed` and
            on their position in the list; with `pipeline.balance` or one item per stage, only on
            the ranks that hold them. Other modules on the meta device are initialized by their
            `reset_parameters()`, with the random numbers of a model that is built with memory.
        loss: A function of (outputs, targets) that returns the mean over the samples of a
            micro-batch as a scalar tensor, or their sum with `reduction="sum"`. None: the model
            returns its loss.
        optimizer: A factory of the optimizer, such as `partial(torch.optim.SGD, lr=0.1)`, or an
            `OptimizerConfig` with parameter groups and a learning-rate scheduler. For several
            optimizers, a list of `OptimizerConfig`, each with `parameters`.
        microbatches: The number of micro-batches per global batch, at least the number of
            replicas. It affects the bits, so the default (8) does not depend on the number of
            ranks.
        seed: The seed of all random numbers that the model draws, an int64. It is also the seed
            of the order of the samples, unless `batches` gets another one.
        loss_weight: A function of the data of a micro-batch that returns its weight, for a loss
            that is not a mean over samples. None: the number of samples, or for
            `CrossEntropyLoss` and `NLLLoss` with class weights or a non-default `ignore_index`
            the sum of the weights of the targets.
        metrics: Functions of (outputs, targets) by name, each returning a mean over the samples
            as a number or a tensor with one element; with `loss=None`, of the model's outputs and
            the micro-batch. They keep nothing between calls, of which each rank makes its own. For
            other metrics, such as F1 or AUC, a `DatasetMetric`.
        max_grad_norm: The largest 2-norm of the whole gradient. None: gradients are not clipped.
        ema_decay: The decay, in [0, 1), of an exponential moving average of the weights, which
            is available as `ema_model`. None: no average.
        autocast_dtype: `torch.bfloat16`, or `torch.float16` with a loss scale. Parameters keep
            their dtype. None: no autocast.
        activation_checkpointing: Whether to keep only the inputs of each block and recompute its
            activations in backward. Saves memory, costs a second forward, changes no bit.
        extra_modules: Modules that a step calls in addition to the model and does not train, such
            as the discriminator in the generator's step, or a teacher. Their buffers are kept equal
            on all ranks, and checkpoints contain their parameters and buffers.
        pipeline: How the model is split into blocks and stages. None: no stages.
        storage: Where parameters and optimizer state are kept: "replicated", a copy per rank,
            "shared", a copy per host in shared memory, "sharded", divided over all ranks, or
            "hybrid", a copy per host, divided over its ranks. See the guides on shared and sharded
            storage.
        callbacks: Functions that are called with the `StepResult` of every step, or objects with
            the methods `on_step(result)` or `on_epoch(result)`. Called on every rank.
        loggers: Where rank 0 records the run: a folder, a logger such as
            `loggers.TensorBoard(folder)`, or a list of both. None: the folder of `lockstep run`
            or of the checkpoints, if there is one. An empty list: the run is not recorded.
        checkpoint: When and where checkpoints are saved, from which `resume` continues; True for
            the defaults of `CheckpointConfig`. None: no checkpoints. See the guide on checkpoints.
        progress: Whether rank 0 shows its progress, as a live display on a terminal, and
            as occasional lines elsewhere. None: yes, unless the progress of another trainer of
            the script is shown.
        audit: When a micro-batch is computed again, on another rank if there is one, to find
            hidden state and faulty processors: an `AuditConfig`; True for its defaults, False for
            never. Nothing else finds state in attributes and globals, nor warns of it.

    Raises:
        UsageError: An argument is invalid.
        LayoutError: There are more replicas than micro-batches, or more stages than the world
            or the model has.
        DisagreementError: Models or settings differ between ranks; raised on every rank.
    """

    history: History
    engine: Engine

    def __init__(
        self,
        model: nn.Module | Sequence[BlockLike],
        loss: Callable[..., Any] | None,
        optimizer: OptimizerFactory | OptimizerConfig | Sequence[OptimizerConfig],
        *,
        microbatches: int = 8,
        seed: int = 0,
        loss_weight: WeightFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        autocast_dtype: torch.dtype | None = None,
        activation_checkpointing: bool = False,
        extra_modules: Sequence[nn.Module] = (),
        pipeline: PipelineConfig | None = None,
        storage: Storage = "replicated",
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerLike | Sequence[LoggerLike] | None = None,
        checkpoint: CheckpointConfig | bool | None = None,
        progress: bool | None = None,
        audit: AuditConfig | bool = True,
    ) -> None:
        here = require_world()
        microbatches = int(microbatches)  # perhaps numpy's, which has other methods
        seed = int(seed)
        optimizers = list_configs(optimizer)
        pipeline = pipeline or PipelineConfig()
        auditing = read_audit(audit)
        saving = read_checkpoint_argument(checkpoint)
        settings = compare_arguments(
            model,
            {
                "loss": loss,
                "microbatches": microbatches,
                "seed": seed,
                "loss_weight": loss_weight,
                "metrics": metrics,
                "max_grad_norm": max_grad_norm,
                "ema_decay": ema_decay,
                "autocast_dtype": autocast_dtype,
                "activation_checkpointing": activation_checkpointing,
                "extra_modules": extra_modules,
                "storage": storage,
                "checkpoint": None if saving is None else list(saving.stateful),
                "audit": auditing and repr(auditing),
                "scheduler_interval": list_intervals(optimizers),
                **{f"pipeline.{name}": value for name, value in vars(pipeline).items()},
            },
        )
        check_arguments(storage, pipeline.stages, max_grad_norm)
        session = current_session()
        if session is not None:
            pipeline, is_shared = session.options(model, pipeline)
            storage = "shared" if is_shared else "replicated"
        is_sharded = storage in ("sharded", "hybrid")
        member = membership()
        if is_sharded and member is not None and member.is_waiting:
            member.join()  # which ends this process with all others, before it holds a whole model
        parallel = make_parallel_context(
            here,
            microbatches,
            loss,
            loss_weight=loss_weight,
            autocast_dtype=autocast_dtype,
            extra_modules=extra_modules,
            stages=pipeline.stages,
            activation_checkpointing=activation_checkpointing,
            is_sharded=is_sharded,
            is_hybrid=storage == "hybrid",
        )
        setup = set_up_model(
            model,
            parallel,
            optimizers,
            metrics=metrics or {},
            pipeline=pipeline,
            seed=seed,
            ema_decay=ema_decay,
            is_shared=storage == "shared",
            is_elastic=member is not None,
        )
        options = EngineOptions(
            seed=seed,
            settings=settings,
            metrics=metrics or {},
            max_grad_norm=max_grad_norm,
            callbacks=callbacks,
            loggers=loggers,
            checkpoint=saving,
            progress=progress,
            audit=auditing,
        )
        engine = Engine(setup, parallel, options)
        super().__init__(engine)
        self.metrics = dict(metrics or {})
        self._steps = engine.steps
        if session is None and self._run.is_resuming:
            self.resume()

    # --- the training loop -------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        **options: Unpack[BatchOptions],
    ) -> EpochBatches:
        """Return the global batches of one epoch, of which each rank loads its own micro-batches.

        The epoch is complete, for schedulers and callbacks, when its last batch has been trained.

        Args:
            dataset: A map-style or iterable dataset, or a DataLoader, whose options are used.
            batch_size: The number of samples of a global batch, over all ranks. Required unless
                `dataset` is a DataLoader, whose batch size is then the global one.
            seed: The seed of order and augmentation. None: that of the trainer.
            epoch: The number of the epoch, from 0, which with `seed` decides order and
                augmentation. None: each iteration is the epoch after the latest one.
            **options: `shuffle` (default True), `sampler`, `batch_sampler`, `drop_last`,
                `num_workers`, `collate_fn` and `pin_memory`, with their meanings in
                `torch.utils.data.DataLoader`. See the guide on data.

        Raises:
            UsageError: An option is unknown, or cannot be combined with another one.
            DisagreementError: While iterating, ranks ask for different batches; raised on every
                rank.
        """
        given = resolve_data(dataset, batch_size, options)
        return self.engine.make_batches(given, seed, epoch, self.finish)

    def step(self, batch: Any) -> float:
        """Train on one global batch.

        After an error, parameters, buffers and optimizer state are as they were before the step.
        All errors are raised on every rank.

        Args:
            batch: A batch from `batches`, or a whole global batch of tensors whose first dimension
                counts the samples, the same on every rank.

        Returns:
            The loss of the batch before the step, the same bits on every rank.

        Raises:
            LossError: A loss is not a scalar, or not finite.
            GradientError: The norm of the gradient is not finite.
            StateError: Forward wrote to a parameter, or to other state that it may not change.
            DisagreementError: Ranks take different steps, or train on different batches.
        """
        try:
            return self.engine.run.call_step(batch, self._steps.take)
        except BaseException as error:
            end_call(error, self.finish, self._run.safe_points.abandon)
            raise

    def manual_step(self) -> ManualStep:
        """Return a context in which your own loop computes the micro-batches of one step.

        Use it for several backward passes, for several models (a GAN), or for a loss that needs
        more than (outputs, targets). Leaving the context finishes the step on every rank.

        Example:
            ```python
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    step.backward(loss_function(model(inputs), targets))
            ```

        Raises:
            UsageError: The trainer has pipeline stages: no rank has the whole model.
        """
        self._steps.require_whole_model()
        return ManualStep(self._steps.opening(is_repeatable=False))

    def attempts(self, *batches: Any) -> Iterator[ManualStep]:
        """Yield attempts at one step that your own loop computes, until an attempt succeeds.

        Use it instead of `manual_step` in an elastic run, where the body is repeated if a rank
        is lost. Otherwise there is one attempt. The body must change nothing but gradients and
        buffers.

        Example:
            ```python
            for attempt in trainer.attempts(batch):
                with attempt as step:
                    for inputs, targets in step.microbatches():
                        step.backward(loss_function(model(inputs), targets))
            ```

        Args:
            *batches: A batch from `batches`, or a whole global batch of tensors whose first
                dimension counts the samples, the same on every rank; or several of them.

        Raises:
            UsageError: The trainer has pipeline stages: no rank has the whole model.
        """
        self._steps.require_whole_model()
        while True:
            step = ManualStep(self._steps.opening(is_repeatable=True), *batches)
            yield step
            if not step.was_interrupted:
                return

    def evaluate(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        ema: bool = False,
        **options: Unpack[EvaluationOptions],
    ) -> Evaluation:
        """Return the mean loss and metrics over a dataset, each sample counted once.

        Changes of buffers during the evaluation are discarded. With `loss=None` and metrics, the
        model may return predictions without a loss in evaluation mode; the loss is then NaN.

        Args:
            dataset: As for `batches`.
            batch_size: As for `batches`. It affects the bits of the mean.
            ema: Whether to evaluate the averaged weights.
            **options: As for `batches`, but `shuffle` is False by default.

        Raises:
            UsageError: `ema` without `ema_decay`, or an invalid option.
        """
        given = self._select_data("evaluate()", dataset, batch_size, options)
        begin = partial(Scoring, self.parallel, self.metrics, ema)
        with stopping(self.finish, self._run.safe_points.abandon):
            evaluation: Evaluation = self.engine.evaluations.evaluate(given, begin, ema=ema)
        return evaluation

    def predict(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        ema: bool = False,
        **options: Unpack[EvaluationOptions],
    ) -> Any:
        """Return the model's outputs in evaluation mode for all samples, in the dataset's order.

        Every rank gets all outputs, as tensors on the CPU. They have the form that the model
        returns, and are joined along dimension 0; a list of mappings has one mapping per sample.
        With a loss function, the last entry of a sample with several is its targets, which the
        model does not get.

        Args:
            dataset: As for `batches`.
            batch_size: As for `batches`. It affects the bits of models that compare samples.
            ema: Whether to use the averaged weights.
            **options: As for `batches`, but `shuffle` is False by default.

        Raises:
            UsageError: The outputs cannot be joined; or a resumed script has not yet reached the
                place where the run was interrupted, so that the weights are not those of the call.
        """
        given = self._select_data("predict()", dataset, batch_size, options)
        begin = partial(Predictions, self.parallel)
        with stopping(self.finish, self._run.safe_points.abandon):
            return self.engine.evaluations.predict(given, begin, ema=ema)

    # --- state --------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory returned. The trainer calls its `step` itself.

        Raises:
            UsageError: There are several: use `optimizers`.
        """
        return self.engine.setup.optimization.get_only_schedule("optimizer").optimizer

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, in the order in which they were configured."""
        return self.engine.setup.optimization.optimizers

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; None without one.

        Raises:
            UsageError: There are several optimizers: use `schedulers`.
        """
        return self.engine.setup.optimization.get_only_schedule("scheduler").scheduler

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The scheduler of each optimizer, or None."""
        return tuple(schedule.scheduler for schedule in self.engine.setup.optimization.schedules)

    @property
    def ema_model(self) -> nn.Module | None:
        """A copy of the model with the averaged weights; None without `ema_decay`."""
        average = self.engine.setup.optimization.average
        return None if average is None else average.module
