"""The observation of a loop with `ls.exact` by a command, such as `lockstep check`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.checksum import digest, name_optimizer_tensors
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.step_context import Attempt, Position, StepContext
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.buffer_exchange import GroupExchange
from lockstep.model.group_exchange import GroupMessages
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.training.exact_step import ExactModel
from lockstep.training.trainer_hooks import ObservedTrainer, TrainerHooks

__all__ = ["ExactObservation"]


class ExactObservation:
    """The observed steps of one handle of `ls.exact`.

    Args:
        session: The command's access to the trainers of the script.
        model: What the handle trains.

    Raises:
        LayoutError: The command asks for pipeline stages or shared parameters.
    """

    def __init__(self, session: TrainerHooks, model: ExactModel) -> None:
        pipeline, is_shared = session.options(model.module, PipelineConfig())
        if pipeline.stages > 1 or is_shared:
            raise LayoutError("ls.exact trains whole models, without stages or shared parameters")
        share, group = model.share, model.group
        self._model, self._optimizers = model, list[Optimizer]()
        self._parallel = ParallelContext(
            microbatches=share.microbatches,
            rank=share.replica,
            device=model.parameters[0].device,
            group=group,
            peers=group,
            hosts=share.hosts,
            is_interleaved=share.is_interleaved,
            messages=GroupMessages(group),
            make_buffer_exchange=partial(GroupExchange, group),
        )
        self._observer = session.attach(
            ObservedTrainer(
                dist.get_backend(group) if dist.is_initialized() else "",
                self._parallel,
                model.module,
                model.module,
                True,
                partial(digest, model.module),
                lambda: digest(self._state()),
                self._state,
                is_exact=True,
            )
        )
        self._recording = ExitStack()
        self._step: StepContext | None = None
        self._result: StepResult | None = None

    def begin(self, number: int, position: Position) -> None:
        """Record a step that begins.

        Args:
            number: The number of the step.
            position: A function that returns the micro-batch and the stage that are computed.
        """
        self.commit(None)
        self._step = StepContext(Attempt(0, number, number), self._parallel)
        recorder = self._observer.begin_step(number)
        if recorder is not None:
            self._recording.enter_context(recorder.recording(self._step, position))

    def reduce(self, losses: dict[int, float], result: StepResult) -> None:
        """Record the gradients of the whole batch, and the losses of this rank's micro-batches."""
        assert self._step is not None
        for observer in self._step.observers:
            observer.record_reduction(losses)
        self._recording.close()
        self._result = result

    def commit(self, optimizer: Optimizer | None) -> None:
        """Report a step after its optimizer was called; None if it was not."""
        if optimizer is not None and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        result, self._result = self._result, None
        if result is not None:
            self._observer.commit(result)

    def _state(self) -> dict[str, Any]:
        """Return the state of the optimizers by the names of the parameters."""
        named = self._model.module.named_parameters()
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
        return name_optimizer_tensors(
            {
                names[parameter]: state
                for optimizer in self._optimizers
                for parameter, state in optimizer.state.items()
                if parameter in names
            }
        )
