"""Equal bits in Lightning's Trainer, on any number of ranks. Tested with lightning 2.6.6.

    trainer = L.Trainer(strategy=ExactStrategy(microbatches=8), devices=2, ...)

The strategy sets `accumulate_grad_batches`; the batch size of the DataLoader is that of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lockstep.integrations.accumulation import (
    count_accumulation_steps,
    make_sampler,
    replace_sampler,
)
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.training.exact import Exact
from lockstep.training.exact_setup import exact

__all__ = ["ExactStrategy"]

STATE = "lockstep"
"""The key of the position in a checkpoint."""

AVERAGING = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_fitted: WeakSet[LightningModule] = WeakSet()
"""The modules that were passed to `fit`."""

COUNTERS = ("ready", "started", "processed")


class ExactStrategy(DDPStrategy):
    """DistributedDataParallel with the same bits on any number of ranks.

    Args:
        microbatches: The number of micro-batches of a batch, a multiple of the number of ranks.
        seed: The random seed of the order of the samples and of the micro-batches.
        **options: The options of `DDPStrategy`.

    Attributes:
        exact: The handle of `ls.exact`, from the beginning of `fit`.

    Raises:
        UsageError: An option has no effect, because the ranks do not average gradients.
    """

    exact: Exact

    def __init__(self, microbatches: int = 8, seed: int = 0, **options: Any) -> None:
        for name in AVERAGING:
            if options.get(name) is not None:
                raise UsageError(f"ExactStrategy adds gradients itself: leave out {name}")
        super().__init__(**options)
        self.microbatches, self.seed = microbatches, seed
        self._position: Mapping[str, Any] | None = None  # from a checkpoint
        self._steps = 0  # micro-batches of a rank
        self._has_loader = False

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, and attach `ls.exact`."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._reject(trainer)
            given = trainer.accumulate_grad_batches
            self._steps = count_accumulation_steps(
                "ExactStrategy", self.microbatches, self.world_size, given
            )
            trainer.accumulate_grad_batches = self._steps
        super().setup(trainer)
        if not is_fitting:
            return
        if any(config.reduce_on_plateau for config in self.lr_scheduler_configs):
            raise UsageError(
                "ExactStrategy: ReduceLROnPlateau follows a metric of the validation, whose bits "
                "depend on the number of ranks: use another scheduler"
            )
        _fitted.add(self.lightning_module)
        self.exact = exact(self.model, microbatches=self.microbatches, seed=self.seed, audit=False)
        if self._position is not None:
            self.exact.load_state_dict(self._position)

    def _reject(self, trainer: Trainer) -> None:
        """Raise UsageError for what cannot be exact."""
        module = self.lightning_module

        def has(kind: type) -> bool:
            return any(isinstance(callback, kind) for callback in trainer.callbacks)

        found = {
            "limit_train_batches, overfit_batches or fast_dev_run, which count the micro-batches "
            "of a rank; use max_steps": trainer.limit_train_batches != 1.0
            or trainer.overfit_batches,
            "EarlyStopping, which follows a metric of the validation": has(EarlyStopping),
            "GradientAccumulationScheduler": has(GradientAccumulationScheduler),
            "manual optimization; write such a loop with ls.exact": not (
                module.automatic_optimization
            ),
            "on_before_batch_transfer, where random numbers depend on the number of ranks; use "
            "on_after_batch_transfer": is_overridden("on_before_batch_transfer", module),
            "a module a second time; pass a new one to fit, or a larger max_epochs": module
            in _fitted,
            "a checkpoint that was saved with another strategy": trainer.ckpt_path is not None
            and self._position is None,
        }
        for name, is_used in found.items():
            if is_used:
                raise UsageError(f"ExactStrategy cannot train with {name}")

    # --- data ---------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the DataLoader of the training by one of this rank's micro-batches."""
        trainer = self.lightning_module.trainer
        if not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if not isinstance(dataloader, DataLoader) or self._has_loader:
            raise UsageError("ExactStrategy trains on one DataLoader: pass no other iterable")
        self._has_loader = True
        sampler: Any = make_sampler(
            "ExactStrategy", self.exact, dataloader, self.microbatches, self.seed
        )
        whole = (dataloader.batch_size or 0) * self.microbatches
        last = len(cast(Any, dataloader.dataset)) - whole * (sampler.batches - 1)
        if (leaves := min(last, self.microbatches)) % self.world_size:
            raise LayoutError(
                f"ExactStrategy needs equally many micro-batches on every rank, but the last batch "
                f"of an epoch has {leaves}, on {self.world_size} ranks: pass drop_last=True to the "
                "DataLoader, or change its batch_size"
            )
        sampler.sampler = sampler  # where Lightning looks for set_epoch
        sampler.set_epoch(trainer.current_epoch)
        loader: Any = replace_sampler(dataloader, sampler)
        # Lightning warns of a loader without them when it resumes. The checkpoint has the position.
        loader.state_dict, loader.load_state_dict = dict, lambda _: None
        return loader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Begin a micro-batch of the training, before hooks of the module draw random numbers."""
        if self.lightning_module.trainer.training:
            self.exact.begin()
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- a step -------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batch's part of the loss, times what Lightning divides by."""
        output = super().training_step(*args, **kwargs)
        if isinstance(output, Mapping):
            return {**output, "loss": self.exact.weigh(output["loss"], divisor=self._steps)}
        return None if output is None else self.exact.weigh(output, divisor=self._steps)

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the last micro-batch before the optimizer's step instead of in it."""
        results = [closure()]

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
        if hasattr(self, "exact"):
            position = self.exact.state_dict() | {"ranks": self.world_size}
            checkpoint = checkpoint | {STATE: position}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint; count its micro-batches as those of a rank of this run."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if (position := checkpoint.get(STATE)) is None:
            return checkpoint
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            behind = counts["ready"] - counts["completed"]  # 1 in on_train_batch_end
            for name in COUNTERS:
                counts[name] = counts[name] * position["ranks"] // self.world_size
            counts["completed"] = counts["ready"] - behind
        self._position = {key: value for key, value in position.items() if key != "ranks"}
        return checkpoint
