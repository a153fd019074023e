"""The trainer proxy: a trainer on every worker, and the driver's handle on all of them.

    driver     step(batch) ──cut──> micro-batches ──> their replica's workers
    workers    ls.Trainer on each: forward, backward, sums and optimizer there,
               activations and gradients from worker to worker
    driver     <── loss, metrics: numbers

The workers' trainers are those of any script, so the bits are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.data.microbatch import Batch, split_batch
from lockstep.errors import UsageError
from lockstep.launcher.world import rank, world
from lockstep.model.deferred_init import Blocks, awaken
from lockstep.model.evaluation import Evaluation
from lockstep.model.loss_weight import weight_of
from lockstep.remote.reference import Remote
from lockstep.remote.worker_pool import WorkerPool
from lockstep.training.history import EpochResult, StepResult
from lockstep.training.trainer import Trainer

__all__ = ["TrainerProxy"]


class TrainerProxy:
    """A training on all workers of a driver; made by `Driver.trainer`.

    `last` is the `StepResult` of the last step: loss, metrics, learning rate, times.
    """

    def __init__(
        self,
        pool: WorkerPool,
        blocks: Blocks,
        seed: int,
        microbatches: int,
        arguments: Mapping[str, Any],
    ) -> None:
        self.last: StepResult | None = None
        self._pool, self._microbatches = pool, microbatches
        self._stages = int(getattr(arguments.get("pipeline"), "stages", 1))
        self._whole = arguments["loss"] is None or bool(
            arguments.get("loss_weight") or weight_of(arguments["loss"])
        )
        given = (blocks, seed, {**arguments, "microbatches": microbatches})
        pool.require_world()
        self._parts: list[Remote] = pool.together(
            [
                pool.calls.start(each, "the trainer", TrainerActor, given, keep=True)
                for each in range(pool.size)
            ]
        )

    def step(self, batch: Any) -> float:
        """Train on one global batch and return its loss.

        `batch` is a pair (inputs, targets) of tensors, as for `Trainer.step`; each replica
        is sent its own micro-batches, with stages the inputs to its first and the targets
        to its last. Raises what a worker's trainer raises.
        """
        replicas = self._pool.size // self._stages
        batches = [
            split_batch(batch, self._microbatches, replicas, replica) for replica in range(replicas)
        ]
        sent = [
            (self._needed(each, position),) for each in batches for position in range(self._stages)
        ]
        results: list[StepResult] = self._on_each("step", sent)
        self.last = results[0]
        return self.last.loss

    def train(
        self,
        dataset: Callable[[], Any],
        batch_size: int,
        epochs: int,
        *,
        seed: int | None = None,
        on_epoch: Callable[[EpochResult], None] | None = None,
        **options: Any,
    ) -> list[EpochResult]:
        """Train `epochs` epochs on data that the workers load themselves.

        `dataset` is a callable, called once on every worker. `batch_size`, `seed` and
        the options are those of `Trainer.batches`. `on_epoch` is called here.
        """
        self._on_all("load", dataset)
        results = []
        for _ in range(epochs):
            results.append(self._on_all("train_epoch", batch_size, seed, options))
            if on_epoch is not None:
                on_epoch(results[-1])
        return results

    def evaluate(
        self, dataset: Callable[[], Any], batch_size: int, *, ema: bool = False, **options: Any
    ) -> Evaluation:
        """Return mean loss and metrics over a dataset, which each worker gets by `dataset()`."""
        result: Evaluation = self._on_all("evaluate", dataset, batch_size, ema, options)
        return result

    def digest(self) -> str:
        """Return the SHA-256 over parameters and buffers."""
        return str(self._on_all("digest"))

    def optimizer_digest(self) -> str:
        """Return the SHA-256 over the optimizer's state."""
        return str(self._on_all("optimizer_digest"))

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from, for any layout: it passes through the driver."""
        state: dict[str, Any] = self._on_all("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here or from `Trainer.state_dict`."""
        self._on_all("load_state_dict", state)

    def save_weights(self, path: str | Path, *, ema: bool = False) -> None:
        """Write the weights as safetensors, on rank 0's host."""
        self._on_all("save_weights", str(path), ema)

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """End the run: write the last line of the record, where there is one."""
        self._on_all("finish", state, message)

    def __enter__(self) -> TrainerProxy:
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

    def _needed(self, batch: Batch, position: int) -> Batch:
        """Return what the worker at `position` of a replica needs of the replica's batch.

        What gives a micro-batch its weight may look at all of it.
        """
        first, last = position == 0, position == self._stages - 1
        if (first and last) or (self._whole and (first or last)):
            return batch
        return replace(
            batch,
            microbatches=tuple(
                replace(each, data=_part(each.data, first, last)) for each in batch.microbatches
            ),
        )

    def _on_all(self, method: str, *args: Any) -> Any:
        """Call a method with the same arguments on every worker; return rank 0's value."""
        return self._on_each(method, [args] * self._pool.size)[0]

    def _on_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method != "finish":  # which closes the record also when the world has ended
            self._pool.require_world()
        started = [
            getattr(part, method).start(*each) for part, each in zip(self._parts, args, strict=True)
        ]
        return self._pool.together(started)


