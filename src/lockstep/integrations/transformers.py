"""Equal bits in Hugging Face's Trainer, on any number of ranks. Tested with transformers 5.24.0.

    trainer = ExactTrainer(model, arguments, train_dataset=dataset, microbatches=8)

The trainer sets `gradient_accumulation_steps`; `per_device_train_batch_size` is the size of a
micro-batch. For a subclass of Trainer, write `class Mine(ExactTrainer, Theirs)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lockstep.audit.audit_config import AuditConfig
from lockstep.data.microbatch_sampler import MicrobatchSampler
from lockstep.integrations.accumulation import (
    KNOWN,
    count_accumulation_steps,
    make_sampler,
    replace_sampler,
)
from lockstep.kernel.errors import UsageError
from lockstep.training.exact import Exact
from lockstep.training.exact_setup import exact

__all__ = ["ExactTrainer"]

POSITION = "lockstep.json"
"""The file with the position in a checkpoint."""


class ExactTrainer(Trainer):
    """A Trainer with the same bits on any number of ranks.

    Args:
        *args: The arguments of `Trainer`.
        microbatches: The number of micro-batches of a batch, a multiple of the number of ranks.
        audit: As for `ls.exact`.
        **kwargs: More arguments of `Trainer`.

    Attributes:
        exact: The handle of `ls.exact`; None before the training.

    Raises:
        LayoutError: The ranks cannot have equally many micro-batches.
        UsageError: A setting cannot be exact.
    """

    loss_is_scaled_for_ga: bool | None
    model_wrapped: Any

    def __init__(
        self, *args: Any, microbatches: int = 8, audit: AuditConfig | bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        settings = self.args
        self.microbatches, self.audit = microbatches, audit
        self.exact: Exact | None = None
        self._position: dict[str, Any] | None = None  # from a checkpoint
        settings.gradient_accumulation_steps = count_accumulation_steps(
            "ExactTrainer", microbatches, settings.world_size, settings.gradient_accumulation_steps
        )
        self._reject()
        self.add_callback(_PositionCallback(self))
        is_scaled = self.loss_is_scaled_for_ga
        self._is_scaled = self.compute_loss_func is not None if is_scaled is None else is_scaled
        self._counts_items = is_scaled is None and self.model_accepts_loss_kwargs
        self.loss_is_scaled_for_ga = True  # compute_loss scales it

    def _reject(self) -> None:
        """Raise UsageError for what cannot be exact."""
        settings, callbacks = self.args, self.callback_handler.callbacks
        found = {
            "DataParallel; start one process per GPU": settings.n_gpu > 1,
            "DeepSpeed or FSDP": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "average_tokens_across_devices=False": not settings.average_tokens_across_devices,
            "auto_find_batch_size": settings.auto_find_batch_size,
            "a parallelism_config": getattr(self.accelerator, "parallelism_config", None),
            "an lr_scheduler_type that follows a metric": (
                settings.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
            ),
            "load_best_model_at_end, which follows a metric": settings.load_best_model_at_end,
            "EarlyStoppingCallback, which follows a metric": any(
                isinstance(callback, EarlyStoppingCallback) for callback in callbacks
            ),
        }
        for name, is_used in found.items():
            if is_used:
                raise UsageError(f"ExactTrainer cannot train with {name}")

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; on resume, read the position in the data."""
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        self._position = None
        if folder is not None:
            path = Path(folder) / POSITION
            if not path.exists():
                raise UsageError(f"{folder} was not saved by ExactTrainer: it has no {POSITION}")
            self._position = json.loads(path.read_text())
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Attach `ls.exact`, and return a DataLoader of this rank's micro-batches."""
        given = super().get_train_dataloader()
        model = self.model_wrapped = self.accelerator.prepare(self.model_wrapped)
        if self.exact is None:
            wrapper = getattr(model, "_orig_mod", model)
            if self.args.world_size > 1 and not isinstance(wrapper, DistributedDataParallel):
                raise UsageError(
                    "ExactTrainer cannot train after evaluate() or predict(), which prepare the "
                    "model without DistributedDataParallel: call train() first"
                )
            self.exact = exact(model, self.microbatches, self.args.seed, audit=self.audit)
        start = {"step": 0, "epoch": 0, "batch": 0}
        self.exact.load_state_dict(self._position or self.exact.state_dict() | start)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        known = (*KNOWN, SeedableRandomSampler)
        sampler = make_sampler("ExactTrainer", self.exact, given, self.microbatches, seed, known)
        steps = self.args.gradient_accumulation_steps
        loader = replace_sampler(given, _ResumedSampler(sampler, steps))
        prepared: DataLoader[Any] = prepare_data_loader(loader, num_processes=1, process_index=0)
        return prepared

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the micro-batch's part of the loss of the whole batch."""
        if self.exact is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        settings = self.args
        settings.average_tokens_across_devices = False  # would multiply by the number of ranks
        try:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        finally:
            settings.average_tokens_across_devices = True
        is_part = self._is_scaled or (self._counts_items and num_items_in_batch is not None)
        loss = self.exact.weigh(loss, share=1.0 if is_part else None)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Begin a micro-batch; return its part of the loss, of which the ranks log the mean."""
        assert self.exact is not None
        self.exact.begin()
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        ranks: int = self.args.world_size
        return loss * ranks


class _ResumedSampler(BatchSampler):
    """The sampler of `ls.exact`, after as many empty micro-batches as the Trainer skips."""

    def __init__(self, sampler: MicrobatchSampler, steps: int) -> None:
        self.inner, self.steps = sampler, steps
        self.set_epoch = sampler.set_epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[]] * (self.inner.start * self.steps)
        yield from self.inner

    def __len__(self) -> int:
        return len(self.inner)


class _PositionCallback(TrainerCallback):
    """Saves the position in the data with each checkpoint."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it into the folder that the Trainer has written."""
        exact = self.trainer.exact
        if exact is not None and state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            (folder / POSITION).write_text(json.dumps(exact.state_dict()))
