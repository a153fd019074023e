"""Equal bits in Lightning's Trainer, on any number of ranks. Tested with lightning 2.6.6.

    trainer = L.Trainer(strategy=ExactStrategy(microbatches=8), devices=2, ...)

The batch size of the training DataLoader is that of a micro-batch. What Lightning calls a batch is
the list of this rank's micro-batches of a whole batch: its counts (`batch_idx`, limits, intervals,
`estimated_stepping_batches`) are steps of the optimizer on any number of ranks.

`training_step` is called for each micro-batch, and backward for all but the last one, which
Lightning's own loop computes together with the step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lockstep.integrations.divided_loops import DividedEvaluation, DividedPrediction
from lockstep.integrations.evaluation_loader import EvaluationLoader
from lockstep.integrations.logged_values import LoggedValues, refusing_inexact_syncs
from lockstep.integrations.manual_steps import ManualSteps
from lockstep.integrations.microbatch_loader import Microbatches, MicrobatchLoader, leaving
from lockstep.kernel.errors import UsageError
from lockstep.training.script_loop.exact import Exact
from lockstep.training.script_loop.exact_setup import exact

__all__ = ["ExactStrategy"]

STATE = "lockstep"
"""The key of the position in a checkpoint."""

ATTACHED = "_lockstep_attached"
"""The attribute of a module that was trained."""

MANUAL = "_lockstep_manual_step"
"""The attribute of a module that calls `training_step` in manual optimization."""

AVERAGING = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class _Attached:
    """The wrapper and the handle of a module, which later calls of `fit` use again."""

    def __init__(self, wrapper: DistributedDataParallel, handle: Exact) -> None:
        self.wrapper = wrapper
        self.handle = handle

    def __deepcopy__(self, memo: Any) -> None:
        """Return nothing: a copy of the module is another module."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Send and save nothing."""
        return type(None), ()


class StepOutputs(dict[str, Any]):
    """The outputs of a batch for callbacks: the loss. Other outputs are those of a micro-batch."""

    def __missing__(self, name: str) -> Any:
        """Raise UsageError."""
        raise UsageError(
            f"ExactStrategy: outputs[{name!r}] is an output of training_step, which computes one "
            "micro-batch, and each rank has other ones: log it with self.log, whose value is that "
            "of the whole batch"
        )


class _BatchResult(ClosureResult):
    """The result of a batch, whose last micro-batch Lightning's loop has computed."""

    def asdict(self) -> StepOutputs:
        return StepOutputs(loss=self.loss)