class TrainerActor:
    """One worker's trainer; what only rank 0 must return, only rank 0 sends to the driver."""

    def __init__(self, blocks: Blocks, seed: int, arguments: dict[str, Any]) -> None:
        given = arguments.pop("callbacks", ())
        callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
        self._epochs: list[EpochResult] = []
        # A list comes to life in the trainer, each block where it is held.
        model = blocks if isinstance(blocks, Sequence) else awaken(blocks, seed, 0, world().device)
        self._trainer = Trainer(model, seed=seed, callbacks=[self, *callbacks], **arguments)
        self._dataset: Any = None

    def on_epoch(self, result: EpochResult) -> None:
        """Keep the result of an epoch, for the driver."""
        self._epochs.append(result)

    def step(self, batch: Batch) -> StepResult:
        """Train on this worker's part of a batch."""
        self._trainer.step(batch)
        assert self._trainer.history.last is not None
        return replace(self._trainer.history.last)

    def load(self, dataset: Callable[[], Any]) -> None:
        """Get the data of the epochs to come."""
        self._dataset = made(dataset)

    def train_epoch(self, batch_size: int, seed: int | None, options: dict[str, Any]) -> Any:
        """Train one epoch: the first, or the one after the last."""
        epoch = self._epochs[-1].epoch + 1 if self._epochs else self._trainer.epoch
        for batch in self._trainer.batches(
            self._dataset, batch_size, seed=seed, epoch=epoch, **options
        ):
            self._trainer.step(batch)
        return self._epochs[-1]

    def evaluate(
        self,
        dataset: Callable[[], Any],
        batch_size: int,
        ema: bool,
        options: dict[str, Any],
    ) -> Evaluation:
        """Evaluate this worker's part of a dataset."""
        return self._trainer.evaluate(made(dataset), batch_size, ema=ema, **options)

    def digest(self) -> str:
        """Return the digest of the weights."""
        return self._trainer.digest()

    def optimizer_digest(self) -> str:
        """Return the digest of the optimizer's state."""
        return self._trainer.optimizer_digest()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the whole state, from rank 0."""
        state = self._trainer.state_dict()
        return state if rank() == 0 else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the whole state."""
        self._trainer.load_state_dict(state)

    def save_weights(self, path: str, ema: bool) -> None:
        """Let rank 0 write the weights."""
        self._trainer.save_weights(path, ema=ema)

    def finish(self, state: str, message: str | None) -> None:
        """End the run."""
        self._trainer.finish(state, message)


def _part(data: Any, inputs: bool, targets: bool) -> Any:
    """Return the inputs or the targets of a micro-batch's data, or neither."""
    if not isinstance(data, (tuple, list)) or not (inputs or targets):
        return data if inputs or targets else None
    return (*data[:-1], None) if inputs else (*(None for _ in data[:-1]), data[-1])


def made(dataset: Any) -> Any:
    """Return the dataset that a callable makes."""
    if not callable(dataset) or hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"give the dataset as a callable that makes it on each worker, such as `lambda: "
            f"{type(dataset).__name__}(...)`, not as data, which every worker would be sent"
        )
    return dataset()
