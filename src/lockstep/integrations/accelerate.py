"""Equal bits in a loop with Accelerate, on any number of ranks. Tested with accelerate 1.15.0.

    accelerator = ExactAccelerator(microbatches=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The first DataLoader that is prepared is that of the training; its batch size is that of a
micro-batch. The loop runs once per micro-batch of this rank, and `len(loader)` is the number of
batches: what is computed from it does not depend on the number of ranks. Optimizers and schedulers
make their steps in the last micro-batch.

    batches to evaluate     0 1 2 3 4     each on one rank, in rounds of as many as there are ranks
    2 ranks                 0 1 | 2 3 | 4 (4)      rank 1 repeats a batch, which nobody counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import load, send_to_device
from torch.utils.data import DataLoader

from lockstep.audit.audit_config import AuditConfig
from lockstep.integrations.evaluation_loader import EvaluationLoader, evaluating
from lockstep.integrations.loss_divisor import count_first_dimension
from lockstep.integrations.microbatch_loader import MicrobatchLoader, exchange_values, find_gather
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.model.generator_states import set_global_states
from lockstep.training.script_loop.exact import Exact
from lockstep.training.script_loop.exact_setup import exact

__all__ = ["ExactAccelerator"]

EXACT_WITH = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

OF_OPTIMIZERS = ("step", "zero_grad")
"""The methods of an optimizer that end a step."""

GENERATORS = "random_states_0.pkl"
"""The file with the generators of rank 0 in a checkpoint of Accelerate."""


class ExactAccelerator(Accelerator):
    """An Accelerator with the same bits on any number of ranks.

    Args:
        *args: The arguments of `Accelerator`.
        microbatches: The number of micro-batches of a batch, at least the number of ranks.
        seed: The random seed of the order of the samples and of the micro-batches.
        audit: As for `ls.exact`.
        **kwargs: More arguments of `Accelerator`.

    Attributes:
        exact: The handle of `ls.exact`; None until a model is prepared. That of the first one, if
            there are several.
        is_in_batch: Whether the loop computes a micro-batch of the training.
        is_before_backward: Whether it is the first one of a batch, and had no backward yet.

    Raises:
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
        given = self.gradient_accumulation_steps
        if given != 1:
            raise UsageError(
                f"ExactAccelerator cannot train with gradient_accumulation_steps={given}; leave it "
                f"out: a batch has microbatches={microbatches} on any number of ranks"
            )
        # Otherwise a scheduler would count the micro-batches of this rank.
        self.gradient_state.plugin_kwargs["adjust_scheduler"] = False
        self.microbatches = microbatches
        self.seed = seed
        self.audit = audit
        self._handles: list[tuple[Any, Exact]] = []
        self._training: TrainingLoader | None = None
        self._evaluated: EvaluatedBatches | None = None  # what the loop iterates over
        self.is_in_batch = False
        self.is_before_backward = False
        self._is_accumulating = False
        self._rates: list[float] = []  # the learning rates at the beginning of the batch
        self._folder = ""
        self.register_load_state_pre_hook(self._note_folder)

    @property
    def exact(self) -> Exact | None:
        """The handle of `ls.exact` of the first model."""
        return self._handles[0][1] if self._handles else None

    # --- preparation --------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Wrap a model, and attach `ls.exact` if it is to be trained."""
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        evaluation_mode = evaluation_mode or not is_trained  # nothing to wrap, as for a teacher
        model = super().prepare_model(model, device_placement, evaluation_mode)
        if not is_new or evaluation_mode:
            return model
        handle = exact(model, self.microbatches, self.seed, audit=self.audit)
        if self._training is not None:
            handle.use(cast(Any, self._training.batch_sampler))
        self._handles.append((model, handle))
        self.register_for_checkpointing(handle)
        return model

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Replace a DataLoader by the micro-batches of this rank, or by its part to evaluate."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        placed = self.device_placement if device_placement is None else device_placement
        device = self.device if placed else None
        prepared: TrainingLoader | EvaluatedBatches
        if self._training is None:
            prepared = TrainingLoader(self, data_loader, device)
            self._training = prepared
            for _, handle in self._handles:
                handle.use(cast(Any, prepared.batch_sampler))
        else:
            prepared = EvaluatedBatches(self, data_loader, device)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Let the scheduler make one step per step of the optimizer, on any number of ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Let `zero_grad` also act before the first backward of a batch, where loops call it."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = ExactOptimizer
        cast(ExactOptimizer, prepared).accelerator = self
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Forget all that was prepared: the next DataLoader is that of another training."""
        handles = [handle for _, handle in self._handles]
        registered = vars(self)["_custom_objects"]
        registered[:] = [one for one in registered if one not in handles]
        self._handles.clear()
        self._training = None
        return super().free_memory(*objects)

    # --- a step -------------------------------------------------------------------------------

    def begin_microbatch(self, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch of the training; the DataLoader calls this."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in groups]
        self.is_before_backward = is_first
        if is_first:
            self._rates = rates
        elif rates != self._rates:
            raise UsageError(
                "ExactAccelerator: a learning rate has changed between two micro-batches of a "
                "batch, of which each rank has another number: pass the scheduler to prepare(), or "
                "call its step() only if accelerator.sync_gradients"
            )
        self.gradient_state._set_sync_gradients(is_last)
        if len(self._handles) == 1:
            self._handles[0][1].begin()

    def leave(self) -> None:
        """Undo a step whose loop was left early, such as by an exception."""
        for _, handle in self._handles:
            handle.leave()

    def _do_sync(self) -> None:
        """Leave the state as the DataLoader has set it."""

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Compute a micro-batch in the body.

        With several models, the optimizers and the schedulers make their steps at its end: within
        it, all micro-batches are computed with the same weights.
        """
        if len(self._handles) < 2:
            with super().accumulate(*models):
                yield
            return
        steps: list[Callable[[], Any]] = []
        for model, handle in self._handles:
            if any(model is given for given in models):
                handle.begin()
        self._is_accumulating = True
        try:
            with super().accumulate(*models), self._deferring(steps):
                yield
        finally:
            self._is_accumulating = False
        for step in steps:
            step()

    @contextmanager
    def _deferring(self, steps: list[Callable[[], Any]]) -> Iterator[None]:
        """Append the steps of the optimizers and schedulers to a list instead of making them."""
        methods = [(optimizer, name) for optimizer in self._optimizers for name in OF_OPTIMIZERS]
        methods += [(scheduler, "step") for scheduler in self._schedulers]
        for owner, name in methods:
            method = getattr(owner, name)

            def defer(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> None:
                steps.append(partial(method, *args, **kwargs))

            setattr(owner, name, defer)
        try:
            yield
        finally:
            for owner, name in methods:
                delattr(owner, name)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call backward on the micro-batch's part of the loss."""
        if len(self._handles) > 1 and not self._is_accumulating:
            raise UsageError(
                f"ExactAccelerator trains {len(self._handles)} models: write the body of the loop "
                "in `with accelerator.accumulate(model, other_model):`, at whose end their "
                "optimizers make their steps"
            )
        part: torch.Tensor | None = None
        for _, handle in self._handles:
            with suppress(UsageError):  # of a model that takes no part in this loss any more
                part = handle.weigh(loss)
        if part is None:
            raise UsageError(
                "ExactAccelerator: backward() was called outside of a micro-batch of the training: "
                "prepare the model and its DataLoader, and call backward once for each model and "
                "micro-batch"
            )
        if self.gradient_accumulation_steps != 1:
            raise UsageError(
                "ExactAccelerator: gradient_accumulation_steps was changed to "
                f"{self.gradient_accumulation_steps}, which would divide the loss: leave it at 1, "
                "since a batch has microbatches= on any number of ranks"
            )
        self.is_before_backward = False
        super().backward(part, **kwargs)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the gradients of a whole batch; do nothing before its last micro-batch."""
        if self.gradient_state.sync_gradients:
            super().clip_grad_value_(parameters, clip_value)

    def require_whole_batch(self) -> None:
        """Raise UsageError in the middle of a batch, where each rank would load other samples."""
        if self.is_in_batch and not any(handle.is_complete for _, handle in self._handles):
            raise UsageError(
                "ExactAccelerator: a second DataLoader was read in the middle of a batch, of which "
                "each rank has another part: put the samples of both into one dataset, or evaluate "
                "after the last micro-batch, if accelerator.sync_gradients. The first DataLoader "
                "that is prepared is that of the training; another one follows free_memory()"
            )

    # --- evaluation ---------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, batches: EvaluatedBatches) -> Iterator[None]:
        """Let `gather_for_metrics` take the samples of an evaluation in the body."""
        outer = self._evaluated
        self._evaluated = batches
        try:
            with evaluating():
                yield
        finally:
            self._evaluated = outer

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all samples of an evaluation, in the order of the dataset."""
        if self._evaluated is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        size = self._evaluated.size
        own = [_take_rows(send_to_device(input_data, "cpu"), size)] if size else []
        gather = find_gather()
        if gather is None:
            return send_to_device(_join(own), self.device)
        everyone = exchange_values(gather, own, "gathering for metrics from")
        parts = [part for parts in everyone for part in parts]
        return send_to_device(_join(parts), self.device)

    # --- checkpoints --------------------------------------------------------------------------

    def _note_folder(self, models: Any, folder: str) -> None:
        self._folder = folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint, which may have been saved on another number of ranks."""
        super().load_state(*args, **kwargs)
        # Ranks without a file of their own would keep their generators. All are equal.
        saved = load(Path(self._folder) / GENERATORS)
        states = {
            "torch": saved["torch_manual_seed"],
            "random": saved["random_state"],
            "numpy": saved["numpy_random_seed"],
        }
        of_device = saved.get(f"torch_{self.device.type}_manual_seed")
        if of_device is not None:
            states[self.device.type] = of_device[0]
        set_global_states(states, self.device)


def _place(data: Any, device: torch.device | None) -> Any:
    return data if device is None else send_to_device(data, device)


def _take_rows(value: Any, size: int) -> Any:
    """Return the first rows of tensors, or of a list, in nested tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return value[None] if value.dim() == 0 else value[:size]
    if isinstance(value, Mapping):
        return {name: _take_rows(part, size) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_take_rows(part, size) for part in value)
    if isinstance(value, list) and any(isinstance(part, torch.Tensor) for part in value):
        return [_take_rows(part, size) for part in value]
    return value[:size] if isinstance(value, list) else [value]


def _join(parts: list[Any]) -> Any:
    """Return the rows of several batches after each other."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple) or any(isinstance(part, torch.Tensor) for part in first):
        return type(first)(_join(list(values)) for values in zip(*parts, strict=True))
    return [row for part in parts for row in part]


class ExactOptimizer(AcceleratedOptimizer):
    """An optimizer whose gradients may be cleared before or after its step."""

    accelerator: ExactAccelerator

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients in the last micro-batch, or before the first backward of a batch."""
        if self.accelerator.is_before_backward:
            self.optimizer.zero_grad(set_to_none is not False)
        else:
            super().zero_grad(set_to_none)


class TrainingLoader(DataLoaderStateMixin):
    """The micro-batches of this rank, one after another, in place of a DataLoader.

    Args:
        accelerator: Notified of every micro-batch.
        loader: The DataLoader.
        device: The device to move micro-batches to; None to leave them where they are.

    Attributes:
        dataset: The dataset.
        batch_sampler: Has the epoch that a resumed loop begins with.
    """

    def __init__(
        self, accelerator: ExactAccelerator, loader: DataLoader[Any], device: torch.device | None
    ) -> None:
        self._accelerator = accelerator
        self._device = device
        self._loader = MicrobatchLoader(
            "ExactAccelerator", loader, accelerator.microbatches, accelerator.seed
        )
        self.dataset: Any = loader.dataset
        self.batch_sampler = self._loader.source
        self.gradient_state = accelerator.gradient_state

    def __len__(self) -> int:
        """Return the number of batches, the same on any number of ranks."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a resumed epoch goes on where it was saved."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of an epoch."""
        self.begin()
        try:
            batches = iter(self._loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                for number, microbatch in enumerate(batch, 1):
                    is_last = number == len(batch)
                    self.end_of_dataloader = is_last and following is None
                    data = _place(microbatch, self._device)
                    self._accelerator.begin_microbatch(number == 1, is_last)
                    self._accelerator.is_in_batch = True
                    yield data
                batch = following
        finally:
            self._accelerator.is_in_batch = False
            self._accelerator.leave()
            self.end()


class EvaluatedBatches(DataLoaderStateMixin):
    """The batches of an evaluation that this rank computes, in place of a DataLoader.

    Args:
        accelerator: Gathers metrics.
        loader: The DataLoader.
        device: The device to move batches to; None to leave them where they are.

    Attributes:
        dataset: The dataset.
        size: The number of samples of the batch; 0 for one that is repeated.
    """

    def __init__(
        self, accelerator: ExactAccelerator, loader: DataLoader[Any], device: torch.device | None
    ) -> None:
        self._accelerator = accelerator
        self._device = device
        self._loader = EvaluationLoader(
            "ExactAccelerator", loader, accelerator.seed, accelerator.device
        )
        self.dataset: Any = loader.dataset
        self.gradient_state = accelerator.gradient_state
        self.size = 0

    def __len__(self) -> int:
        """Return the number of rounds, in each of which this rank computes one batch."""
        ranks: int = self._accelerator.num_processes
        return -(-len(self._loader) // ranks)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield a batch per round."""
        self.begin()
        try:
            models = {str(number): model for number, model in enumerate(self._accelerator._models)}
            buffers = Buffers(models)
            with self._accelerator.evaluating(self):
                self._accelerator.require_whole_batch()
                rounds = self._loader.rounds()
                current = next(rounds, None)
                while current is not None:
                    following = next(rounds, None)
                    self.end_of_dataloader = following is None
                    data = _place(current.data, self._device)
                    self.size = 0 if current.is_repeated else count_first_dimension(data)
                    with self._loader.computing(current.number, buffers):
                        yield data
                    self._accelerator.require_whole_batch()
                    current = following
        finally:
            self.end()