class ExactStrategy(DDPStrategy):
    """DistributedDataParallel with the same bits on any number of ranks.

    Args:
        microbatches: The number of micro-batches of a batch, at least the number of ranks.
        seed: The random seed of the order of the samples and of the micro-batches.
        divide_evaluation: Whether each batch of a validation, a test or a prediction is computed by
            one rank. False: by every rank, for modules that keep outputs in attributes.
        **options: The options of `DDPStrategy`.

    Attributes:
        exact: The handle of `ls.exact`, from the beginning of `fit`.

    Raises:
        UsageError: An option has no effect, because the ranks do not average gradients.
    """

    exact: Exact

    def __init__(
        self, microbatches: int = 8, seed: int = 0, divide_evaluation: bool = True, **options: Any
    ) -> None:
        for name in AVERAGING:
            if options.get(name) is not None:
                raise UsageError(f"ExactStrategy adds gradients itself: leave out {name}")
        super().__init__(**options)
        self.microbatches = microbatches
        self.seed = seed
        self.divide_evaluation = divide_evaluation
        self._position: Mapping[str, Any] | None = None  # from a checkpoint
        self._shuffles: bool | None = None  # whether Lightning would pass distributed samplers
        self._loader: MicrobatchLoader | None = None
        self._parts: list[float] = []  # of the loss of the batch
        self._is_attached = False  # whether `fit` runs, with its handle
        self._steps: ManualSteps | None = None  # of the micro-batch, in manual optimization
        self._is_last = False  # whether it is that of the last micro-batch
        self._samples = 0  # of the whole batch
        self._exact_metrics = ExitStack()
        self._redirect = _ForwardRedirection()

    # --- setup --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, and attach `ls.exact`."""
        module = self.lightning_module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._reject(trainer)
        connector = trainer._accelerator_connector
        if self._shuffles is None:
            self._shuffles = connector.use_distributed_sampler
        connector.use_distributed_sampler = False  # data are divided here
        self._replace_loops(trainer)
        super().setup(trainer)
        self._exact_metrics.enter_context(refusing_inexact_syncs(module))
        if is_fitting:
            self._attach(module)

    def _attach(self, module: LightningModule) -> None:
        """Attach `ls.exact`, or begin again with the handle of an earlier `fit`."""
        attached = getattr(module, ATTACHED, None)
        if attached is None:
            handle = exact(self.model, microbatches=self.microbatches, seed=self.seed)
            handle.refuse_audit("Lightning calls training_step, which may count metrics")
            attached = _Attached(self.model, handle)
            setattr(module, ATTACHED, attached)
        self.exact = attached.handle
        self._is_attached = True
        start = {"step": 0, "epoch": 0, "batch": 0}
        settings = {"microbatches": self.microbatches, "seed": self.seed}
        self.exact.load_state_dict(self._position or {**start, **settings})
        self._position = None
        if self._loader is not None:  # `configure_optimizers` has asked for its length
            self._follow(self._loader)

    def teardown(self) -> None:
        """Forget the data; the module keeps its handle."""
        self._is_attached = False
        self._loader = None
        self._exact_metrics.close()
        super().teardown()

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        attached: _Attached | None = getattr(model, ATTACHED, None)
        if attached is not None:
            return attached.wrapper
        wrapper: DistributedDataParallel = super()._setup_model(model)
        return wrapper

    def _replace_loops(self, trainer: Trainer) -> None:
        """Let evaluations and logged values be divided."""
        trainer.fit_loop.epoch_loop._results = LoggedValues(training=True)
        validation = trainer.fit_loop.epoch_loop.val_loop
        for loop in (validation, trainer.validate_loop, trainer.test_loop):
            loop.__class__ = DividedEvaluation  # with the state that Lightning has given it
            loop._results = LoggedValues(False, self.divide_evaluation)
        trainer.predict_loop.__class__ = DividedPrediction

    def _reject(self, trainer: Trainer) -> None:
        """Raise UsageError for what cannot be exact."""
        module = self.lightning_module

        def has(kind: type) -> bool:
            return any(isinstance(callback, kind) for callback in trainer.callbacks)

        has_batch_norm = StochasticWeightAveraging.pl_module_contains_batch_norm(module)
        refused = {
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}; leave it out: a batch has "
            f"microbatches={self.microbatches} on any number of ranks": (
                trainer.accumulate_grad_batches != 1
            ),
            "GradientAccumulationScheduler": has(GradientAccumulationScheduler),
            "StochasticWeightAveraging of a module with batch norm, whose statistics it would "
            "update in the order of this rank's micro-batches": (
                has(StochasticWeightAveraging) and has_batch_norm
            ),
            "a val_check_interval of time, which ends differently on each rank; pass a number of "
            "batches": trainer._val_check_time_interval is not None,
            "training_step(dataloader_iter), which reads the data itself": (
                is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
            ),
            "on_before_batch_transfer, which would get all micro-batches; use "
            "on_after_batch_transfer": is_overridden("on_before_batch_transfer", module),
            "a checkpoint that was saved with another strategy": trainer.ckpt_path is not None
            and self._position is None,
        }
        for name, is_used in refused.items():
            if is_used:
                raise UsageError(f"ExactStrategy cannot train with {name}")

    # --- data ---------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Return an iterable of this rank's micro-batches, or of its part of an evaluation."""
        trainer = self.lightning_module.trainer
        is_training = trainer.training and trainer.state.fn == TrainerFn.FITTING
        if not isinstance(dataloader, DataLoader):
            if not (is_training or self.divide_evaluation):
                return dataloader
            raise UsageError(
                "ExactStrategy divides torch's DataLoaders among the ranks, and got a "
                f"{type(dataloader).__name__}: pass a DataLoader"
            )
        if not is_training:
            return EvaluationLoader(
                "ExactStrategy",
                dataloader,
                self.seed,
                self.root_device,
                is_contiguous=True,
                is_divided=self.divide_evaluation,
            )
        sampler = getattr(dataloader.batch_sampler, "sampler", None)
        # As Lightning's own distributed sampler, which replaces these two.
        is_shuffled = self._shuffles and isinstance(sampler, (RandomSampler, SequentialSampler))
        shuffle = None if not is_shuffled else not trainer.overfit_batches
        self._loader = MicrobatchLoader(
            "ExactStrategy", dataloader, self.microbatches, self.seed, shuffle=shuffle
        )
        if self._is_attached:
            self._follow(self._loader)
            self._loader.set_epoch(trainer.current_epoch)
        return self._loader

    def _follow(self, loader: MicrobatchLoader) -> None:
        """Let the handle train on the micro-batches of a loader, from its position on."""
        self.exact.use(cast(Any, loader.source))
        self.exact.load_state_dict(self.exact.state_dict())

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Leave micro-batches to `training_step`, since hooks may draw random numbers."""
        if isinstance(batch, Microbatches):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- a step -------------------------------------------------------------------------------

    def training_step(self, batch: Microbatches, *args: Any, **kwargs: Any) -> Any:
        """Compute the micro-batches; return the result of the last one, before its backward."""
        if not isinstance(batch, Microbatches):
            raise UsageError("ExactStrategy trains on one DataLoader: pass no other iterable")
        self._parts = []
        self._samples = batch.samples
        if not self.lightning_module.automatic_optimization:
            with leaving(self.exact):
                return self._compute_manually(batch, *args, **kwargs)
        self._is_last = False
        for microbatch in batch[:-1]:
            output = self._compute(microbatch, *args, **kwargs)
            loss = output["loss"] if isinstance(output, Mapping) else output
            self.backward(loss, self.optimizers[0])
        self._is_last = True
        return self._compute(batch[-1], *args, **kwargs)

    def _compute(self, microbatch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a micro-batch, with its part of the loss."""
        data = self._begin(microbatch)
        with self.lightning_module.trainer._results.recording(data):
            output = super().training_step(data, *args, **kwargs)
        part = self._weigh(output["loss"] if isinstance(output, Mapping) else output)
        return {**output, "loss": part} if isinstance(output, Mapping) else part

    def _begin(self, microbatch: Any) -> Any:
        """Begin a micro-batch; return its data on the device."""
        self.exact.begin()
        return super().batch_to_device(self.precision_plugin.convert_input(microbatch))

    def _weigh(self, loss: torch.Tensor) -> torch.Tensor:
        part = self.exact.weigh(loss)
        self._parts.append(float(part.detach()))
        return part

    # --- a step of manual optimization --------------------------------------------------------

    def _compute_manually(self, batch: Microbatches, *args: Any, **kwargs: Any) -> Any:
        """Compute the micro-batches, and make the steps of `training_step` after them."""
        module = self.lightning_module
        module.zero_grad()
        noted: list[ManualSteps] = []
        for number, microbatch in enumerate(batch, 1):
            self._is_last = number == len(batch)
            data = self._begin(microbatch)
            steps = ManualSteps(module)
            self._steps = steps
            setattr(module, MANUAL, partial(self._call_manually, steps))
            given = (self.model, module, MANUAL, data, *args)
            try:
                with module.trainer._results.recording(data), steps.deferring():
                    total, output = self._redirect(*given, **kwargs)
            finally:
                self._steps = None
                delattr(module, MANUAL)
            self._backward(self._weigh(total), None)
            noted.append(steps)
        names = [steps.names for steps in noted]
        module.trainer._results.combine(module, self._parts, [*names[0]])
        if any(other != names[0] for other in names):
            raise UsageError(
                f"ExactStrategy: training_step makes the steps {names[0]} in one micro-batch and "
                "others in another: decide by batch_idx, which is the same for a whole batch"
            )
        noted[-1].make()
        return None if isinstance(output, torch.Tensor) else StepOutputs()

    def _call_manually(self, steps: ManualSteps, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            output = self.lightning_module.training_step(*args, **kwargs)
        return steps.add_losses(), output

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call backward, or note the loss for the end of a micro-batch of manual optimization."""
        if self._steps is not None:
            self._steps.add(closure_loss)
            return closure_loss
        return self._backward(closure_loss, *args, **kwargs)

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call backward; call `on_after_backward` only where the gradients of the batch are."""
        plugin = self.precision_plugin
        conclude = plugin.post_backward

        def finish(closure_loss: torch.Tensor, module: LightningModule) -> torch.Tensor:
            if not self._is_last:
                return closure_loss.detach()
            with cast(LoggedValues, module.trainer._results).outside(self._samples):
                concluded: torch.Tensor = conclude(closure_loss, module)
                return concluded

        plugin.__dict__["post_backward"] = finish  # hides the method until it is deleted
        try:
            done: torch.Tensor = super().backward(loss, *args, **kwargs)
        finally:
            del plugin.__dict__["post_backward"]
        return done

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the last micro-batch before the optimizer's step instead of in it."""
        if not self.lightning_module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # Lightning would clear gradients before the last backward, in the middle of the step.
        zero_grad = getattr(closure, "_zero_grad_fn", None)
        if zero_grad is not None:
            zero_grad()
            cast(Any, closure)._zero_grad_fn = None
        with leaving(self.exact):
            results = [closure()]
        module = self.lightning_module
        loss = module.trainer._results.combine(module, self._parts)
        output = getattr(closure, "_result", None)
        if output is not None and output.loss is not None:  # what callbacks get
            output.loss = torch.full_like(output.loss, loss)
            output.__class__ = _BatchResult

        def finished() -> Any:
            if not results:
                raise UsageError(
                    f"ExactStrategy: {type(optimizer).__name__} computes the loss several times "
                    "per step; use an optimizer that needs it once"
                )
            return results.pop()

        return super().optimizer_step(optimizer, finished, model, **kwargs)

    # --- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the position in the data with the checkpoint."""
        if hasattr(self, "exact"):  # also after `fit` has returned
            checkpoint = checkpoint | {STATE: self.exact.state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint with the position in the data."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        position = checkpoint.get(STATE)
        if self._is_attached:  # such as that of the LR finder, which tries steps
            self.exact.load_state_dict(position)
        else:
            self._position = position
        return checkpoint
