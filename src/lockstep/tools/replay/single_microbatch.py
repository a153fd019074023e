"""One micro-batch of a step, computed alone: under a debugger, or in anomaly mode.

    select          reduces the batch to this micro-batch
    recording       hooks, debugger, anomaly mode; ends the program after the micro-batch

Every micro-batch begins with the buffers and generators that it has in the whole step. So it
computes the same bits alone.
"""

from __future__ import annotations

import bdb
import contextlib
import pdb
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.data.microbatch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.kernel.step_context import StepContext, StepObserver
from lockstep.launcher.stacks import is_user_code
from lockstep.messages import log
from lockstep.model.fingerprinter import hookable_modules
from lockstep.tools.replay.result import ReplayRequest
from lockstep.training.trainer_hooks import SessionComplete

__all__ = ["DebuggerLeft", "LoneMicrobatch"]

FinishMicrobatch = Callable[
    [StepContext, float | None, tuple[int, ...] | None, tuple[str, ...]], None
]

INTERNAL = ["lockstep.*", "torch.nn.modules.module", "torch.utils.*", "torch._*", "contextlib"]
"""Modules that the debugger does not stop in."""


class LoneMicrobatch(StepObserver):
    """Computes one micro-batch of a step, and ends the program.

    Args:
        request: The request: which micro-batch, and what to do with it.
        called: The callable that the trainer calls: the model, or its compiled form.
        module: The model.
        finish: Called with the step, the loss (None for a micro-batch without weight, which is
            not computed), the indices of the samples (None if they are not known) and sentences
            about what was found.
    """

    def __init__(
        self,
        request: ReplayRequest,
        called: nn.Module,
        module: nn.Module,
        finish: FinishMicrobatch,
    ) -> None:
        self._request, self._called, self._module = request, called, module
        self._finish = finish
        self._loss: float | None = None
        self._samples: tuple[int, ...] | None = None
        self._remarks: list[str] = []
        self._has_found = False  # whether a module returned a non-finite value

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
            if self._request.anomaly:
                stack.enter_context(self._watching())
            yield
        self._finish(step, self._loss, self._samples, tuple(self._remarks))
        raise SessionComplete

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Find the first module with a non-finite output, and the first gradient that is NaN."""
        name = type(self._module).__name__
        handles = [
            module.register_forward_hook(partial(self._check_output, path))
            for path, module in hookable_modules(name, self._called, is_root=True)
        ]
        try:
            with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
                yield
            if not self._has_found:
                self._remarks.append(
                    "No module returned a non-finite value, and no gradient is NaN"
                )
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            self._remarks.append(f"In backward, {str(error).rstrip('.')}")
        finally:
            for handle in handles:
                handle.remove()

    def _check_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._has_found or torch.compiler.is_compiling() or is_in_backward():
            return
        if _is_finite(output):
            return
        self._has_found = True
        inputs = "finite inputs" if _is_finite(args) else "inputs that are non-finite, too"
        self._remarks.append(
            f"In forward, {name} ({type(module).__name__}) returned the first non-finite values, "
            f"from {inputs}"
        )

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss; the losses of several backward passes are added."""
        self._loss = (self._loss or 0.0) + float(loss.detach())

    def _describe_samples(self) -> str:
        """Return a sentence about the samples; "" if they are not known."""
        if self._samples is None:
            return ""
        number, listed = self._request.microbatch, ", ".join(map(str, self._samples))
        return f"micro-batch {number} has the samples {listed} of the dataset"


def _is_finite(value: Any) -> bool:
    tensors = [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
    return all(
        bool(tensor.isfinite().all())
        for tensor in tensors
        if tensor.is_floating_point() and tensor.layout is torch.strided
    )


class DebuggerLeft(BaseException):
    """The user left the debugger; unwinds the program, which cannot catch it as an Exception."""


class Debugger(pdb.Pdb):
    """pdb with a `where` command that shows only the user's frames and the current frame."""

    def print_stack_trace(self, *count: Any) -> None:
        """Print these frames, the newest last."""
        try:
            for frame, line in self.stack:
                if frame is self.curframe or is_user_code(frame.f_code.co_filename):
                    self.print_stack_entry((frame, line))
        except KeyboardInterrupt:
            pass


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
    debugger = Debugger(skip=INTERNAL)

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
