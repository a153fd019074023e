"""The trainer: takes optimizer steps, with the same bits in every layout.

batches ──> step ──> statuses ──> gradients ──> clip ──> buffers ──> optimizer ──> history
(data)      forward   of all       added along            merged      the same      record and
            backward  ranks        the tree                           everywhere    callbacks
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep.audit.audit_config import AuditConfig, read_audit
from lockstep.audit.audit_hook import Audit
from lockstep.audit.call_audit_hook import CallAuditHook
from lockstep.audit.replica_check import ReplicaCheck
from lockstep.checkpoint.save_schedule import CheckpointConfig
from lockstep.checkpoint.stop_request import end_call, stopping
from lockstep.comm.collectives import broadcast_bytes
from lockstep.data.dataloader import resolve_data
from lockstep.data.loader import Batches, GatherFn
from lockstep.elastic.membership import exchange, membership, run_transaction
from lockstep.kernel.errors import UsageError
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.kernel.step import OptimizerStep
from lockstep.kernel.step_hooks import StepHook, StepResult
from lockstep.launcher.world import world
from lockstep.messages import log
from lockstep.model.deferred_init import BlockLike
from lockstep.model.evaluation import Evaluation, Scoring
from lockstep.model.forward import Metric
from lockstep.model.group_exchange import exchange_statuses
from lockstep.model.loss_check import LossCheckHook
from lockstep.model.time_first import TimeFirstWarning
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.record.loggers import Logger
from lockstep.record.progress import Progress
from lockstep.training.call_hints import explain_calls
from lockstep.training.compatibility import describe_run
from lockstep.training.epoch import Epoch
from lockstep.training.evaluation_operation import EvaluationOperation
from lockstep.training.history import Callback, History
from lockstep.training.manual_step import ManualStep
from lockstep.training.model_setup import ModelSetup, set_up_model
from lockstep.training.optimization import OptimizerHookCheck
from lockstep.training.optimizer_config import (
    OptimizerConfig,
    OptimizerFactory,
    list_configs,
    list_intervals,
)
from lockstep.training.parallel_setup import make_parallel_context
from lockstep.training.resumable_run import ResumableRun
from lockstep.training.round_entry import RoundEntry
from lockstep.training.run_checkpoints import RunCheckpoints
from lockstep.training.run_end import RunEnd
from lockstep.training.run_record import LoggerLike, RunRecord
from lockstep.training.sharded_optimizer import SharedStateCheck
from lockstep.training.sharded_step import choose_squares
from lockstep.training.state import TrainingState, begin_position
from lockstep.training.step_environment import CollectiveCallCheck, KernelSettings
from lockstep.training.step_operation import StepOperation
from lockstep.training.step_usage import StepUsage
from lockstep.training.trainer_arguments import Storage, check_arguments, compare_arguments
from lockstep.training.trainer_hooks import (
    Observation,
    ObservedTrainer,
    current_session,
)
from lockstep.training.update_check import UpdateCheck
from lockstep.training.weights_file import save_from_rank0
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["Trainer"]


@explain_calls
class Trainer:
    """Trains a model on all ranks of the world, with the same bits in every layout.

    It has many methods: one for each thing that a script may ask of a training.

    For a given model, loss, optimizer, seed, data order, `microbatches`, number of threads, torch
    build and kind of processor, the parameters, buffers, optimizer state and loss are
    bit-identical after every step for any number of ranks.

    Construct it on every rank after `lockstep.init()`. Use it in a `with` statement, or call
    `finish` at the end, which saves the last checkpoint. Otherwise the record of the run is
    completed when the process exits.

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
            the micro-batch. For other metrics, such as F1 or AUC, a `DatasetMetric`.
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
        checkpoint: When and where checkpoints are saved, from which `resume` continues. None: no
            checkpoints. See the guide on checkpoints.
        progress: Whether rank 0 shows its progress, as a live display on a terminal, and
            as occasional lines elsewhere. None: yes, unless the progress of another trainer of
            the script is shown.
        audit: When a micro-batch is computed again, on another rank if there is one, to find
            hidden state and faulty processors: an `AuditConfig`; True for its defaults, False for
            never. Nothing else finds state in attributes and globals, nor warns of it.

    Raises:
        UsageError: `lockstep.init()` was not called, or an argument is invalid.
        LayoutError: There are more replicas than micro-batches, or more stages than the world
            or the model has.
        DisagreementError: Models or settings differ between ranks; raised on every rank.
    """

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
        checkpoint: CheckpointConfig | None = None,
        progress: bool | None = None,
        audit: AuditConfig | bool = True,
    ) -> None:
        is_rank0 = world().rank == 0
        optimizers, pipeline = list_configs(optimizer), pipeline or PipelineConfig()
        auditing = read_audit(audit)
        stateful = None if checkpoint is None else checkpoint.stateful
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
                "checkpoint": None if stateful is None else list(stateful),
                "audit": auditing and repr(auditing),
                "scheduler_interval": list_intervals(optimizers),
                **{f"pipeline.{name}": value for name, value in vars(pipeline).items()},
            },
        )
        check_arguments(storage, pipeline.stages, max_grad_norm)
        session, member = current_session(), membership()
        if session is not None:
            pipeline, is_shared = session.options(model, pipeline)
            storage = "shared" if is_shared else "replicated"
            loggers, checkpoint, progress = (), None, False
        self._is_in_session = session is not None
        is_sharded = storage in ("sharded", "hybrid")
        if is_sharded and member is not None and member.is_waiting:
            member.join()  # which ends this process with all others, before it holds a whole model
        self.parallel = make_parallel_context(
            world(),
            microbatches,
            loss,
            loss_weight,
            autocast_dtype,
            extra_modules,
            pipeline.stages,
            activation_checkpointing,
            is_sharded,
            storage == "hybrid",
        )
        setup = set_up_model(
            model,
            self.parallel,
            optimizers,
            metrics or {},
            pipeline,
            seed,
            ema_decay,
            is_shared=storage == "shared",
            is_elastic=member is not None,
        )
        self.model, self.module = setup.model, setup.module
        self.metrics, self.seed = dict(metrics or {}), seed
        self._optimization, self._executor = setup.optimization, setup.executor
        self._position = begin_position(seed, self.parallel.group)
        display = Progress(bool(progress)) if is_rank0 and progress is not False else None
        self.history = History(callbacks=callbacks, progress=display)
        self._state = TrainingState(
            self.module,
            self._optimization,
            self.parallel,
            self._executor,
            self.history,
            self._position,
        )
        self.parallel.is_recorded = self._is_in_session
        self._end = RunEnd(self._state, member)
        self._record = RunRecord(loggers if is_rank0 else (), checkpoint, self._open_record)
        checkpoints = None
        if checkpoint is not None:
            checkpoints = RunCheckpoints(checkpoint, self.parallel, self._record, member)
        settings |= setup.settings
        self._run = ResumableRun(self._state, settings, self._record, checkpoints, member)
        is_recorded = is_rank0 and self._record.may_record
        if self.parallel.has_parts:  # all ranks must take part in computing a digest
            here = b"1" if is_recorded else b""
            is_recorded = broadcast_bytes(here, "opening a record", self.parallel.group) == b"1"
        self._end.begin(self._run, is_recorded)
        hooks = self._list_hooks(setup, is_resumable=bool(checkpoints or member))
        if session is None and auditing is not None:
            hooks = self._add_audits(hooks, auditing, is_elastic=member is not None)
        if session is not None:
            observer = session.attach(self._observed())
            if stateful is not None and (path := observer.checkpoint) is not None:
                self._run.replay_from(path, stateful)
            hooks.append(Observation(observer, self._executor.position))
        optimizer_step = OptimizerStep(
            self.parallel,
            self._executor,
            self._optimization,
            partial(exchange_statuses, self.parallel.messages),
            hooks,
            max_grad_norm,
            is_repeatable=self._optimization.sharded is not None or member is not None,
            squares=choose_squares(self.parallel, self.module),
        )
        self._steps = StepOperation(optimizer_step, self.model, self._run)
        begin_scoring = partial(Scoring, self.parallel, self.metrics)
        self._evaluations = EvaluationOperation(self._run, begin_scoring)
        self._rounds: RoundEntry | None = None
        if member is not None and session is None:
            promote = partial(self._promote, loggers, progress)
            self._rounds = RoundEntry(member, self._run, promote)
            if not is_rank0:
                self.history.keep_backlog()
        if session is None and self._run.is_resuming:
            self.resume()

    def _list_hooks(self, setup: ModelSetup, *, is_resumable: bool) -> list[StepHook]:
        """Return the hooks that take part in every step, in this order."""
        parallel, executor, optimization = self.parallel, self._executor, self._optimization
        hooks: list[StepHook] = [KernelSettings(self.model), CollectiveCallCheck(executor.position)]
        if optimization.sharded is not None:
            hooks.append(SharedStateCheck(optimization.sharded, setup.state_check.held))
        hooks += setup.checks
        if optimization.is_split:
            hooks.append(OptimizerHookCheck(optimization))
        hooks.append(TimeFirstWarning(self.model, executor.position))
        if parallel.loss is not None:
            hooks.append(LossCheckHook(parallel.modules_with(self.model)))
        hooks.append(StepUsage())
        if is_resumable:
            hooks.append(self._run.safe_points)
        return [*hooks, self.history]

    def _add_audits(
        self, hooks: Sequence[StepHook], config: AuditConfig, *, is_elastic: bool
    ) -> list[StepHook]:
        """Return the hooks of every step and those of audited ones, in the order of checks."""
        parallel, executor, record = self.parallel, self._executor, self._record_finding
        optimization, position = self._optimization, executor.position
        modules = parallel.modules_with(self.model)
        added = [*hooks]
        added.append(CallAuditHook(config, parallel, position, executor.find_calls, record))
        if isinstance(executor, WholeModelExecutor):
            leave = self._leave_if if is_elastic else None
            called = position, executor.repeat, modules
            stop = self._run.safe_points.stop
            added.append(Audit(config, parallel, *called, record, stop, leave))
        if optimization.storage != "replicated":
            steps = optimization.optimizers, optimization.find_name
            added.append(UpdateCheck(config, parallel.rank, *steps, self.history.write))
        if parallel.replicas > 1:
            sharded = optimization.sharded
            shared = [] if sharded is None else sharded.shared.parameters
            held = optimization.unshared_state
            # First, before other checks raise an error about what it can restore.
            added.insert(0, ReplicaCheck(config, parallel, modules, held, record, shared))
        return added

    # --- the training loop -------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        **options: Any,
    ) -> Batches:
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
        self._run.begin()
        batches = Epoch(
            self._run,
            self.finish,
            **resolve_data(dataset, batch_size, options),
            **self.parallel.loader_options(),
            seed=self.seed if seed is None else seed,
            epoch=epoch,
            agree=self._make_agree(lambda: f"epoch {self._position.epoch}"),
        )
        if self._rounds is not None:
            self._rounds.follow(batches)
        return batches

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
            return self._run.call_step(batch, self._steps.take)
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
        return self._steps.open_manual()

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
        return self._steps.open_attempts(*batches)

    def evaluate(
        self, dataset: Any, batch_size: int | None = None, *, ema: bool = False, **options: Any
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
        with stopping(self.finish, self._run.safe_points.abandon):
            return self._evaluations.evaluate(given, ema=ema)

    def predict(
        self, dataset: Any, batch_size: int | None = None, *, ema: bool = False, **options: Any
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
        with stopping(self.finish, self._run.safe_points.abandon):
            return self._evaluations.predict(given, ema=ema)

    def _select_data(
        self, call: str, dataset: Any, batch_size: int | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options of the batches of an evaluation, and check that no step is open."""
        self._steps.require_closed(call)
        return {"shuffle": False} | resolve_data(
            dataset, batch_size, {"seed": self.seed, **options}
        )

    def log(self, name: str, value: Any, kind: str = "scalar") -> None:
        """Record a value of your own at the latest step; call it on every rank.

        The value of rank 0 appears in the record and the report, and in TensorBoard and other
        dashboards. A resumed script does not record again what it has recorded.

        Args:
            name: The name, such as "temperature". A value of the same name and step replaces it.
            value: A number; a tensor or array for the other kinds.
            kind: "scalar"; "histogram", of the elements of `value`; or "image", of the shape
                (height, width) or (channels, height, width), with 1 or 3 channels, as uint8 or
                floats in [0, 1].

        Raises:
            UsageError: The value is not of this kind.
        """
        self._run.begin()
        if not self.is_replaying:
            self.history.log(name, value, kind)

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """End the run: save the last checkpoint, and write the last line of the record.

        Call it on every rank if the trainer has checkpoints, and in elastic runs.

        Args:
            state: How the run ended, for the record: "done", "failed" or "stopped".
            message: Why, for the record.

        Raises:
            FileError: The record, or the last checkpoint, could not be written.
            UsageError: A resumed script ended before it reached the position of the other run.
        """
        self._end.finish(state, message)

    # --- state --------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory returned. The trainer calls its `step` itself.

        Raises:
            UsageError: There are several: use `optimizers`.
        """
        return self._optimization.get_only_schedule("optimizer").optimizer

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, in the order in which they were configured."""
        return self._optimization.optimizers

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self._position.steps

    @property
    def epoch(self) -> int:
        """The number of the latest epoch that was started, from 0."""
        return self._position.epoch

    @property
    def resumed_from(self) -> int | None:
        """The step that the training was resumed from; None if it was not resumed."""
        return self._run.resumed_from

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed script has not yet reached the place where the run was interrupted.

        Until then, calls have no effect and return what they returned in the interrupted run. Use
        it to leave out what should not be repeated, such as `print`.
        """
        return self._run.is_replaying

    @property
    def last_result(self) -> StepResult:
        """The result of the latest step, the same after resuming; its `loss` is that of `step`.

        After a loop over batches that a resumed script does not repeat, it is the result of the
        last step of that loop, without `ranks` and `losses`. Of a step outside of
        such a loop that is not repeated, only `step`, `epoch` and `loss` are known.

        Raises:
            UsageError: No step was taken.
        """
        if self.history.last is None:
            raise UsageError("trainer.last_result: the trainer has not taken a step")
        return self.history.last

    @property
    def folder(self) -> Path:
        """The folder of the run, the same on every rank; read it on every rank.

        It is a good place for files that belong to the run, such as the best weights. Reading it
        begins the run, so call `resume` before. Under `lockstep check` and `lockstep replay` it is
        a temporary folder.

        Raises:
            UsageError: The run has no folder, since it is not recorded.
        """
        self._run.begin()
        return self._record.share_folder(self.parallel.group, self._is_in_session)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; None without one.

        Raises:
            UsageError: There are several optimizers: use `schedulers`.
        """
        return self._optimization.get_only_schedule("scheduler").scheduler

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The scheduler of each optimizer, or None."""
        return tuple(schedule.scheduler for schedule in self._optimization.schedules)

    @property
    def ema_model(self) -> nn.Module | None:
        """A copy of the model with the averaged weights; None without `ema_decay`."""
        average = self._optimization.average
        return None if average is None else average.module

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, as 64 hexadecimal digits.

        Call it on every rank if the trainer has pipeline stages or sharded storage. Equals
        `lockstep.digest(model)`.
        """
        self._steps.require_closed("digest()")
        return self._run.call_digest("digest", self._state.digest)

    def optimizer_digest(self) -> str:
        """Return the SHA-256 of the optimizer's state, as 64 hexadecimal digits.

        Call it on every rank if the trainer has pipeline stages or sharded storage, or if you have
        changed the optimizer's state with shared storage.
        """
        self._steps.require_closed("optimizer_digest()")
        self._state.publish_edits()
        return self._run.call_digest("optimizer_digest", self._state.optimizer_digest)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training continues from, in any layout.

        The keys include "model", "buffers", "optimizer", "scheduler", "average",
        "module_settings" and "steps". "buffers" holds the tensors that no state dict of the model
        has: its non-persistent buffers, and the buffers and parameters of the loss and of
        `extra_modules`. "module_settings" holds what the script has changed in these modules since
        the trainer was constructed, such as `requires_grad`, modes and plain attributes. The
        position within an epoch is in `batches.state_dict()`.

        All tensors are copies. Call it on every rank if the trainer has pipeline stages or sharded
        storage, or if you have changed the optimizer's state with shared storage.
        """
        self._steps.require_closed("state_dict()")
        self._state.publish_edits()
        return copy.deepcopy(self._state.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned in this or another layout; call it on every rank.

        The tensors of `state` are copied, so it can be loaded again later.

        Raises:
            UsageError: The state was saved with another seed or number of micro-batches.
        """
        self._steps.require_closed("load_state_dict()")
        loaded = ("model", "buffers", "average")  # copied into the tensors that are there
        rest = {name: value for name, value in state.items() if name not in loaded}
        self._state.load_state_dict({**state, **copy.deepcopy(rest)})

    def save_weights(self, path: str | Path, *, ema: bool = False) -> None:
        """Write the weights to a file from rank 0, atomically; call it on every rank.

        All ranks return when the file is written. `lockstep check` writes no file.

        Args:
            path: The file; its folder must exist. The suffixes .pt, .pth, .bin and .ckpt choose
                the format of `torch.load(path, weights_only=True)`, for which rank 0 gathers all
                weights; all others safetensors, written tensor by tensor. The suffix
                .safetensors.index.json writes an index, and parts of up to 5 GB.
            ema: Whether to write the averaged weights.

        Raises:
            FileError: The file could not be written; raised on every rank.
        """
        self._steps.require_closed("save_weights()")

        def save() -> None:
            if not self._is_in_session:
                state, group = self._state.collect_model(ema), self.parallel.group
                run_transaction(lambda: save_from_rank0(Path(path), state, group), lambda _: None)

        with stopping(self.finish, self._run.safe_points.abandon):
            self._run.call("save", save)

    # --- checkpoints --------------------------------------------------------------------

    def resume(self, place: str | Path | None = None) -> None:
        """Continue an interrupted run from a checkpoint, with the bits of an uninterrupted run.

        Call it on every rank before the first batch. The script then makes its calls from the
        beginning: batches that were trained are not yielded again, evaluations return their
        recorded results, and weights that were saved are not saved again. The layout may be
        another one. See the guide on checkpoints.

        Args:
            place: A checkpoint, the folder of a run, or the name of a run in `runs`. None: the
                trainer's own folder; without a checkpoint there the run starts from its
                beginning.

        Raises:
            UsageError: The seed, the number of micro-batches, the model or the optimizer differs
                from that of the checkpoint; there is no checkpoint at `place`; or the script has
                already called `batches`, `step` or `evaluate`.
            FileError: Every checkpoint is damaged.
        """
        if not self._is_in_session:
            self._run.resume(place)

    def __enter__(self) -> Trainer:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the run, as failed if there was an exception."""
        if error is None:
            self.finish()
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")

    def _open_record(self, loggers: list[Logger]) -> None:
        """Start to record the run with these loggers."""
        self.history.loggers = loggers
        self.parallel.is_recorded |= bool(loggers)
        if loggers:
            self._end.end_at_exit(loggers)
            self.history.write("run", **describe_run(self._state))

    def _observed(self) -> ObservedTrainer:
        return ObservedTrainer(
            world().backend,
            self.parallel,
            self.model,
            self.module,
            self._optimization.sharded is None,
            self._state.digest,
            self._state.optimizer_digest,
            self._optimization.local_state,
        )

    def _record_finding(self, finding: Mapping[str, Any]) -> None:
        """Write a finding of the audit to the record, and its message to standard error."""
        self.history.write("audit", **finding)
        if self.parallel.rank == 0:
            log(finding["message"])

    def _leave_if(self, rank: int, reason: str) -> None:
        """End this process if it is that rank of an elastic run; another one takes its place."""
        if self.parallel.rank == rank:
            log(reason)
            os.kill(os.getpid(), signal.SIGKILL)

    def _promote(
        self, loggers: LoggerLike | Sequence[LoggerLike] | None, progress: bool | None
    ) -> None:
        """Make this rank the new rank 0: write to the loggers, and show the progress."""
        if progress is not False:
            self.history.progress = Progress(bool(progress))
        self._run.promote(loggers)

    def _make_agree(self, what: Callable[[], str]) -> GatherFn:
        return lambda message, doing: exchange(
            lambda: message, f"{doing} {what()}", self.parallel.group
        )
