"""The trainer proxy: the driver's view of one trainer per worker.

    driver     step(batch) ──the batch──> all workers
    workers    ls.Trainer on each: its own micro-batches, forward, backward, reduction and
               optimizer step; activations and gradients from worker to worker
    driver     <── loss, metrics: numbers

The workers run ordinary trainers, so results are bit-identical to those of a script.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from lockstep.data.dataloader import BatchOptions, EvaluationOptions
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.launcher.world import rank, world
from lockstep.model.deferred_init import BlocksLike, materialize_block
from lockstep.model.evaluation import Evaluation
from lockstep.tools.remote.serialization import serialize
from lockstep.tools.remote.worker_pool import WorkerPool
from lockstep.training.history import EpochResult, StepResult
from lockstep.training.trainer import Trainer

__all__ = ["TrainerProxy"]


class TrainerProxy:
    """Trainers on all workers of a driver, used like a single trainer; made by `Driver.trainer`."""

    def __init__(
        self, pool: WorkerPool, blocks: BlocksLike, seed: int, arguments: Mapping[str, Any]
    ) -> None:
        if arguments.get("checkpoint") is not None:
            raise UsageError(
                "the trainer of a driver takes no checkpoint=: save trainer.state_dict() in the "
                "driver, or train with a script and `lockstep run`"
            )
        self._pool = pool
        self._number = next(_numbers)
        pool.require_world()
        payload = serialize((drop_actor, (self._number,), {}))
        drop = {"kind": "call", "number": None, "payload": payload, "is_shared": False}
        weakref.finalize(self, pool.post_to_all, drop).atexit = False
        given = (self._number, blocks, seed, dict(arguments), pool.has_display)
        pool.call_all("the trainer", create_actor, given)

    def step(self, batch: Any) -> float:
        """Train on one global batch and return its loss.

        The batch is sent to all workers. With `train`, they load their own parts instead.

        Args:
            batch: As for `Trainer.step`.

        Raises:
            LockstepError: A worker's trainer failed.
        """
        return float(self._forward("step", batch))

    @property
    def last_result(self) -> StepResult:
        """The result of the latest step: loss, metrics, learning rate, times.

        Raises:
            LockstepError: No step was taken.
        """
        result: StepResult = self._call("last_result")
        return result

    def train(
        self,
        dataset: Callable[[], Any],
        batch_size: int,
        epochs: int,
        *,
        seed: int | None = None,
        on_epoch: Callable[[EpochResult], None] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[EpochResult]:
        """Train on data that the workers load themselves.

        Args:
            dataset: A callable that returns the dataset; called once on every worker.
            batch_size: Samples per global batch.
            epochs: Number of epochs.
            seed: Seed of the order of samples, as for `Trainer.batches`.
            on_epoch: Called in the driver after each epoch.
            **options: As for `Trainer.batches`.
        """
        self._call("load", dataset)
        results = []
        for left in range(epochs, 0, -1):
            results.append(self._call("train_epoch", batch_size, seed, options, left))
            if on_epoch is not None:
                on_epoch(results[-1])
        return results

    def evaluate(
        self,
        dataset: Callable[[], Any],
        batch_size: int,
        *,
        ema: bool = False,
        **options: Unpack[EvaluationOptions],
    ) -> Evaluation:
        """Return the mean loss and metrics over a dataset, each sample counted once.

        Args:
            dataset: A callable that returns the dataset; called once on every worker.
            batch_size: Samples per global batch.
            ema: As for `Trainer.evaluate`.
            **options: As for `Trainer.evaluate`.
        """
        given = {"ema": ema, **options}
        result: Evaluation = self._call("evaluate", "evaluate", dataset, batch_size, given)
        return result

    def predict(
        self,
        dataset: Callable[[], Any],
        batch_size: int,
        *,
        ema: bool = False,
        **options: Unpack[EvaluationOptions],
    ) -> Any:
        """Return the model's outputs for all samples, as `Trainer.predict`.

        Args:
            dataset: A callable that returns the dataset; called once on every worker.
            batch_size: Samples per global batch.
            ema: As for `Trainer.predict`.
            **options: As for `Trainer.predict`.
        """
        return self._call("evaluate", "predict", dataset, batch_size, {"ema": ema, **options})

    def __enter__(self) -> TrainerProxy:
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
        else:  # the others, which may have exited, write no record
            message = f"{type(error).__name__}: {error}"
            arguments: tuple[Any, ...] = (self._number, "call", "finish", ("failed", message), {})
            with contextlib.suppress(LockstepError):
                self._pool.calls.start([0], "finish", call_actor, arguments)[0].result()

    def digest(self) -> str:
        """As `Trainer.digest`."""
        return str(self._forward("digest"))

    def optimizer_digest(self) -> str:
        """As `Trainer.optimizer_digest`."""
        return str(self._forward("optimizer_digest"))

    def state_dict(self) -> dict[str, Any]:
        """As `Trainer.state_dict`."""
        return dict(self._forward("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Trainer.load_state_dict`."""
        self._forward("load_state_dict", state)

    def save_weights(self, path: str | Path, *, ema: bool = False) -> None:
        """As `Trainer.save_weights`."""
        self._forward("save_weights", path, ema=ema)

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """As `Trainer.finish`."""
        self._forward("finish", state, message)

    def _forward(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of every trainer; return rank 0's value."""
        return self._call("call", name, args, options)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of every actor; return rank 0's value."""
        self._pool.require_world()
        what = f"{TrainerActor.__name__}.{method}"
        return self._pool.call_all(what, call_actor, (self._number, method, *args))[0]


class TrainerActor:
    """One worker's trainer, with the methods that its driver calls."""

    def __init__(
        self, blocks: BlocksLike, seed: int, arguments: dict[str, Any], has_display: bool
    ) -> None:
        given = arguments.pop("callbacks", ())
        callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
        self._epochs: list[EpochResult] = []
        # The trainer materializes the blocks of a list on the workers of their stages.
        model = (
            blocks
            if isinstance(blocks, Sequence)
            else materialize_block(blocks, seed, 0, world().device)
        )
        self._trainer = Trainer(model, seed=seed, callbacks=[self, *callbacks], **arguments)
        self._dataset: Any = None
        if (progress := self._trainer.history.progress) is not None:
            progress.prints_lines = not has_display

    def on_epoch(self, result: EpochResult) -> None:
        """Keep the result of an epoch, for the driver."""
        self._epochs.append(result)

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the trainer; only rank 0 returns the value to the driver."""
        value = getattr(self._trainer, name)(*args, **options)
        return value if rank() == 0 else None

    def last_result(self) -> StepResult:
        """Return the result of the latest step."""
        return self._trainer.last_result

    def load(self, dataset: Callable[[], Any]) -> None:
        """Create the dataset of the following epochs."""
        self._dataset = make_dataset(dataset)

    def train_epoch(
        self, batch_size: int, seed: int | None, options: BatchOptions, left: int
    ) -> EpochResult:
        """Train one epoch of those that are left: the first one, or the next one."""
        epoch = self._epochs[-1].epoch + 1 if self._epochs else self._trainer.epoch
        if (progress := self._trainer.history.progress) is not None:
            progress.epochs = epoch + left
        for batch in self._trainer.batches(
            self._dataset, batch_size, seed=seed, epoch=epoch, **options
        ):
            self._trainer.step(batch)
        return self._epochs[-1]

    def evaluate(
        self, name: str, dataset: Callable[[], Any], batch_size: int, options: dict[str, Any]
    ) -> Any:
        """Evaluate this worker's part of a dataset, or predict it."""
        return self.call(name, (make_dataset(dataset), batch_size), options)


# --- called on the workers ------------------------------------------------------------------

_numbers = itertools.count()  # of the trainers of this driver
_actors: dict[int, TrainerActor] = {}  # of this worker


def create_actor(number: int, *given: Any) -> None:
    """Create trainer `number` on this worker, with the arguments of `TrainerActor`."""
    _actors[number] = TrainerActor(*given)


def call_actor(number: int, method: str, *args: Any) -> Any:
    """Call a method of trainer `number` on this worker."""
    return getattr(_actors[number], method)(*args)


def drop_actor(number: int) -> None:
    """Free trainer `number` on this worker, if there is one."""
    _actors.pop(number, None)


def make_dataset(factory: Any) -> Any:
    """Return the dataset that a callable creates; raise UsageError for a dataset itself."""
    if not callable(factory) or hasattr(factory, "__getitem__"):
        raise UsageError(
            f"pass the dataset as a callable that makes it on each worker, such as `lambda: "
            f"{type(factory).__name__}(...)`; the data itself would be sent to every worker"
        )
    return factory()
