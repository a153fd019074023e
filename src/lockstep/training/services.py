"""Services that the trainer and the handle of `ls.exact` share: record, state, checkpoints.

Both are front doors of one `lockstep.training.engine.Engine`, whose parts are protocols here, so
that a reader of a loop need not know the machinery behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn

from lockstep.checkpoint.stop_request import Finish, stopping
from lockstep.data.dataloader import resolve_data
from lockstep.data.loader import EpochBatches
from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.parallel_context import ParallelContext

__all__ = ["EngineParts", "SavedState", "Services"]

SavedState = Mapping[str, Any]
"""What a `state_dict()` returned."""


class EngineParts(Protocol):
    """The parts of `lockstep.training.engine.Engine` that services use."""

    is_in_session: bool
    parallel: Any
    setup: Any
    options: Any
    history: Any
    state: Any
    record: Any
    run: Any
    end: Any
    steps: Any
    evaluations: Any
    rounds: Any

    def settle(self) -> None:
        """Commit the last step of a script's loop, which is otherwise done at its next call."""

    def save_weights(self, path: Path, ema: bool) -> None:
        """Write the weights to a file from rank 0, unless a command observes the steps."""

    def make_batches(
        self,
        data: Mapping[str, Any],
        seed: int | None,
        epoch: int | None,
        finish: Finish,
    ) -> EpochBatches:
        """Return the global batches of one epoch, of which each rank loads its part."""


