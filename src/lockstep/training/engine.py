"""The parts of a training, assembled once for the trainer and for `ls.exact`.

    model, optimizers, layout ──> state ──> run       its record, checkpoints, elastic rounds
                                    ├─────> steps     executor, exchange, hooks
                                    └─────> evaluations

The trainer steps the optimizers itself, the loop of `ls.exact` steps those of the script: that is
the `update` of a step. Everything else is the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.audit_hook import Audit
from lockstep.audit.call_audit_hook import CallAuditHook
from lockstep.audit.replica_check import ReplicaCheck
from lockstep.checkpoint.save_schedule import CheckpointConfig, Stateful
from lockstep.checkpoint.stop_request import Finish
from lockstep.comm.collectives import broadcast_bytes
from lockstep.elastic.membership import (
    Membership,
    exchange,
    membership,
    run_transaction,
)
from lockstep.kernel.parts import Update
from lockstep.kernel.step import OptimizerStep
from lockstep.kernel.step_hooks import StepHook
from lockstep.launcher.world import world
from lockstep.messages import log
from lockstep.model.forward import Metric
from lockstep.model.group_exchange import exchange_statuses
from lockstep.model.loss_check import LossCheckHook
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.time_first import TimeFirstWarning
from lockstep.pipeline.executor import PipelineExecutor
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.record.loggers import Logger
from lockstep.record.progress import Progress
from lockstep.training.evaluation_operation import EvaluationOperation
from lockstep.training.history import Callback, History
from lockstep.training.model_setup import ModelSetup
from lockstep.training.one_pass.one_pass import OnePass, OnePassNotes
from lockstep.training.optimization import OptimizerHookCheck
from lockstep.training.resume.compatibility import describe_run
from lockstep.training.resume.epoch import Epoch
from lockstep.training.resume.resumable_run import ResumableRun
from lockstep.training.resume.run_checkpoints import RunCheckpoints
from lockstep.training.resume.run_end import RunEnd
from lockstep.training.round_entry import RoundEntry
from lockstep.training.run_record import LoggerLike, RunRecord
from lockstep.training.session import (
    ObservationHook,
    ObservedTrainer,
    Session,
    current_session,
)
from lockstep.training.state import TrainingState, begin_position
from lockstep.training.step_environment import (
    CollectiveCallCheck,
    GatheredParameters,
    KernelSettings,
    PortabilityNotes,
)
from lockstep.training.step_operation import StepOperation
from lockstep.training.step_usage import StepUsage
from lockstep.training.storage.sharded_step import choose_squares
from lockstep.training.storage.shared_state_check import SharedStateCheck
from lockstep.training.storage.update_check import UpdateCheck
from lockstep.training.weights_file import save_from_rank0
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["Engine", "EngineOptions"]


@dataclass(frozen=True)
class EngineOptions:
    """The settings of a training other than its model, its optimizers and its layout.

    Attributes:
        seed: The seed of all random numbers.
        settings: The description of the arguments, for checkpoints.
        metrics: Functions of (outputs, targets) by name.
        max_grad_norm: The largest 2-norm of the whole gradient; None: no limit.
        callbacks: The callbacks of the history.
        loggers: Where rank 0 records the run.
        checkpoint: When and where checkpoints are saved; None: none are.
        stateful: Objects by name that a process which joins an elastic run gets with the state, if
            there are no checkpoints, whose settings have their own.
        progress: Whether rank 0 shows its progress; None: unless that of another training is shown.
        audit: When a micro-batch is computed again; None: never.
        is_exact: Whether the script computes the micro-batches of every step, and steps the
            optimizers.
        hooks: More hooks of the steps.
        has_optimizers: Whether the optimizers are known from the beginning.
    """

    seed: int
    settings: dict[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    max_grad_norm: float | None = None
    callbacks: Callback | Sequence[Callback] = ()
    loggers: LoggerLike | Sequence[LoggerLike] | None = None
    checkpoint: CheckpointConfig | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    progress: bool | None = None
    audit: AuditConfig | None = None
    is_exact: bool = False
    hooks: Sequence[StepHook] = ()
    has_optimizers: bool = True


class Engine:
    """The parts of one training.

    Args:
        setup: The model with its executor and optimizers.
        parallel: The layout.
        options: The other settings.
        update: The update of a step; None: `setup.optimization`.

    Attributes:
        setup, parallel, options: The arguments.
        is_in_session: Whether a command observes the training.
        history: The history.
        state: The state that training continues from.
        record: The folder and the loggers of the run.
        run: The run, which answers the calls of a resumed script.
        end: The end of the run.
        steps: The steps.
        evaluations: The evaluations and predictions.
        rounds: The part in the rounds of an elastic run; None outside of one.
    """

    def __init__(
        self,
        setup: ModelSetup,
        parallel: ParallelContext,
        options: EngineOptions,
        update: Update | None = None,
    ) -> None:
        session = current_session()
        member = membership()
        self._stateful = None if options.checkpoint is None else options.checkpoint.stateful
        if session is not None:  # a command that observes the steps writes nothing
            options = replace(options, loggers=(), checkpoint=None, stateful={}, progress=False)
        self.setup = setup
        self.parallel = parallel
        self.options = options
        self.is_in_session = session is not None
        is_rank0 = parallel.rank == 0
        is_shown = is_rank0 and options.progress is not False
        display = Progress(bool(options.progress)) if is_shown else None
        self.history = History(callbacks=options.callbacks, progress=display)
        self.state = TrainingState(
            setup.module,
            setup.optimization,
            parallel,
            setup.executor,
            self.history,
            begin_position(options.seed, parallel.group),
        )
        parallel.is_recorded = self.is_in_session
        self.end = RunEnd(self.state, member)
        loggers = options.loggers if is_rank0 else ()
        self.record = RunRecord(loggers, options.checkpoint, self._open_record)
        checkpoints = None
        if options.checkpoint is not None:
            checkpoints = RunCheckpoints(options.checkpoint, parallel, self.record, member)
        settings = options.settings | setup.settings
        stateful = options.stateful if checkpoints is None else checkpoints.stateful
        self.run = ResumableRun(self.state, settings, self.record, checkpoints, stateful, member)
        self.end.begin(self.run, self._is_recorded())
        hooks = self._list_hooks(is_resumable=bool(checkpoints or member))
        if session is None and options.audit is not None:
            hooks = self._list_audits(options.audit, member, hooks)
        if session is not None:
            hooks.append(self._observe(session))
        optimizer_step = OptimizerStep(
            parallel,
            setup.executor,
            update or setup.optimization,
            partial(exchange_statuses, parallel.messages),
            hooks,
            options.max_grad_norm,
            is_repeatable=setup.optimization.shared is not None or member is not None,
            squares=choose_squares(parallel, setup.module),
        )
        self.steps = StepOperation(optimizer_step, setup.model, self.run)
        self.evaluations = EvaluationOperation(self.run)
        self.rounds: RoundEntry | None = None
        if member is not None and session is None:
            self.rounds = RoundEntry(member, self.run, self._promote)

    def make_batches(
        self, data: Mapping[str, Any], seed: int | None, epoch: int | None, finish: Finish
    ) -> Epoch:
        """Return the global batches of one epoch, of which each rank loads its own micro-batches.

        Args:
            data: The dataset and its options, as `resolve_data` returns them.
            seed: The seed of order and augmentation; None: that of the training.
            epoch: The number of the epoch; None: the one after the latest.
            finish: The function that ends the training if it stops on request.
        """
        self.run.begin()
        position = self.state.position
        group = self.parallel.group

        def agree(message: bytes, doing: str) -> list[bytes]:
            return exchange(lambda: message, f"{doing} epoch {position.epoch}", group)

        batches = Epoch(
            self.run,
            finish,
            **data,
            **self.parallel.loader_options(),
            seed=self.options.seed if seed is None else seed,
            epoch=epoch,
            agree=agree,
        )
        if self.rounds is not None:
            self.rounds.follow(batches.batches)
        return batches

    def save_weights(self, path: Path, ema: bool) -> None:
        """Write the weights to a file from rank 0, unless a command observes the steps."""
        if self.is_in_session:
            return
        state = self.state.collect_model(ema)
        group = self.parallel.group
        run_transaction(lambda: save_from_rank0(path, state, group), lambda _: None)

    # --- the hooks of a step ------------------------------------------------------------------

    def _list_hooks(self, *, is_resumable: bool) -> list[StepHook]:
        """Return the hooks that take part in every step, in this order."""
        setup = self.setup
        parallel = self.parallel
        position = setup.executor.position
        optimization = setup.optimization
        settings = KernelSettings(setup.model, may_overlap=self.options.is_exact)
        hooks: list[StepHook] = [settings, CollectiveCallCheck(position)]
        executor = setup.executor
        if isinstance(executor, WholeModelExecutor) and executor.sharded is not None:
            hooks.append(GatheredParameters(executor.sharded))
        if optimization.shared is not None:
            hooks.append(SharedStateCheck(optimization.shared, setup.state_check.held))
        hooks += setup.checks
        if optimization.is_split:
            hooks.append(OptimizerHookCheck(optimization))
        hooks.append(TimeFirstWarning(setup.model, position))
        if parallel.loss is not None:
            hooks.append(LossCheckHook(parallel.modules_with(setup.model)))
        hooks.append(StepUsage())
        if has_portable_bits():
            hooks.append(PortabilityNotes(self.history.write))
        if isinstance(executor, PipelineExecutor):
            hooks.append(OnePassNotes(executor.find_note, self.history.write))
        elif isinstance(passes := executor.one_pass, OnePass):
            hooks.append(OnePassNotes(lambda: passes.known.note, self.history.write))
        if is_resumable:
            hooks.append(self.run.safe_points)
        return [*hooks, *self.options.hooks, self.history]

    def _list_audits(
        self, config: AuditConfig, member: Membership | None, hooks: list[StepHook]
    ) -> list[StepHook]:
        """Return the hooks with those of the audit."""
        parallel = self.parallel
        executor = self.setup.executor
        record = self._record_finding
        position = executor.position
        optimization = self.setup.optimization
        modules = parallel.modules_with(self.setup.model)
        who = "ls.exact" if self.options.is_exact else "trainer.manual_step()"
        calls = CallAuditHook(config, parallel, position, executor.find_calls, record, who)
        hooks = [*hooks, calls]
        if isinstance(executor, WholeModelExecutor) and not self.options.is_exact:
            leave = None if member is None else self._leave_if
            repeat = executor.repeat
            stop = self.run.safe_points.stop
            hooks.append(
                Audit(
                    config,
                    parallel,
                    position=position,
                    repeat=repeat,
                    modules=modules,
                    record=record,
                    stop=stop,
                    leave=leave,
                )
            )
        if optimization.storage != "replicated":
            steps = optimization.optimizers, optimization.find_name
            hooks.append(UpdateCheck(config, parallel.rank, *steps, self.history.write))
        # A process that joins an elastic run is alone at first.
        if parallel.replicas > 1 or member is not None:
            update = optimization.shared
            shared = [] if update is None else update.shared.parameters
            held = optimization.unshared_state
            # First, before other checks raise an error about what it can restore.
            hooks.insert(0, ReplicaCheck(config, parallel, modules, held, record, shared))
        return hooks

    def _observe(self, session: Session) -> ObservationHook:
        """Return the hook by which a command observes the steps."""
        setup = self.setup
        state = self.state
        observer = session.attach(
            ObservedTrainer(
                backend=world().backend,
                parallel=self.parallel,
                called=setup.model,
                module=setup.module,
                has_whole_gradients=setup.optimization.shared is None,
                digest=state.digest,
                optimizer_digest=state.optimizer_digest,
                optimizer_state=setup.optimization.local_state,
                settle=self.settle,
                failure=state.history.failure,
                optimizers=setup.optimization.optimizers,
                is_exact=self.options.is_exact,
            )
        )
        path = observer.checkpoint
        if path is not None and self._stateful is not None:
            self.run.replay_from(path, self._stateful)
        return ObservationHook(observer, setup.executor.position)

    def settle(self) -> None:
        """Commit the last step of a script's loop, which is otherwise done at its next call."""
        if self.end.settle is not None:
            self.end.settle()

    # --- the record ---------------------------------------------------------------------------

    def _is_recorded(self) -> bool:
        """Return whether the run is recorded; a collective call if ranks have parts of the model.

        All ranks must then take part in computing a digest.
        """
        is_recorded = self.parallel.rank == 0 and self.record.may_record
        if not self.parallel.has_parts:
            return is_recorded
        here = b"1" if is_recorded else b""
        return broadcast_bytes(here, "opening a record", self.parallel.group) == b"1"

    def _open_record(self, loggers: list[Logger]) -> None:
        """Start to record the run with these loggers."""
        self.history.loggers = loggers
        self.parallel.is_recorded |= bool(loggers)
        if loggers:
            self.end.end_at_exit(loggers)
            self.history.write("run", **describe_run(self.state))

    def _record_finding(self, finding: Mapping[str, Any]) -> None:
        """Write a finding of the audit to the record, and its message to standard error."""
        self.history.write("audit", **finding)
        if self.parallel.rank == 0:
            log(finding["message"])

    # --- elastic runs -------------------------------------------------------------------------

    def _leave_if(self, rank: int, reason: str) -> None:
        """End this process if it is that rank of an elastic run; another one takes its place."""
        if self.parallel.rank == rank:
            log(reason)
            os.kill(os.getpid(), signal.SIGKILL)

    def _promote(self) -> None:
        """Make this rank the new rank 0: write to the loggers, and show the progress."""
        if self.options.progress is not False:
            self.history.progress = Progress(bool(self.options.progress))
        self.run.promote(self.options.loggers)
