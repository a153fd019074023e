"""One micro-batch of a step, computed alone, possibly under a debugger.

    select          reduces the batch to this micro-batch
    recording       debugger; ends the program after the micro-batch

Every micro-batch begins with the buffers and generators that it has in the whole step. So it
computes the same bits alone.
"""

from __future__ import annotations

import bdb
import contextlib
import pdb
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_context import StepContext, StepObserver
from lockstep.messages import log
from lockstep.tools.replay.result import ReplayRequest
from lockstep.training.session import SessionComplete

__all__ = ["DebuggerLeft", "LoneMicrobatch"]

FinishMicrobatch = Callable[[StepContext, float | None, tuple[int, ...] | None], None]

INTERNAL = ["lockstep.*", "torch.nn.modules.module", "torch.utils.*", "torch._*", "contextlib"]
"""Modules that the debugger does not stop in."""


class LoneMicrobatch(StepObserver):
    """Computes one micro-batch of a step, and ends the program.

    Args:
        request: The request: which micro-batch, and what to do with it.
        called: The callable that the trainer calls: the model, or its compiled form.
        finish: Called with the step, the loss (None for a micro-batch without weight, which is
            not computed) and the indices of the samples (None if they are not known).
    """

    def __init__(
        self,
        request: ReplayRequest,
        called: nn.Module,
        finish: FinishMicrobatch,
    ) -> None:
        self._request = request
        self._called = called
        self._finish = finish
        self._loss: float | None = None
        self._samples: tuple[int, ...] | None = None

    def select(self, batch: Batch) -> Batch:
        """Return the batch reduced to the requested micro-batch.

        Raises:
            UsageError: The batch has fewer micro-batches.
        """
        number = self._request.microbatch
        chosen = tuple(
            microbatch for microbatch in batch.microbatches if microbatch.index == number
        )
        if not chosen:
            raise UsageError(
                f"--microbatch {number}: step {self._request.first} has {batch.leaves} "
                f"micro-batches; the last one is {batch.leaves - 1}"
            )
        self._samples = batch.sample_indices(chosen[0].index)
        return replace(batch, microbatches=chosen)

    @contextmanager
    def recording(
        self, step: StepContext, position: Callable[[], tuple[int, int] | None]
    ) -> Iterator[None]:
        """Compute the micro-batch in the body, then end the program.

        Raises:
            SessionComplete: It was computed.
        """
        step.observers.append(self)
        with ExitStack() as stack:
            if self._request.debug:
                stack.enter_context(debugging(self._called, self._describe_samples))
            yield
        self._finish(step, self._loss, self._samples)
        raise SessionComplete

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss; the losses of several backward passes are added."""
        self._loss = (self._loss or 0.0) + float(loss.detach())

    def _describe_samples(self) -> str:
        """Return a sentence about the samples; "" if they are not known."""
        if self._samples is None:
            return ""
        number = self._request.microbatch
        listed = ", ".join(map(str, self._samples))
        return f"micro-batch {number} has the samples {listed} of the dataset"


class DebuggerLeft(BaseException):
    """The user left the debugger; unwinds the program, which cannot catch it as an Exception."""


@contextmanager
def debugging(called: nn.Module, describe_samples: Callable[[], str]) -> Iterator[None]:
    """Stop in the debugger where the model's forward begins, and where an error is raised.

    Args:
        called: The callable that the trainer calls: the model, or its compiled form.
        describe_samples: Returns a sentence about the samples of the micro-batch, which is shown
            before the debugger; "" for none.

    Raises:
        DebuggerLeft: The debugger was left before the micro-batch was computed.
    """
    debugger = pdb.Pdb(skip=INTERNAL)

    def stop(module: nn.Module, args: Any) -> None:
        handle.remove()
        if sentence := describe_samples():
            log(sentence)
        debugger.set_trace(sys._getframe())

    handle = called.register_forward_pre_hook(stop)
    try:
        yield
    except bdb.BdbQuit:
        raise DebuggerLeft("the debugger was left before the micro-batch was computed") from None
    except Exception as error:
        traceback.print_exception(error)
        with contextlib.suppress(bdb.BdbQuit):
            pdb.post_mortem(error.__traceback__)
        raise
    finally:
        sys.settrace(None)
        handle.remove()