class Services:
    """The methods that the trainer and the handle of `ls.exact` have in common.

    Attributes:
        model: The model as it is called, possibly compiled.
        module: The model without the compiler's wrapper.
        parallel: The layout.
        seed: The seed of all random numbers.
        history: The history of the training.
        engine: The parts of the training; not for scripts.
    """

    def __init__(self, engine: EngineParts) -> None:
        self.engine = engine
        self._run = engine.run
        self.model: nn.Module = engine.setup.model
        self.module: nn.Module = engine.setup.module
        self.parallel: ParallelContext = engine.parallel
        self.seed: int = engine.options.seed
        self.history: Any = engine.history

    def _require_settled(self, call: str) -> None:
        """Raise UsageError if a step is open; a loop's step that has been prepared is committed."""
        self.engine.steps.require_closed(call)

    def _select_data(
        self, call: str, dataset: Any, batch_size: int | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options of the batches of an evaluation, and check that no step is open."""
        self._require_settled(call)
        return {"shuffle": False} | resolve_data(
            dataset, batch_size, {"seed": self.seed, **options}
        )

    def log(self, name: str, value: Any, kind: str = "scalar") -> None:
        """Record a value of your own at the latest step; call it on every rank.

        The value of rank 0 appears in the record and the report, and in TensorBoard and other
        dashboards. A resumed script does not record again what it has recorded.

        Args:
            name: The name, such as "temperature". A value of the same name and step replaces it.
            value: A number; a tensor or array for the other kinds.
            kind: "scalar"; "histogram", of the elements of `value`; or "image", of the shape
                (height, width) or (channels, height, width), with 1 or 3 channels, as uint8 or
                floats in [0, 1].

        Raises:
            UsageError: The value is not of this kind.
        """
        self._run.begin()
        if not self.is_replaying:
            self.history.log(name, value, kind)

    def finish(self, state: str = "done", message: str | None = None) -> None:
        """End the run: save the last checkpoint, and write the last line of the record.

        Call it on every rank if the trainer has checkpoints, and in elastic runs. If the record or
        the last checkpoint could not be written, such as on a full disk, the script goes on, and
        the process exits with status 1 at its end.

        Args:
            state: How the run ended, for the record: "done", "failed" or "stopped".
            message: Why, for the record.

        Raises:
            UsageError: A resumed script ended before it reached the position of the other run.
        """
        self.engine.end.finish(state, message)

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        steps: int = self.engine.state.position.steps
        return steps

    @property
    def epoch(self) -> int:
        """The number of the latest epoch that was started, from 0."""
        epoch: int = self.engine.state.position.epoch
        return epoch

    @property
    def resumed_from(self) -> int | None:
        """The step that the training was resumed from; None if it was not resumed."""
        steps: int | None = self._run.resumed_from
        return steps

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed script has not yet reached the place where the run was interrupted.

        Until then, calls have no effect and return what they returned in the interrupted run. Use
        it to leave out what should not be repeated, such as `print`.
        """
        return bool(self._run.is_replaying)

    @property
    def last_result(self) -> StepResult:
        """The result of the latest step, the same after resuming; its `loss` is that of `step`.

        After a loop over batches that a resumed script does not repeat, it is the result of the
        last step of that loop, without `ranks` and `losses`. Of a step outside of
        such a loop that is not repeated, only `step`, `epoch` and `loss` are known.

        Raises:
            UsageError: No step was taken.
        """
        if self.history.last is None:
            raise UsageError("last_result: no step has been taken")
        last: StepResult = self.history.last
        return last

    @property
    def folder(self) -> Path:
        """The folder of the run, the same on every rank; read it on every rank.

        It is a good place for files that belong to the run, such as the best weights. Reading it
        begins the run, so call `resume` before. Under `lockstep check` and `lockstep replay` it is
        a temporary folder.

        Raises:
            UsageError: The run has no folder, since it is not recorded.
        """
        self._run.begin()
        record = self.engine.record
        is_temporary = self.engine.is_in_session
        folder: Path = record.share_folder(self.parallel.group, is_temporary)
        return folder

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, as 64 hexadecimal digits.

        Call it on every rank if the trainer has pipeline stages or sharded storage. Equals
        `lockstep.digest(model)`.
        """
        self._require_settled("digest()")
        value: str = self._run.call_digest("digest", self.engine.state.digest)
        return value

    def optimizer_digest(self) -> str:
        """Return the SHA-256 of the optimizer's state, as 64 hexadecimal digits.

        Call it on every rank if the trainer has pipeline stages or sharded storage, or if you have
        changed the optimizer's state with shared storage.
        """
        self._require_settled("optimizer_digest()")
        self.engine.state.publish_edits()
        compute = self.engine.state.optimizer_digest
        value: str = self._run.call_digest("optimizer_digest", compute)
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training continues from, in any layout.

        The keys include "model", "buffers", "optimizer", "scheduler", "average",
        "module_settings" and "steps". "buffers" holds the tensors that no state dict of the model
        has: its non-persistent buffers, and the buffers and parameters of the loss and of
        `extra_modules`. "module_settings" holds what the script has changed in these modules since
        the trainer was constructed, such as `requires_grad`, modes and plain attributes. The
        position within an epoch is in `batches.state_dict()`.

        All tensors are copies. Call it on every rank if the trainer has pipeline stages or sharded
        storage, or if you have changed the optimizer's state with shared storage.
        """
        self._require_settled("state_dict()")
        self.engine.state.publish_edits()
        return copy.deepcopy(self.engine.state.state_dict())

    def load_state_dict(self, state: SavedState) -> None:
        """Load what `state_dict` returned in this or another layout; call it on every rank.

        The tensors of `state` are copied, so it can be loaded again later.

        Raises:
            UsageError: The state was saved with another seed or number of micro-batches.
        """
        self._require_settled("load_state_dict()")
        loaded = ("model", "buffers", "average")  # copied into the tensors that are there
        rest = {name: value for name, value in state.items() if name not in loaded}
        self.engine.state.load_state_dict({**state, **copy.deepcopy(rest)})

    def save_weights(self, path: str | Path, *, ema: bool = False) -> None:
        """Write the weights to a file from rank 0, atomically; call it on every rank.

        All ranks return when the file is written. `lockstep check` writes no file.

        Args:
            path: The file; its folder must exist. The suffixes .pt, .pth, .bin and .ckpt choose
                the format of `torch.load(path, weights_only=True)`, for which rank 0 gathers all
                weights; all others safetensors, written tensor by tensor. The suffix
                .safetensors.index.json writes an index, and parts of up to 5 GB.
            ema: Whether to write the averaged weights.

        Raises:
            FileError: The file could not be written; raised on every rank.
        """
        self._require_settled("save_weights()")

        with stopping(self.finish, self._run.safe_points.abandon):
            self._run.call("save", lambda: self.engine.save_weights(Path(path), ema))

    # --- checkpoints --------------------------------------------------------------------

    def resume(self, place: str | Path | None = None) -> None:
        """Continue an interrupted run from a checkpoint, with the bits of an uninterrupted run.

        Call it on every rank before the first batch. The script then makes its calls from the
        beginning: batches that were trained are not yielded again, evaluations return their
        recorded results, and weights that were saved are not saved again. The layout may be
        another one. See the guide on checkpoints.

        Args:
            place: A checkpoint, the folder of a run, or the name of a run in `runs`. None: the
                trainer's own folder; without a checkpoint there the run starts from its
                beginning.

        Raises:
            UsageError: The seed, the number of micro-batches, the model or the optimizer differs
                from that of the checkpoint; there is no checkpoint at `place`; or the script has
                already called `batches`, `step` or `evaluate`.
            FileError: Every checkpoint is damaged.
        """
        if not self.engine.is_in_session:
            self._run.resume(place)

    def __enter__(self) -> Self:
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
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")
