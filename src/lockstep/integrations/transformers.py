"""Equal bits in Hugging Face's Trainer, on any number of ranks. Tested with transformers 5.24.0.

    trainer = ExactTrainer(model, arguments, train_dataset=dataset, microbatches=8)

`per_device_train_batch_size` is the size of a micro-batch. What the Trainer calls a batch is the
list of this rank's micro-batches of a whole batch, so that it counts steps of the optimizer on any
number of ranks. For a subclass of Trainer, write `class Mine(ExactTrainer, Theirs)`.

An evaluation computes each batch on one rank (`evaluation_loader`), and passes the results of all
batches to the Trainer's own loop on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler, nested_truncate, safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lockstep.audit.audit_config import AuditConfig
from lockstep.data.microbatch import map_tensors
from lockstep.data.microbatch_sampler import LoadedHere
from lockstep.integrations.evaluated_results import EvaluatedResults, Results
from lockstep.integrations.evaluation_loader import EvaluationLoader, evaluating
from lockstep.integrations.loss_divisor import LossDivisor, count_first_dimension
from lockstep.integrations.microbatch_loader import (
    Microbatches,
    MicrobatchLoader,
    find_gather,
    find_rank,
    leaving,
)
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.kernel.exact_sum import compute_partial_sums, round_sum
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.generator_states import set_global_states
from lockstep.training.script_loop.exact import Exact
from lockstep.training.script_loop.exact_setup import exact

__all__ = ["ExactTrainer"]

POSITION = "lockstep.json"
"""The file with the position in a checkpoint."""

RNG_STATES = ("rng_state.pth", "rng_state_0.pth")
"""The files with the generators of rank 0, saved by one process and by several."""


# It has many methods: each overrides one of the Trainer's that counts or combines ranks.
class ExactTrainer(Trainer):
    """A Trainer with the same bits on any number of ranks.

    Args:
        *args: The arguments of `Trainer`.
        microbatches: The number of micro-batches of a batch, at least the number of ranks.
        audit: As for `ls.exact`.
        **kwargs: More arguments of `Trainer`.

    Attributes:
        exact: The handle of `ls.exact`; None before the training.

    Raises:
        UsageError: A setting cannot be exact.
    """

    loss_is_scaled_for_ga: bool | None
    model_wrapped: Any
    accelerator: Any
    get_train_dataloader: Any
    prediction_step: Any

    def __init__(
        self, *args: Any, microbatches: int = 8, audit: AuditConfig | bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.microbatches = microbatches
        self.audit = audit
        self.exact: Exact | None = None
        self._reject()
        self.add_callback(_PositionCallback(self))
        self._attached: Any = None  # the model of the handle
        self._position: dict[str, Any] | None = None  # from a checkpoint
        self._batches: _Batches | None = None
        self._window: tuple[float, int, float] | None = None  # what `log` is about to show
        # Of the current step.
        self._shares: list[float | None] = []
        self._share: float | None = None
        self._parts: list[float] = []
        self._is_computing = False
        self._logged: dict[str, str] = {}  # since the last step
        self._divisor: LossDivisor
        self._declared = self.loss_is_scaled_for_ga
        self.loss_is_scaled_for_ga = True  # `_backward` weights the loss of a micro-batch
        # Loaders stay whole: each is divided here.
        self.accelerator.prepare_data_loader = lambda loader, *_, **__: loader
        self.accelerator.backward = partial(self._backward, self.accelerator.backward)

    def _make_divisor(self) -> LossDivisor:
        has_own_loss = self.compute_loss_func is not None or _is_own(type(self).compute_loss)
        return LossDivisor(
            "ExactTrainer",
            self._examine_loss,
            self.model,
            shifts_labels=self._loss_shifts_labels,
            is_known=isinstance(self.model, PreTrainedModel) and not has_own_loss,
            declared=self._declared,
            tolerance=0.02 if self.args.bf16 or self.args.fp16 else 1e-3,
        )

    def _reject(self) -> None:
        """Raise UsageError for what cannot be exact."""
        settings = self.args
        refused = {
            "DataParallel; start one process per GPU": settings.n_gpu > 1,
            "DeepSpeed or FSDP": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "average_tokens_across_devices=False": not settings.average_tokens_across_devices,
            "auto_find_batch_size": settings.auto_find_batch_size,
            "a parallelism_config": getattr(self.accelerator, "parallelism_config", None),
            'train_sampling_strategy="batch_rebalance", which divides samples by the number of '
            "ranks": settings.train_sampling_strategy == "batch_rebalance",
            f"gradient_accumulation_steps={settings.gradient_accumulation_steps}; leave it out: a "
            f"batch has microbatches={self.microbatches} on any number of ranks": (
                settings.gradient_accumulation_steps != 1
            ),
        }
        for name, is_used in refused.items():
            if is_used:
                raise UsageError(f"ExactTrainer cannot train with {name}")

    # --- the training -------------------------------------------------------------------------

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
            if self.args.ignore_data_skip:
                self._position["batch"] = 0
        # On the object, so that a subclass may make the DataLoader.
        self.get_train_dataloader = partial(self._divide, self.get_train_dataloader)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            del self.get_train_dataloader

    def _divide(self, make_loader: Callable[[], DataLoader[Any]]) -> DataLoader[Any]:
        """Attach `ls.exact`, and return a DataLoader of whole batches."""
        self._attach()
        assert self.exact is not None
        start = {"step": 0, "epoch": 0, "batch": 0}
        position = self._position or self.exact.state_dict() | start
        settings = self.args
        seed = settings.seed if settings.data_seed is None else settings.data_seed
        known = (SeedableRandomSampler,)
        loader = MicrobatchLoader("ExactTrainer", make_loader(), self.microbatches, seed, known)
        self.exact.use(cast(Any, loader.source))
        self.exact.load_state_dict(position)
        self._batches = _Batches(loader, position["epoch"])
        # A generator of its own: torch draws a seed of workers from it.
        return DataLoader(self._batches, batch_size=None, generator=torch.Generator())

    def _attach(self) -> None:
        """Wrap the model for the training, and attach `ls.exact`, once."""
        if self._attached is self.model:
            self.model_wrapped = self.accelerator.prepare(self.model_wrapped)
            return
        self.model_wrapped = self.accelerator.prepare(self.model_wrapped)
        self.exact = exact(self.model_wrapped, self.microbatches, self.args.seed, audit=self.audit)
        self._attached = self.model
        self._divisor = self._make_divisor()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """Note how many batches the Trainer discards on resume."""
        assert self._batches is not None
        epochs, self._batches.discarded = super()._init_training_state(*args, **kwargs)
        return epochs, self._batches.discarded

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.microbatches
        return sampler

    def num_examples(self, dataloader: Any) -> int:
        """Count the samples behind a DataLoader of whole batches."""
        batches = getattr(dataloader, "dataset", None)
        if isinstance(batches, _Batches):
            dataset = batches.loader.dataset
            return len(dataset) if hasattr(dataset, "__len__") else 0
        examples: int = super().num_examples(dataloader)
        return examples

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a batch."""
        return int(self._train_batch_size) * self.microbatches

    # --- a step -------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Find the share of each micro-batch, before the step begins."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if batches:
            self._shares = self._divisor.find_shares(batches[0], items, find_gather())
        return batches, items

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        if batch_samples and isinstance(batch_samples[0], Microbatches):
            batch_samples = batch_samples[0]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Compute this rank's micro-batches; return the loss of the whole batch on every rank."""
        assert self.exact is not None
        self._parts = []
        with self._as_one_process(), leaving(self.exact), self._computing():
            for microbatch, share in zip(inputs, self._shares, strict=True):
                self._share = share
                self.exact.begin()
                super().training_step(model, microbatch, num_items_in_batch)
        logged = self._logged
        self._logged = {}
        return torch.tensor(_add_exactly(self._parts, logged), device=self.args.device)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Refuse `log` in the body, which computes some of the samples of a batch."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def _backward(self, backward: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> None:
        """Call backward on the micro-batch's part of the loss."""
        assert self.exact is not None
        if self._share == 0:  # without labels, a mean is 0 / 0
            loss = loss.nan_to_num(0.0)
        part = self.exact.weigh(loss, share=self._share)
        self._parts.append(float(part.detach()))
        backward(part, **kwargs)

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """Let a loss neither count items of other ranks nor multiply by their number."""
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = True

    def _examine_loss(self, inputs: Mapping[str, Any], items: Any) -> torch.Tensor:
        with self._as_one_process(), self.compute_loss_context_manager():
            given = self._prepare_inputs(inputs)
            loss: torch.Tensor = self.compute_loss(self.model, given, num_items_in_batch=items)
        return loss

    # --- what is logged -----------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> int:
        """Count the operations of all micro-batches of this rank."""
        return sum(super(ExactTrainer, self).floating_point_ops(part) for part in inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        main_input = getattr(self.model, "main_input_name", "input_ids")
        names = inputs[0].keys() & {main_input, "attention_mask"}
        joined = {name: torch.cat([part[name].flatten() for part in inputs]) for name in names}
        super()._track_num_input_tokens(joined)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # The Trainer takes the mean over the ranks, whose rounding depends on their number.
        steps = self.state.global_step - self._globalstep_last_logged
        self._window = tr_loss.item(), steps, self._total_loss_scalar
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self._window = None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss of this rank, which is that of all ranks.

        Raises:
            UsageError: It was called in `compute_loss` or `prediction_step`.
        """
        if self._is_computing:
            raise UsageError(
                f"ExactTrainer: {', '.join(logs)} was logged while a micro-batch was computed, of "
                "which each rank has other ones: log what is computed from whole batches, such as "
                "in a callback"
            )
        self._logged |= {name: repr(value) for name, value in logs.items() if not _is_time(name)}
        if "loss" in logs and self._window is not None:
            loss, steps, before = self._window
            logs["loss"] = loss / steps
            self._total_loss_scalar = before + loss
        super().log(logs, *args, **kwargs)

    # --- evaluation ---------------------------------------------------------------------------

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler: Any = super()._get_eval_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = None  # the order is drawn from the global ones, which are seeded
        return sampler

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Compute each batch on one rank; give the Trainer's loop the results of all batches."""
        settings = self.args
        only_loss = prediction_loss_only
        if only_loss is None:
            only_loss = settings.prediction_loss_only
        if len(self.accelerator._models) == 0:
            self.model_wrapped = self.accelerator.prepare(self.model_wrapped)
        predict = self.prediction_step
        buffers = Buffers({"": self.model})
        name = getattr(self.model, "main_input_name", "input_ids")

        def compute(number: int, inputs: Any) -> Results:
            place = f"rank {find_rank()[0]}, evaluation batch {number}"
            kept = inputs[name] if "inputs" in settings.include_for_metrics else None
            size = count_first_dimension(inputs)
            guard = CollectiveCallGuard(lambda: place)
            computing = loader.computing(number, buffers)
            with self._as_one_process(), computing, guard, self._computing():
                values = predict(self.model, inputs, only_loss, ignore_keys)
            return Results(size, *map_tensors(torch.Tensor.cpu, (*values, kept)))

        loader = EvaluationLoader("ExactTrainer", dataloader, settings.seed, settings.device)
        batches = EvaluatedResults(loader, compute, name, self.accelerator.gradient_state)
        self.prediction_step = lambda *_, **__: batches.results[1:4]
        self.gather_function = lambda tensors: nested_truncate(tensors, batches.results.size)
        self.accelerator.pad_across_processes = lambda tensors, **_: tensors
        try:
            with evaluating():
                output = super().evaluation_loop(
                    batches, description, only_loss, ignore_keys, metric_key_prefix
                )
        finally:
            del self.prediction_step, self.accelerator.pad_across_processes
        return output._replace(num_samples=batches.samples)

    # --- checkpoints --------------------------------------------------------------------------

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the generators of rank 0 on every rank, for they are equal."""
        if checkpoint is None:
            return
        paths = [path for name in RNG_STATES if (path := Path(checkpoint) / name).exists()]
        if not paths:
            return
        with safe_globals():
            saved = torch.load(max(paths, key=lambda path: path.stat().st_mtime), weights_only=True)
        device = torch.device(self.args.device)
        states = {"torch": saved["cpu"], "random": saved["python"], "numpy": saved["numpy"]}
        of_device = saved.get(device.type)
        if device.type != "cpu" and of_device is not None:
            states[device.type] = of_device[0] if isinstance(of_device, list) else of_device
        set_global_states(states, device)
        LoadedHere.restore = None  # the Trainer has loaded the first batch before this


def _is_own(method: Callable[..., Any]) -> bool:
    """Return whether a method of the Trainer was overridden by the user."""
    return not method.__module__.startswith("transformers.")


def _is_time(name: str) -> bool:
    """Return whether a value that the Trainer logs is a time, which differs between ranks."""
    return name.endswith(("_runtime", "_per_second")) or "_mem_" in name


def _add_exactly(parts: list[float], logged: Mapping[str, str]) -> float:
    """Return the exact sum of the parts of all ranks, rounded once.

    Args:
        parts: The parts of this rank.
        logged: What it has logged since the last step, by name.

    Raises:
        UsageError: Another rank has logged another value.
    """
    gather = find_gather()
    sums = compute_partial_sums(parts)
    if gather is None:
        return round_sum(sums)
    messages = gather(json.dumps([sums, dict(logged)]).encode(), "adding the losses of")
    everyone = [json.loads(message) for message in messages]
    first = everyone[0][1]
    for rank, (_, others) in enumerate(everyone):
        for name in first.keys() & others.keys():
            if others[name] != first[name]:
                raise UsageError(
                    f"ExactTrainer: {name} was logged as {first[name]} on rank 0 and as "
                    f"{others[name]} on rank {rank}, each computed from its own micro-batches: "
                    "return what is counted by compute_metrics, which gets all samples"
                )
    return round_sum([value for values, _ in everyone for value in values])


class _Batches(IterableDataset[Any]):
    """The batches of the training, after as many as the Trainer discards on resume.

    Attributes:
        loader: What loads the micro-batches.
        discarded: The number of batches that the next iteration yields only to be discarded.
    """

    def __init__(self, loader: MicrobatchLoader, epoch: int) -> None:
        self.loader = loader
        self._epoch = epoch
        self.discarded = 0
        try:
            length = len(loader)
        except TypeError:
            return  # the Trainer asks whether there is a length
        self.__class__ = _SizedBatches
        self.length = length

    def __iter__(self) -> Iterator[Microbatches]:
        """Yield the lists of micro-batches of one epoch."""
        epoch = self._epoch
        self._epoch = self._epoch + 1
        discarded = self.discarded
        self.discarded = 0
        yield from [Microbatches()] * discarded
        self.loader.set_epoch(epoch)
        yield from self.loader


class _SizedBatches(_Batches):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.length


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
