"""Equal bits in a loop with Accelerate, on any number of ranks. Tested with accelerate 1.15.0.

    accelerator = ExactAccelerator(microbatches=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The accelerator sets `gradient_accumulation_steps`. The first DataLoader that is prepared is that of
the training; its batch size is that of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from lockstep.audit.audit_config import AuditConfig
from lockstep.integrations.accumulation import (
    count_accumulation_steps,
    make_sampler,
    replace_sampler,
)
from lockstep.kernel.errors import UsageError
from lockstep.training.exact import Exact
from lockstep.training.exact_setup import exact

__all__ = ["ExactAccelerator"]

EXACT_WITH = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ExactAccelerator(Accelerator):
    """An Accelerator with the same bits on any number of ranks.

    Args:
        *args: The arguments of `Accelerator`.
        microbatches: The number of micro-batches of a batch, a multiple of the number of ranks.
        seed: The random seed of the order of the samples and of the micro-batches.
        audit: As for `ls.exact`.
        **kwargs: More arguments of `Accelerator`.

    Attributes:
        exact: The handle of `ls.exact`; None until a model is prepared.

    Raises:
        LayoutError: The ranks cannot have equally many micro-batches.
        UsageError: A setting cannot be exact.
    """

    def __init__(
        self,
        *args: Any,
        microbatches: int = 8,
        seed: int = 0,
        audit: AuditConfig | bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type not in EXACT_WITH:
            raise UsageError(
                f"ExactAccelerator uses DistributedDataParallel, not {self.distributed_type.value}"
            )
        self.microbatches, self.seed, self.audit = microbatches, seed, audit
        self.exact: Exact | None = None
        self._has_training_loader = False
        given: int = super().gradient_accumulation_steps
        self.gradient_accumulation_steps = count_accumulation_steps(
            "ExactAccelerator", microbatches, self.num_processes, given
        )

    # --- preparation --------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models before the loaders, which need the handle of the model."""
        for index, value in enumerate(args):
            if isinstance(value, nn.Module):
                placement = None if device_placement is None else [device_placement[index]]
                prepared = super().prepare(value, device_placement=placement)
                args = (*args[:index], prepared, *args[index + 1 :])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Wrap a model, and attach `ls.exact` if it is to be trained."""
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        model = super().prepare_model(model, device_placement, evaluation_mode)
        if not is_new or evaluation_mode or not any(p.requires_grad for p in model.parameters()):
            return model
        if self.exact is not None:
            raise UsageError(
                "ExactAccelerator trains one model: for several, write the loop with ls.exact"
            )
        self.exact = exact(model, self.microbatches, self.seed, audit=self.audit)
        self.register_for_checkpointing(self.exact)
        return model

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Replace the first DataLoader by one of this rank's micro-batches."""
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if is_prepared or self._has_training_loader:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        sampler = make_sampler(
            "ExactAccelerator", self._handle, data_loader, self.microbatches, self.seed
        )
        placed = self.device_placement if device_placement is None else device_placement
        loader = replace_sampler(data_loader, sampler)
        prepared = prepare_data_loader(
            loader, self.device, num_processes=1, process_index=0, put_on_device=placed
        )
        self._has_training_loader = True
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Let the scheduler make one step per step of the optimizer, on any number of ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    @property
    def _handle(self) -> Exact:
        if self.exact is None:
            raise UsageError("ExactAccelerator: prepare the model before its data and its training")
        return self.exact

    # --- a step -------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Begin a micro-batch."""
        self._handle.begin()
        with super().accumulate(*models):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call backward on the micro-batch's part of the loss."""
        steps = self.gradient_accumulation_steps
        super().backward(self._handle.weigh(loss, divisor=steps), **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint, which may have been saved on another number of ranks."""
        super().load_state(*args, **kwargs)
        self.step = 0  # of the accumulation; checkpoints are saved between two batches
