"""The trainer: micro-batches, the tree, the optimizer; the same bits in every layout.

batches ──> step ──> ledger ──> buffers ──> gradients ──> clip ──> optimizer ──> history
(data)      forward   what       merged      added along           the same      record and
            backward  all say                the tree              everywhere    callbacks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn

from lockstep.check import session as check
from lockstep.comm.clock import clock_offset
from lockstep.comm.transfer import all_gather_bytes
from lockstep.data.loader import Agree, Batches
from lockstep.data.samplers import SamplerStates
from lockstep.errors import FileError, GradientError, LayoutError, LossError, UsageError
from lockstep.launcher.world import world
from lockstep.model.agreement import require_same
from lockstep.model.attempt import Attempt
from lockstep.model.deferred_init import BlockLike
from lockstep.model.description import describe, describe_environment, describe_module
from lockstep.model.evaluation import Evaluation
from lockstep.model.forward import Metric
from lockstep.model.history import EpochResult, History, StepResult
from lockstep.model.live_settings import LiveSettings
from lockstep.model.loss_weight import WeightFunction
from lockstep.model.optimization import (
    Groups,
    Optimization,
    OptimizerFactory,
    SchedulerFactory,
)
from lockstep.model.parallel_context import Setting
from lockstep.model.step import Step
from lockstep.model.turn import Turn
from lockstep.model.watch import Watch, ranks_of
from lockstep.model.wrappers import refuse_wrappers
from lockstep.pipeline.cut import Blocks
from lockstep.pipeline.stages import Stages
from lockstep.pipeline.state import State
from lockstep.record.recorder import Recorder
from lockstep.training.epoch import Epoch
from lockstep.training.model_setup import begun, give_weights_to_all
from lockstep.training.opening import Record, folder_of, header, opened
from lockstep.training.saving import save_last_good, save_together
from lockstep.training.undivided import Undivided

__all__ = ["Trainer"]

NOT_COMPARED = {
    "self",
    *("model", "optimizer", "groups", "scheduler"),  # what they make is compared
    *("on_step", "on_epoch", "record", "about"),  # which decide no bit
}
"""Arguments of a Trainer that may differ between ranks."""


class Trainer:
    """Trains a model on all ranks of the world, with the same bits in every layout.

    For a given model, loss, optimizer, seed, data order, `microbatches`, thread
    count, torch build and kind of processor, parameters, buffers, optimizer state
    and loss are the same bits after every step, however many ranks compute it.

    Parameters:
        model: a module, built on every rank; the first rank that has a weight gives it to
            all. A list of modules, or of callables that return one, is their sequence,
            with `stages` of that number cut between them. What is on the meta device in
            a list comes to life with weights that key(seed, b) gives block b, with
            `balance` or a block a stage only on the ranks that hold it.
        loss: a function of (outputs, targets) that returns a mean over the samples
            of a micro-batch (or their sum, with `reduction="sum"`). None: the model
            returns its loss.
        optimizer: a factory such as `partial(torch.optim.SGD, lr=0.1)`.
        microbatches: M, into which every global batch is cut; part of the promise,
            so its default never depends on the world. At least the number of replicas.
        seed: of all random numbers that the model draws.
        weight: gives the weight of a micro-batch from its data, for losses whose mean
            is not one over samples. Found by itself for `CrossEntropyLoss` and
            `NLLLoss` with class weights or an `ignore_index` of one's own.
        metrics: functions of (outputs, targets) that return a mean, by name.
        groups: gives the optimizer options of a parameter by name and parameter.
        scheduler: a factory of the optimizer; moved after each step or epoch, as
            `scheduler_each` says.
        clip_norm: the largest 2-norm of the whole gradient.
        precision: torch.bfloat16 for mixed precision by autocast.
        average: the decay of an exponential moving average of the weights,
            `trainer.average`.
        also: modules that the step calls besides the model and does not train (a GAN's
            discriminator in the generator's step): their buffers are kept alike on
            all ranks, as the model's are.
        stages: ranks of a replica, each with its part of the model; the world size is a
            multiple of it. The rest of the model is on the meta device once it is cut:
            with the first batch, or an `nn.Sequential` at once with `balance`.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; None for the one that is
            fastest by the measured costs of the blocks. No schedule or cut changes a bit.
        blocks: the modules, or their attribute paths, that the model's forward calls one
            after another: each is a unit of random numbers, whatever `stages` is. Needed
            unless the model is an `nn.Sequential` or has a method `blocks()`.
        balance: the number of blocks of each stage, instead of a measurement.
        chunks: stages a rank of the schedule "interleaved", 2 by default.
        recompute: keep a block's inputs and compute its activations again in backward, for
            a second forward of each block. Changes no bit, with any number of stages.
        shared: hold parameters and optimizer state once for all ranks; see `docs/shared.md`.
        elementwise: says of an optimizer of your own that it may step pieces of them.
        on_step, on_epoch: callables that get a `StepResult`, an `EpochResult`, on every rank.
        record: a run's folder, or writers, or several; rank 0 writes.
        about: what the record says of the run besides ("recipe", "epochs", "options", ...).

    Use it in a `with` statement, or call `finish` at the end, where there is a record.

    Raises UsageError without `lockstep.init()`, LayoutError for more replicas than
    micro-batches and for stages that the world or the model does not have,
    DisagreementError where the ranks' models or settings differ.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[BlockLike],
        loss: Callable[..., Any] | None,
        optimizer: OptimizerFactory,
        *,
        microbatches: int = 8,
        seed: int = 0,
        weight: WeightFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        groups: Groups | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_each: Literal["step", "epoch"] = "step",
        clip_norm: float | None = None,
        precision: torch.dtype | None = None,
        average: float | None = None,
        also: Sequence[nn.Module] = (),
        stages: int = 1,
        schedule: str | None = None,
        blocks: Blocks = None,
        balance: Sequence[int] | None = None,
        chunks: int | None = None,
        recompute: bool = False,
        shared: bool = False,
        elementwise: bool = False,
        on_step: Callable[[StepResult], None] | Iterable[Callable[[StepResult], None]] = (),
        on_epoch: Callable[[EpochResult], None] | Iterable[Callable[[EpochResult], None]] = (),
        record: Record | Sequence[Record] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        given = [pair for pair in locals().items() if pair[0] not in NOT_COMPARED]
        self.world = world()
        # First: wrappers keep their rank in an attribute, which the comparison would name.
        refuse_wrappers(dict(given) | {"model": model})
        description = describe_environment()
        for name, value in given:
            description |= describe(name, value)
        require_same(description, "give every rank the same arguments and settings")
        session = check.current()
        if session is not None:
            stages, schedule, balance, chunks, shared = session.options(model, blocks)
            record = ()
        self.setting = Setting.of(
            self.world, microbatches, loss, weight, precision, also, stages, recompute
        )
        if shared and stages > 1:
            raise LayoutError("shared=True is for whole models: train with stages=1 or without it")
        asked = (blocks, schedule, balance, chunks)
        self.model, staging = begun(model, self.setting, seed, *asked)
        self.module: nn.Module = getattr(self.model, "_orig_mod", self.model)
        modules = {"model": self.module} | self.setting.extra_modules()
        refuse_wrappers(modules)  # also those that callables made
        description = {"torch.compile(model)": str(self.model is not self.module)}
        description |= describe_module("model", self.module)
        require_same(description, "build the same model on every rank")
        self.metrics = dict(metrics or {})
        self.seed = seed
        self.steps, self.epoch = 0, 0
        give_weights_to_all(self.module, self.setting, staging, shared)
        self._optimization = Optimization(
            self.module, optimizer, groups, scheduler, scheduler_each, average
        )
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm}: the largest norm is a positive number")
        names: dict[torch.Tensor, str] = {
            each: name for name, each in self.module.named_parameters()
        }
        description = self._optimization.describe(names)
        require_same(description, "give every rank the same optimizer, groups and scheduler")
        foreign = modules.keys() - {"model", "loss"}
        self._live_settings = LiveSettings(modules, foreign, self.optimizer, self.setting.group)
        self._state = State(self.module, self._optimization, self.setting)
        how = (self._optimization, self.metrics, seed, clip_norm)
        self._model = (
            Stages(staging, self.module, self._state, *how)
            if stages > 1
            else Undivided(
                self.setting, self.model, self.module, staging.names, *how, shared, elementwise
            )
        )
        self._attempt = Attempt(_next_number(self.setting.group), step=0, number=-1)
        self._sampler_states = SamplerStates()
        self._began = time.perf_counter()
        writers = opened(record) if self.world.rank == 0 else []
        self._folder = folder_of(writers)
        self.history = History(writers, _listed(on_step), _listed(on_epoch))
        self._recorded = bool(writers)
        if stages > 1:  # digests are made by all ranks together
            here = b"1" if writers else b""
            self._recorded = any(all_gather_bytes(here, "opening a record", self.setting.group))
        if isinstance(self._model, Stages) and self._recorded:
            self._model.watch = Watch(clock_offset(self.setting.group))
        if writers:
            self.history.write("run", **header(self.world, self.setting, self.module, about or {}))
        if session is not None:
            how_called = (self.setting, self.model, self.module, self._optimization)
            self._model.fingerprinter = session.fingerprinter(self.world, *how_called)
            self.history.call_after_steps(
                partial(session.committed, self._model.fingerprinter, self.digest)
            )

    # --- what a loop calls -------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        epoch: int = 0,
        **options: Any,
    ) -> Batches:
        """Return the global batches of one epoch; each rank loads its own micro-batches.

        `batch_size` counts the samples of a global batch, over all ranks. `seed` is
        the trainer's where none is given. For the options (shuffle, sampler,
        batch_sampler, num_workers, collate_fn, pin_memory) see
        `lockstep.data.loader.Batches`. The epoch ends, for schedules and callbacks,
        when the last batch has been trained.
        """
        self.epoch = epoch
        return Epoch(
            self.history.begin_epoch,
            self._end_epoch,
            dataset,
            batch_size,
            **self.setting.share(),
            seed=self.seed if seed is None else seed,
            epoch=epoch,
            agree=self._agreeing(f"epoch {epoch}"),
            sampler_states=self._sampler_states,
            **options,
        )

    @overload
    def step(self) -> Step: ...

    @overload
    def step(self, batch: Any) -> float: ...

    def step(self, batch: Any = None) -> Step | float:
        """Train on one global batch and return its loss, the same bits on every rank.

        `batch` comes from `batches`, or is a whole global batch of tensors, the same
        on every rank. Without an argument it returns a `Step` for a loop of one's own.

        Raises LossError where a loss is not a scalar or not finite; then the weights
        are those before the step.
        """
        self._attempt = self._attempt.following(self.steps)
        self._live_settings.begin()
        if batch is None:
            return self._model.step(self._attempt, self._finish_step)
        try:
            self._model.train(self._attempt, batch, self._finish_step)
        except BaseException as error:
            self._attempt.fail(error)
            raise
        assert self.history.last is not None
        return self.history.last.loss

    def evaluate(
        self, dataset: Any, batch_size: int, *, average: bool = False, **options: Any
    ) -> Evaluation:
        """Return mean loss and metrics over a dataset, each sample counted once.

        With `average`, of the averaged weights. Options as for `batches`.
        """
        self._state.averaged(average)
        batches = Batches(
            dataset,
            batch_size,
            **self.setting.share(),
            **{"shuffle": False, "seed": self.seed, **options},
            agree=self._agreeing("an evaluation"),
        )
        with self._live_settings.evaluation():
            evaluation = self._model.evaluate(batches, average=average)
        self.history.evaluated(evaluation)
        return evaluation

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """End the run: write the last line of the record and close it.

        Raises FileError where the record could not be written to its end.
        """
        digests: dict[str, str] = {}
        if self._recorded and (state == "done" or self.setting.stages == 1):
            digests = {"digest": self.digest(), "optimizer_digest": self.optimizer_digest()}
        if not self.history.writers:
            return
        recorders = [each for each in self.history.writers if isinstance(each, Recorder)]
        last = self.history.last
        self.history.close(
            state=state,
            message=message,
            **digests,
            seconds=time.perf_counter() - self._began,
            steps=self.steps,
            samples=self.history.samples,
            loss=last.loss if last else None,
            metrics=last.metrics if last else None,
        )
        for recorder in recorders:
            if recorder.failure is not None and state == "done":
                raise FileError(recorder.failure)

    # --- what it holds ------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made."""
        return self._optimization.optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule of the learning rate, or None."""
        return self._optimization.scheduler

    @property
    def average(self) -> nn.Module | None:
        """The model with averaged weights, or None."""
        average = self._optimization.average
        return None if average is None else average.module

    def digest(self) -> str:
        """Return the SHA-256 over parameters and buffers."""
        return self._state.digest()

    def optimizer_digest(self) -> str:
        """Return the SHA-256 over the optimizer's state."""
        return self._state.optimizer_digest()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from, for any layout: weights, optimizer, step, epoch.

        "buffers" has what a step writes and no module's state dict holds: non-persistent
        buffers of the model, and all buffers of the loss and of `also` modules. The
        position within an epoch is the batches' own: `batches.state_dict()`.
        """
        return {
            "model": self._state.model(),
            "buffers": self._state.buffers(),
            **self._state.optimization(),
            "open_epoch": self.history.state_dict(),
            "samplers": self._sampler_states.state_dict(),
            "steps": self.steps,
            "epoch": self.epoch,
            "seed": self.seed,
            "microbatches": self.setting.microbatches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, in this or another layout.

        Raises UsageError where it was made with another seed or number of micro-batches.
        """
        here = {"seed": self.seed, "microbatches": self.setting.microbatches}
        for name, value in here.items():
            if state[name] != value:
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, this trainer has "
                    f"{name}={value}; the bits would not go on as they were"
                )
        self._state.load(state)
        self.history.load_state_dict(state["open_epoch"])
        self._sampler_states.load_state_dict(state.get("samplers", []))
        self.steps, self.epoch = state["steps"], state["epoch"]
        self._attempt = Attempt(self._attempt.trainer, self.steps, self.steps - 1)

    def save(self, path: str | Path, *, average: bool = False) -> None:
        """Write the weights as safetensors, from rank 0; the file is whole or not there.

        Call it on every rank: all return when the file is written, and all raise
        FileError when it cannot be. Under `lockstep check` nothing is written.
        """
        if check.current() is not None:
            return
        save_together(Path(path), self._state.model(average=average), self.setting.group)

    def __enter__(self) -> Trainer:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the run; as failed, where there was an exception."""
        if error is None:
            self.finish()
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")

    # --- around a step ------------------------------------------------------------------

    def _finish_step(self, step: Turn) -> None:
        try:
            assert self._model.update is not None
            result, pages = self._model.update.apply(step, self._live_settings)
        except (LossError, GradientError) as error:
            if error is step.error:  # of a stage on this rank alone, which the others heard of
                raise
            saved = save_last_good(self._folder, self._state.model(), self.setting.group)
            raise type(error)(f"{error}; training stopped, {saved}") from None
        self.steps += 1
        for rank, page in enumerate(pages):
            for message in page.warnings:
                self.history.warn(rank, message, show=rank == self.world.rank)
        self.history.step(result, [page.memory for page in pages])
        if self.world.rank == 0 and (ranks := ranks_of(pages, step.times)):
            self.history.write("timeline", step=result.step, ranks=ranks)

    def _agreeing(self, what: str) -> Agree:
        def agree(message: bytes, doing: str) -> list[bytes]:
            return all_gather_bytes(message, f"{doing} {what}", self.setting.group)

        return agree

    def _end_epoch(self, epoch: int) -> None:
        result = self.history.end_epoch(epoch)
        if result is not None:
            self._optimization.end_epoch(result.loss)  # first: a callback may save the state
            self.history.tell(result)


_trainers = 0  # that this process has made, or that other ranks of its worlds have


def _next_number(group: dist.ProcessGroup | None) -> int:
    """Return the number of the trainer that all ranks are making, the same on every rank."""
    global _trainers
    said = all_gather_bytes(str(_trainers).encode(), "making a trainer", group)
    number = max(int(each) for each in said)
    _trainers = number + 1
    return number


def _listed(callbacks: Any) -> list[Any]:
    return [callbacks] if callable(callbacks) else list(callbacks)
